"""Draft rules: what is wrong with how a logits stage is to speculate, as far as the folders tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from genserve.config.fault import Fault, Severity
from genserve.config.model_config import ModelConfig
from genserve.repository.ensemble_steps import generation_chains, stage_owners
from genserve.repository.index import ModelEntry

__all__ = ["draft_faults"]


def draft_faults(
    entry: ModelEntry, config: ModelConfig, entries: Mapping[str, ModelEntry]
) -> Iterator[Fault]:
    """Yield the faults of a model that may be a logits stage.

    Args:
        entry: the model.
        config: its config.
        entries: all models of the repository, by name.
    """
    parameters = config.parameters
    wanted = [name for name in ("speculation", "draft_model") if name in parameters]
    if not wanted or config.backend not in ("onnxruntime", "pytorch"):
        return
    chains = generation_chains(entries)
    if entry.name not in stage_owners(chains):
        message = f"parameter {wanted[0]!r} has no effect: no ensemble that generates text has this stage"
        yield _fault(entry, Severity.WARNING, wanted[0], message, remedy="leave it out")
        return
    if len(wanted) > 1 and parameters["speculation"] != "none":
        message = f"model {entry.name} has two drafts, `speculation` and `draft_model`"
        yield _fault(entry, Severity.ERROR, wanted[-1], message, remedy="leave one of them out")
    name = parameters.get("draft_model")
    if name is not None and name not in chains:
        yield _fault(
            entry,
            Severity.ERROR,
            "draft_model",
            f"draft_model {name!r} is not in the repository as a model that generates text",
            remedy="name an ensemble of a tokenizer, a logits and a decoder stage",
        )


def _fault(entry: ModelEntry, severity: Severity, key: str, message: str, *, remedy: str) -> Fault:
    return entry.parsed.fault(severity, "parameters", message, remedy=remedy, key=key)
