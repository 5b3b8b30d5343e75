"""Preparation: from a model's folder to the config it is served by, completed and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genserve.backends.registry import find_backend
from genserve.config.backends import deduce_backend, known_backends
from genserve.config.config_json import read_config_json
from genserve.config.diagnostics import first_error
from genserve.config.model_config import ModelConfig
from genserve.config.normalise import normalise, num_gpus
from genserve.config.parse import ParsedConfig, inspect_message
from genserve.config.schema import model_config, new_model_config
from genserve.repository.ensemble_rules import ensemble_diagnostics
from genserve.repository.ensemble_steps import is_decoupled
from genserve.repository.index import ModelEntry, served_versions
from genserve.repository.model_validation import accept
from genserve.repository.options import RepositoryOptions

__all__ = ["Prepared", "check_usable", "prepare", "with_config"]


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


def with_config(entry: ModelEntry, config_json: str, *, options: RepositoryOptions) -> ModelEntry:
    """Return a model with another config than its folder has, as the load call brings it.

    Raises:
        RepositoryError: it is not JSON, or not of the schema.
    """
    message = read_config_json(config_json, name=entry.name)
    return replace(entry, parsed=_judged(message, entry, options=options))


def check_usable(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> None:
    """Refuse a config that is wrong whatever the model's files say. The arguments are those of `prepare`.

    Raises:
        RepositoryError: its first error.
    """
    diagnostics = (*entry.parsed.diagnostics, *ensemble_diagnostics(entry, entries))
    error = first_error(diagnostic for diagnostic in diagnostics if not diagnostic.at_load)
    if error is not None:
        raise error


def prepare(
    entry: ModelEntry,
    entries: Mapping[str, ModelEntry],
    *,
    options: RepositoryOptions,
) -> Prepared:
    """Read, complete, check and normalise the config of a model; its warnings are logged.

    Args:
        entry: its folder.
        entries: all models of the repository, by name.
        options: of the repository.

    Raises:
        RepositoryError: the config has an error, or contradicts the model's file, or leaves no version.
    """
    if entry.parsed.message is None:
        raise first_error(entry.parsed.diagnostics) or AssertionError(entry.name)
    message = new_model_config()
    message.CopyFrom(entry.parsed.message)
    message.name = message.name or entry.name
    deduce_backend(message, entry.path)
    versions: tuple[int, ...] = (1,)  # an ensemble needs no folders
    if message.platform != "ensemble" or entry.versions:
        versions = served_versions(model_config(message, name=entry.name), entry.versions)
    if message.platform != "ensemble" and not options.strict_config:
        backend = find_backend(message.backend, backend_directory=options.backend_directory)
        backend.auto_complete(
            message,
            path=entry.path,
            version=versions[-1],
            default_max_batch_size=options.default_max_batch_size,
        )
    diagnostics = [*_judged(message, entry, options=options, completed=True).diagnostics]
    diagnostics += normalise(
        message, model_folder=entry.path, gpus=num_gpus(), strict_placement=options.strict_placement
    )
    if message.platform == "ensemble":
        message.model_transaction_policy.decoupled = is_decoupled(entry, entries)
    accept(diagnostics)
    return Prepared(config=model_config(message, name=entry.name), path=entry.path, versions=versions)


def _judged(
    message: Any, entry: ModelEntry, *, options: RepositoryOptions, completed: bool = False
) -> ParsedConfig:
    return inspect_message(
        message,
        path=entry.parsed.path,
        folder=entry.path,
        backends=known_backends([options.backend_directory] if options.backend_directory else ()),
        source_map=entry.parsed.source.source_map if completed else None,
        completed=completed,
    )
