"""Ensemble steps: the models that an ensemble's steps name, and what these make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry
from genserve.textmodel.plugin_rules import decodes

__all__ = [
    "Chain",
    "all_step_models",
    "generation_chains",
    "generation_stages",
    "is_decoupled",
    "stage_owners",
    "step_models",
]

Chain: TypeAlias = Mapping[str, ModelEntry]  # the stages of an ensemble: "tokenizer", "logits", "decoder"

# Which stage of a model that generates text is made by which backend.
_STAGES = {"tokenizer": "tokenizer", "onnxruntime": "logits", "pytorch": "logits", "python": "decoder"}


def step_models(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> list[ModelEntry]:
    """Return the models that an ensemble's steps name, as far as there are such."""
    steps = entry.config.ensemble_steps if entry.config else ()
    return [entries[step.model_name] for step in steps if step.model_name in entries]


def generation_stages(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> Chain | None:
    """Return the stages of an ensemble that the token engine runs, by their roles.

    Each is in the version that its step names. None: it is none of these. Its decoder is a model.py with an
    `async def decode`.
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


def generation_chains(entries: Mapping[str, ModelEntry]) -> dict[str, Chain]:
    """Return the stages of those ensembles that chain a tokenizer, a logits and a decoder stage, by name.

    Reads the decoders' model.py: to be called once for each look at the folders.
    """
    chains = {name: generation_stages(entry, entries) for name, entry in entries.items()}
    return {name: chain for name, chain in chains.items() if chain}


def stage_owners(chains: Mapping[str, Chain]) -> dict[str, str]:
    """Return, by name of a logits or decoder stage, the ensemble whose engine runs it."""
    owners: dict[str, str] = {}
    for name, chain in chains.items():
        for stage in ("logits", "decoder"):
            owners.setdefault(chain[stage].name, name)
    return owners


def _decodes(decoder: ModelEntry) -> bool:
    if decoder.config is None:
        return False
    try:
        file = decoder.latest_version() / (decoder.config.default_model_filename or "model.py")
    except RepositoryError:
        return False
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
