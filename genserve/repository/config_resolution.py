"""Config resolution: completes, validates and normalises configs, in this order for every model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from genserve.backends.registry import find_backend
from genserve.config.diagnostics import Diagnostic, Severity, first_error
from genserve.config.model_config import ModelConfig
from genserve.config.normalise import normalise, num_gpus, renumber_gpus
from genserve.config.schema import model_config, new_model_config
from genserve.errors import ConfigError
from genserve.repository.index import ModelEntry, is_decoupled, served_versions
from genserve.repository.model_validation import Validator
from genserve.repository.options import RepositoryOptions
from genserve.repository.text_stages import Role
from genserve.textmodel.logits_runtime import gpu_obstacle

logger = logging.getLogger(__name__)

_LOGITS = (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model whose config has no errors, is complete and is normalised.

    Attributes:
        path: the folder of the model.
        versions: the versions to serve, ascending; only one if the model runs in a text engine.
        role: the model's role in a text model; None: no role.
        stages: the stages of a text model by "tokenizer", "logits" and "decoder"; empty for other models.
        draft: the stages of the text model that drafts tokens for this logits stage; empty: no model drafts.
        warnings: the warnings about the model and its stages.
    """

    config: ModelConfig
    path: Path
    versions: tuple[int, ...]
    role: Role | None = None
    stages: Mapping[str, ResolvedModel] = field(default_factory=dict)
    draft: Mapping[str, ResolvedModel] = field(default_factory=dict)
    warnings: tuple[Diagnostic, ...] = ()

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.config.name

    @property
    def runs_in_engine(self) -> bool:
        """Whether a text engine runs the model, and not instances of a backend or an ensemble's graph."""
        return self.role not in (None, Role.TOKENIZER) or self.config.base_model is not None


def resolve_model(entry: ModelEntry, validator: Validator, *, options: RepositoryOptions) -> ResolvedModel:
    """Complete, validate and normalise the config of a model, and the configs of a text model's stages.

    Raises:
        RepositoryError: the config of the model or a stage has an error, contradicts the model's file, or
            leaves no version to serve.
        MissingDependency: a library is not installed that decides whether the model runs on a GPU.
    """
    resolved = _resolve(entry, validator, options=options)
    if resolved.role is not Role.ENSEMBLE:
        return resolved
    stages = {
        name: _resolve(stage, validator, options=options, on_cpu=name != "logits")
        for name, stage in validator.text_models[entry.name].items()
    }
    draft = validator.text_models.get(_draft_name(stages["logits"].config), {})
    drafts = {name: _resolve(stage, validator, options=options, on_cpu=True) for name, stage in draft.items()}
    stages["logits"] = replace(stages["logits"], draft=drafts)
    warnings = [warning for stage in (*stages.values(), *drafts.values()) for warning in stage.warnings]
    return replace(resolved, stages=stages, warnings=(*resolved.warnings, *warnings))


def _draft_name(config: ModelConfig) -> str:
    """Return the text model that drafts for a logits stage; empty: none."""
    if config.parameters.get("speculation") == "none":
        return ""
    return config.parameters.get("draft_model", "")


def _resolve(
    entry: ModelEntry, validator: Validator, *, options: RepositoryOptions, on_cpu: bool = False
) -> ResolvedModel:
    _raise(validator.poll_error(entry))
    assert entry.config is not None     # or there would be an error
    found = list(validator.load_diagnostics(entry))
    _raise(first_error(found))
    role = validator.role(entry)
    versions = _versions(entry, entry.config, role)
    message = new_model_config()
    message.CopyFrom(entry.config.message)
    _complete(message, entry, version=versions[-1], options=options)
    found += validator.completed_diagnostics(entry, message)
    _raise(first_error(found))
    # The ensemble of a text model may be configured to give one response, though its decoder is decoupled.
    if message.platform == "ensemble" and role is not Role.ENSEMBLE:
        message.model_transaction_policy.decoupled = is_decoupled(entry, validator.entries)
    if on_cpu or role is Role.DECODER:     # whatever it asks for; the rules of stages report another `kind`
        normalise(message, model_folder=entry.path, gpus=0)
    else:
        found += _normalise(message, entry, role, version=versions[-1], options=options)
    _raise(first_error(found))
    return ResolvedModel(
        config=model_config(message, name=entry.name),
        path=entry.path,
        versions=versions,
        role=role,
        warnings=tuple(found),
    )


def _raise(error: ConfigError | None) -> None:
    if error is not None:
        raise error


def _versions(entry: ModelEntry, config: ModelConfig, role: Role | None) -> tuple[int, ...]:
    if entry.is_ensemble and not entry.versions:
        return (1,)     # an ensemble needs no folders
    is_adapter = entry.base_model is not None       # of which its base has one of a name
    if role in (None, Role.TOKENIZER) and entry.wanted_version == -1 and not is_adapter:
        return served_versions(config, entry.versions)
    return (int(entry.latest_version().name),)


def _complete(message: Any, entry: ModelEntry, *, version: int, options: RepositoryOptions) -> None:
    """Let the backend complete the config from the model's file."""
    if message.platform == "ensemble" or message.backend == "adapter" or options.strict_config:
        return
    backend = find_backend(message.backend, backend_directory=options.backend_directory)
    backend.auto_complete(
        message, path=entry.path, version=version, default_max_batch_size=options.default_max_batch_size
    )


def _normalise(
    message: Any, entry: ModelEntry, role: Role | None, *, version: int, options: RepositoryOptions
) -> list[Diagnostic]:
    """Normalise a config, which chooses its devices; return the groups that do not run where they ask to."""
    if options.renumber_gpus:
        renumber_gpus(message)
    written = new_model_config()
    written.CopyFrom(message)
    found = normalise(
        message, model_folder=entry.path, gpus=num_gpus(), strict_placement=options.strict_placement
    )
    group = message.instance_group[0] if message.instance_group else None
    if role not in _LOGITS or group is None or group.kind != group.KIND_GPU:
        return [*found]
    obstacle = gpu_obstacle(model_config(message, name=entry.name), entry.path / str(version))
    if obstacle is None:
        return [*found]
    message.CopyFrom(written)
    normalise(message, model_folder=entry.path, gpus=0)
    text = f"model {entry.name} cannot run on a GPU: {obstacle.reason}; it runs on the CPU"
    if not any(group.kind == group.KIND_GPU for group in written.instance_group):
        logger.info("%s (%s)", text, obstacle.remedy)
        return [*found]
    severity = Severity.ERROR if options.strict_placement else Severity.WARNING
    return [*found, entry.parsed.diagnostic(severity, "instance_group", text, remedy=obstacle.remedy)]
