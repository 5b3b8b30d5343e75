"""Text stages: which ensembles are text models, and the roles of the models in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from genserve.config.model_config import ModelConfig
from genserve.config.supported_fields import Role
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry
from genserve.repository.source_rules import decodes
from genserve.textmodel.logits_config import CacheKind, cache_kind, is_logits_stage

TextStages: TypeAlias = Mapping[str, ModelEntry]  # of a text model: "tokenizer", "logits", "decoder"

# The stages of a text model, by backend.
_STAGES = {"tokenizer": "tokenizer", "onnxruntime": "logits", "pytorch": "logits", "python": "decoder"}


def text_stages(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> TextStages | None:
    """Return the stages of a text model, each with the version that its step names; None: it is not one.

    A text model is an ensemble of a tokenizer, a logits stage and a model.py with an `async def decode`.
    """
    steps = entry.config.ensemble_steps if entry.config else ()
    models = [
        replace(entries[step.model_name], wanted_version=step.model_version)
        for step in steps
        if step.model_name in entries
    ]
    stages = {_STAGES.get(model.config.backend, ""): model for model in models if model.config}
    if len(steps) != len(stages):
        return None
    if stages.keys() != set(_STAGES.values()) or not _decodes(stages["decoder"]):
        return None
    return stages


def text_models(entries: Mapping[str, ModelEntry]) -> dict[str, TextStages]:
    """Return the stages of all text models, by name. Reads their model.py: call it once for each scan."""
    found = {name: text_stages(entry, entries) for name, entry in entries.items()}
    return {name: stages for name, stages in found.items() if stages}


def stage_owners(models: Mapping[str, TextStages]) -> dict[str, str]:
    """Return, by name of a logits or decoder stage, the text model whose engine runs it."""
    owners: dict[str, str] = {}
    for name, stages in models.items():
        for stage in ("logits", "decoder"):
            owners.setdefault(stages[stage].name, name)
    return owners


def role_of(entry: ModelEntry, config: ModelConfig, entries: Mapping[str, ModelEntry]) -> Role | None:
    """Return the role of a model in the text models that it is part of; None: it is part of none."""
    if entry.is_ensemble:
        return Role.ENSEMBLE if text_stages(entry, entries) else None
    of_logits = Role.LOGITS_WITHOUT_CACHE if cache_kind(config) is CacheKind.NONE else Role.LOGITS
    if is_logits_stage(config):
        return of_logits
    roles = {"tokenizer": Role.TOKENIZER, "logits": of_logits, "decoder": Role.DECODER}
    for ensemble in entries.values():
        steps = ensemble.config.ensemble_steps if ensemble.config else ()
        if any(step.model_name == entry.name for step in steps):
            for name, stage in (text_stages(ensemble, entries) or {}).items():
                if stage.name == entry.name:
                    return roles[name]
    return None


def _decodes(decoder: ModelEntry) -> bool:
    if decoder.config is None:
        return False
    try:
        file = decoder.latest_version() / (decoder.config.default_model_filename or "model.py")
    except RepositoryError:
        return False
    if not file.is_file():
        return True  # loading then reports the missing file
    return decodes(file)
