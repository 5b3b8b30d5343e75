"""Preparation: from a model's folder to the config it is served by, completed and normalised."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from genserve.backends.registry import find_backend
from genserve.config.backends import deduce_backend
from genserve.config.fault import first_error
from genserve.config.from_json import read_config_json
from genserve.config.from_message import model_config
from genserve.config.model_config import ModelConfig
from genserve.config.normalise import normalise
from genserve.repository.devices import num_gpus
from genserve.repository.index import ModelEntry, served_versions
from genserve.repository.options import RepositoryOptions

__all__ = ["Prepared", "prepare"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that is ready to be loaded."""

    config: ModelConfig             # normalised
    path: Path                      # its folder
    versions: tuple[int, ...]       # to be served, ascending

    @property
    def name(self) -> str:
        """Of the model."""
        return self.config.name


def prepare(entry: ModelEntry, *, options: RepositoryOptions, config_json: str = "") -> Prepared:
    """Read, complete, check and normalise the config of a model.

    Args:
        entry: its folder.
        options: of the repository.
        config_json: a config to use in place of the folder's, as the load call has it; empty: none.

    Raises:
        RepositoryError: the config has an error, or contradicts the model's file, or leaves no version.
    """
    message = type(entry.parsed.message)()
    if config_json:
        message.CopyFrom(read_config_json(config_json, name=entry.name))
    else:
        message.CopyFrom(entry.parsed.message)
    deduce_backend(message, entry.path)
    versions: tuple[int, ...] = (1,)  # an ensemble needs no folders
    if message.platform != "ensemble" or entry.versions:
        versions = served_versions(model_config(message, name=entry.name), entry.versions)
    if message.platform != "ensemble" and not options.strict_config:
        backend = find_backend(message.backend, backend_directory=options.backend_directory)
        backend.auto_complete(message, path=entry.path, version=versions[-1])
    faults = normalise(
        message, model_folder=entry.path, gpus=num_gpus(), strict_placement=options.strict_placement
    )
    config = model_config(message, name=entry.name)
    error = first_error(faults)
    if error is not None:
        raise error
    for fault in faults:
        logger.warning("%s: %s (%s)", fault.where, fault.message, fault.remedy)
    return Prepared(config=config, path=entry.path, versions=versions)
