"""Text stages: which ensembles are text models, and the roles of the models in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from genserve.config.model_config import ModelConfig
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry
from genserve.textmodel.logits_config import CacheKind, cache_kind, is_logits_stage

# The stages of a text model: "tokenizer", "logits" and "decoder".
TextStages: TypeAlias = Mapping[str, ModelEntry]

_DECODE = re.compile(r"^\s*async\s+def\s+decode\b", re.MULTILINE)
_PLAIN_CLASS = re.compile(r"^class\s+TritonPythonModel\s*(\(\s*\))?\s*:", re.MULTILINE)
_EXECUTE = re.compile(r"^\s*(async\s+)?def\s+execute\b|\bexecute\s*=", re.MULTILINE)
# The stages of a text model, by backend.
_STAGES = {"tokenizer": "tokenizer", "onnxruntime": "logits", "pytorch": "logits", "python": "decoder"}


class Role(StrEnum):
    """The role of a model in a text model, whose stages run in one engine."""

    ENSEMBLE = "text model"
    TOKENIZER = "tokenizer stage"
    LOGITS = "logits stage"                         # with a KV cache
    LOGITS_WITHOUT_CACHE = "logits stage without a KV cache"
    DECODER = "decoder stage"


def text_stages(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> TextStages | None:
    """Return the stages of a text model, each with the version that its step names; None: it is not one.

    A text model is an ensemble of a tokenizer, a logits stage and a decoder stage, see `is_decoder`.
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
    if stages.keys() != set(_STAGES.values()) or not _is_decoder(stages["decoder"]):
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


def role_of(config: ModelConfig, models: Mapping[str, TextStages]) -> Role | None:
    """Return the role of a model in the text models of its repository; None: it has none.

    Args:
        config: the config of the model.
        models: the stages of all text models, by name.
    """
    if config.name in models:
        return Role.ENSEMBLE
    of_logits = Role.LOGITS_WITHOUT_CACHE if cache_kind(config) is CacheKind.NONE else Role.LOGITS
    if is_logits_stage(config):
        return of_logits
    roles = {"tokenizer": Role.TOKENIZER, "logits": of_logits, "decoder": Role.DECODER}
    for stages in models.values():
        for name, stage in stages.items():
            if stage.name == config.name:
                return roles[name]
    return None


def is_decoder(path: Path) -> bool:
    """Whether a model.py is a decoder stage: it has an `async def decode`, or is no model of Triton's.

    The latter has no `execute`, and its class none that it could inherit; its decoding loop is the default.
    """
    source = path.read_text(encoding="utf-8", errors="replace")
    return bool(_DECODE.search(source) or (_PLAIN_CLASS.search(source) and not _EXECUTE.search(source)))


def _has_class(path: Path) -> bool:
    return "TritonPythonModel" in path.read_text(encoding="utf-8", errors="replace")


def _is_decoder(decoder: ModelEntry) -> bool:
    if decoder.config is None:
        return False
    try:
        file = decoder.latest_version() / (decoder.config.default_model_filename or "model.py")
    except RepositoryError:
        return False
    try:
        # A file that is half written is no model of any kind: its load fails, and the loaded one stays.
        return not file.is_file() or is_decoder(file) or not _has_class(file)
    except OSError:
        return True     # loading then reports the file, which is missing or cannot be read
