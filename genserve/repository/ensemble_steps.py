"""Ensemble steps: the models that an ensemble's steps name, and what these make of it."""

from __future__ import annotations

from collections.abc import Mapping

from genserve.repository.index import ModelEntry
from genserve.repository.plugin_rules import decodes

__all__ = ["all_step_models", "generation_stages", "is_decoupled", "step_models"]

# Which stage of a model that generates text is made by which backend.
_STAGES = {"tokenizer": "tokenizer", "onnxruntime": "logits", "pytorch": "logits", "python": "decoder"}


def step_models(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> list[ModelEntry]:
    """Return the models that an ensemble's steps name, as far as there are such."""
    steps = entry.config.ensemble_steps if entry.config else ()
    return [entries[step.model_name] for step in steps if step.model_name in entries]


def generation_stages(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> dict[str, ModelEntry] | None:
    """Return the stages of an ensemble that the token engine runs, by their roles.

    None: it is none of these. Its decoder is a model.py with an `async def decode`.
    """
    models = step_models(entry, entries)
    stages = {_STAGES.get(model.config.backend, ""): model for model in models if model.config}
    if entry.config is None or len(entry.config.ensemble_steps) != len(stages):
        return None
    if stages.keys() != set(_STAGES.values()) or not _decodes(stages["decoder"]):
        return None
    return stages


def _decodes(decoder: ModelEntry) -> bool:
    if decoder.config is None or not decoder.versions:
        return False
    file = decoder.latest_version() / (decoder.config.default_model_filename or "model.py")
    if not file.is_file():
        return True  # of which loading tells more than that this is no such ensemble
    return decodes(file)


def is_decoupled(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> bool:
    """Whether a model gives any number of responses; an ensemble does if one of its steps does."""
    return any(
        model.config is not None and not model.is_ensemble and model.config.decoupled
        for model in (entry, *all_step_models(entry, entries))
    )


def all_step_models(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> list[ModelEntry]:
    """The models of the steps, and of the steps of those that are ensembles."""
    found: dict[str, ModelEntry] = {}
    waiting = step_models(entry, entries)
    while waiting:
        model = waiting.pop()
        if model.name not in found:
            found[model.name] = model
            waiting += step_models(model, entries)
    return list(found.values())
