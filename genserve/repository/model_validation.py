"""Model validation: the list of all rules, and the class that runs them for the models of a repository.

A rule is a function that yields diagnostics. Its argument says which facts it needs: the config of a model
(`ConfigFacts`), its config and files (`FileFacts`), or the other models of the repository too (`ModelFacts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from genserve.config.backends import known_backends
from genserve.config.diagnostics import Diagnostic, first_error
from genserve.config.model_config import ModelConfig
from genserve.config.parse import ParsedConfig, config_of
from genserve.errors import ConfigError, RepositoryError
from genserve.repository.index import ModelEntry, scan, served_versions, unreadable_folder
from genserve.repository.rules import (
    adapter_rules,
    config_rules,
    ensemble_rules,
    file_rules,
    parameter_rules,
    sequence_rules,
    size_rules,
    source_rules,
    stage_rules,
    supported_fields,
    tensor_rules,
)
from genserve.repository.rules.facts import ConfigFacts, FileFacts, ModelFacts
from genserve.repository.text_stages import Role, role_of, text_models

logger = logging.getLogger(__name__)

_Facts = TypeVar("_Facts", bound=ConfigFacts)
Rules = tuple[Callable[[_Facts], Iterable[Diagnostic]], ...]

# The rules in the order in which a load runs them, and `genserve check` reports them.
# As in Triton, a model that violates one of the first two lists is not polled: it gets no version.
CONFIG_RULES: Rules[ConfigFacts] = (
    config_rules.check_name,
    config_rules.check_backend,
    config_rules.check_batch_size,
    config_rules.check_ensemble_fields,
    tensor_rules.check_tensors,
    tensor_rules.check_batch_tensors,
    parameter_rules.check_parameters,
    config_rules.check_dynamic_batching,
    sequence_rules.check_sequence_batching,
    config_rules.check_response_cache,
    config_rules.check_instance_groups,
    config_rules.check_accelerators,
    tensor_rules.check_warmups,
    config_rules.check_metrics,
    supported_fields.check_fields,
)
ENSEMBLE_RULES: Rules[ConfigFacts] = (ensemble_rules.check_steps, ensemble_rules.check_graph)
# An ensemble is validated against the models of its steps once they are loaded.
STEP_RULES: Rules[ModelFacts] = (
    ensemble_rules.check_step_models,
    ensemble_rules.check_circle,
    ensemble_rules.check_consistency,
    ensemble_rules.check_decoupling,
)
# A model that violates one of the next rules has an unavailable version in the index.
LOAD_RULES: Rules[ModelFacts] = (
    file_rules.check_versions,
    stage_rules.check_inflight_requests,
    file_rules.check_placeholders,
    source_rules.check_plugins,
    file_rules.check_missing_files,
    stage_rules.check_drafts,
    stage_rules.check_stage,
    adapter_rules.check_adapter,
    size_rules.check_sizes,
)
# `genserve check` alone runs these: a load opens the files, and reports the same errors.
SOURCE_RULES: Rules[FileFacts] = (source_rules.check_sources,)
CONTENT_RULES: Rules[FileFacts] = (file_rules.check_contents,)


class Validator:
    """Runs the rules for the models of one scan; the rules of configs run once for each model.

    Attributes:
        entries: all models of the repository, by name.
        text_models: the stages of the text models among them, by name.
        adapters: the bases of the adapters among them, by name; a base may be missing, or no text model.
    """

    def __init__(self, entries: Mapping[str, ModelEntry], *, backend_folders: Iterable[Path] = ()) -> None:
        """Find the text models, for which their model.py are read.

        Args:
            entries: all models of the repository, by name.
            backend_folders: the folders with backends written in Python.
        """
        self.entries = entries
        self.text_models = text_models(entries)
        self.adapters = {
            name: entry.base_model for name, entry in entries.items() if entry.base_model is not None
        }
        self._backends = known_backends(backend_folders)
        # The diagnostics of the config and of an ensemble's steps by themselves, by model.
        self._polled: dict[str, tuple[tuple[Diagnostic, ...], tuple[Diagnostic, ...]]] = {}
        self._unreadable: set[str] = set()      # models with files that the rules of configs could not read

    def role(self, entry: ModelEntry) -> Role | None:
        """Return the role of a model in a text model; None: it has none."""
        return None if entry.config is None else role_of(entry.config, self.text_models)

    def config_diagnostics(self, entry: ModelEntry) -> tuple[Diagnostic, ...]:
        """Return why a config cannot be read, and what the rules of configs say about it."""
        return self._poll(entry)[0]

    def config_error(self, entry: ModelEntry) -> ConfigError | None:
        """Return the first error of a config by itself; None: it has none."""
        return first_error(self.config_diagnostics(entry))

    def poll_error(self, entry: ModelEntry) -> ConfigError | None:
        """Return the error for which Triton does not poll a model: no file and no other model can cure it."""
        of_config, of_ensemble = self._poll(entry)
        return first_error(one for one in (*of_config, *of_ensemble) if not one.at_load)

    def step_error(self, entry: ModelEntry) -> ConfigError | None:
        """Return the first error between an ensemble and the models of its steps; None: there is none."""
        return first_error(self._step_diagnostics(entry))

    def load_diagnostics(self, entry: ModelEntry) -> tuple[Diagnostic, ...]:
        """Return what loading a model reports before its backend completes the config."""
        return self._run(LOAD_RULES, entry)

    def completed_diagnostics(self, entry: ModelEntry, message: Any) -> tuple[Diagnostic, ...]:
        """Return what the rules of configs say after a backend may have completed a config.

        Args:
            entry: the model, with its config as it is written.
            message: the `inference.ModelConfig` after completion.
        """
        config, may_be_completed = entry.config, tensor_rules.may_be_completed
        if config is not None and message == config.message and not may_be_completed(config, entry.path):
            return self.config_diagnostics(entry)
        parsed = config_of(
            message, path=entry.parsed.path, folder=entry.path, source_map=entry.parsed.source_map
        )
        return _config_diagnostics(parsed, entry.path, self._backends, is_completed=True)

    def diagnostics(self, entry: ModelEntry) -> tuple[Diagnostic, ...]:
        """Return all diagnostics of a model except `file_diagnostics`, in the order of the rules."""
        return (
            *chain.from_iterable(self._poll(entry)),
            *self._step_diagnostics(entry),
            *self.load_diagnostics(entry),
        )

    def file_diagnostics(self, entry: ModelEntry, *, is_valid: bool) -> tuple[Diagnostic, ...]:
        """Return the errors in the files of a model that a load reports when it opens them.

        Args:
            entry: the model.
            is_valid: whether the model has no other error; the content of missing files is not looked at.
        """
        return self._run((*SOURCE_RULES, *CONTENT_RULES) if is_valid else SOURCE_RULES, entry)

    def _poll(self, entry: ModelEntry) -> tuple[tuple[Diagnostic, ...], tuple[Diagnostic, ...]]:
        if entry.name not in self._polled:
            try:
                of_config = _config_diagnostics(entry.parsed, entry.path, self._backends)
            except OSError as error:
                self._unreadable.add(entry.name)
                of_config = unreadable_folder(entry.path, error).diagnostics
            of_ensemble = self._run(ENSEMBLE_RULES, entry) if entry.is_ensemble else ()
            self._polled[entry.name] = of_config, of_ensemble
        return self._polled[entry.name]

    def _step_diagnostics(self, entry: ModelEntry) -> tuple[Diagnostic, ...]:
        return self._run(STEP_RULES, entry) if entry.is_ensemble else ()

    def _run(self, rules: Rules[ModelFacts], entry: ModelEntry) -> tuple[Diagnostic, ...]:
        if entry.config is None or entry.name in self._unreadable:
            return ()
        return _run(rules, self._facts(entry, entry.config))

    def _facts(self, entry: ModelEntry, config: ModelConfig) -> ModelFacts:
        versions = entry.versions
        return ModelFacts(
            parsed=entry.parsed,
            config=config,
            folder=entry.path,
            backends=self._backends,
            versions=versions,
            served=_served(entry, config, versions),
            entry=entry,
            entries=self.entries,
            text_models=self.text_models,
            role=self.role(entry),
        )


def _run(rules: Rules[_Facts], facts: _Facts) -> tuple[Diagnostic, ...]:
    return tuple(diagnostic for rule in rules for diagnostic in rule(facts))


def _config_diagnostics(
    parsed: ParsedConfig, folder: Path, backends: tuple[str, ...], *, is_completed: bool = False
) -> tuple[Diagnostic, ...]:
    if parsed.config is None:
        return parsed.diagnostics
    facts = ConfigFacts(
        parsed=parsed, config=parsed.config, folder=folder, backends=backends, is_completed=is_completed
    )
    return (*parsed.diagnostics, *_run(CONFIG_RULES, facts))


def _served(entry: ModelEntry, config: ModelConfig, versions: Iterable[int]) -> tuple[int, ...]:
    """Return the versions that a load opens; none where the version policy is wrong."""
    try:
        served = served_versions(config, versions)
    except RepositoryError:
        return ()
    return tuple(version for version in served if entry.wanted_version in (-1, version))


def valid_config(parsed: ParsedConfig) -> ModelConfig:
    """Return the values of a config that satisfies the rules of configs.

    Raises:
        ConfigError: the config cannot be read, or violates a rule; the message begins with its position.
    """
    error = first_error(_config_diagnostics(parsed, parsed.path.parent, known_backends()))
    if error is not None:
        raise error
    assert parsed.config is not None  # or there would be an error
    return parsed.config


def repository_diagnostics(
    roots: Iterable[Path], *, config_name: str = "", backend_folders: Iterable[Path] = ()
) -> dict[str, tuple[Diagnostic, ...]]:
    """Return the diagnostics of each model of one or more repositories, by name; empty: none.

    Args:
        roots: the repositories.
        config_name: see `scan`.
        backend_folders: the folders with backends written in Python.

    Raises:
        RepositoryError: a root is not a folder.
    """
    roots = list(roots)
    validator = Validator(scan(roots, config_name=config_name), backend_folders=backend_folders)
    real_roots = [root.resolve() for root in roots]
    found: dict[str, tuple[Diagnostic, ...]] = {}
    for name, entry in validator.entries.items():
        diagnostics = validator.diagnostics(entry)
        # A missing file or a wrong config would be reported twice.
        in_files = validator.file_diagnostics(entry, is_valid=first_error(diagnostics) is None)
        found[name] = (*diagnostics, *in_files, *file_rules.link_diagnostics(entry.path, real_roots))
    return found


def accept(diagnostics: Iterable[Diagnostic]) -> None:
    """Raise the first error among the diagnostics; without errors, log the warnings.

    Raises:
        ConfigError: the first error.
    """
    known = list(diagnostics)
    error = first_error(known)
    if error is not None:
        raise error
    for diagnostic in known:
        logger.warning("%s: %s (%s)", diagnostic.where, diagnostic.message, diagnostic.remedy)
