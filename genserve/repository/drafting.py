"""Drafting: what drafts the tokens of an ensemble, by the config of its logits stage."""

from __future__ import annotations

from collections.abc import Mapping

from genserve.backends.backend import Placement
from genserve.errors import RepositoryError
from genserve.generation.draft_model import DraftModel
from genserve.generation.prompt_lookup import PromptLookup
from genserve.generation.speculation import Speculation
from genserve.repository.check import accept, model_faults
from genserve.repository.ensemble_steps import generation_stages
from genserve.repository.index import ModelEntry
from genserve.repository.logits_runtime import CacheKind, LoadedLogits, cache_kind, load_logits
from genserve.text.tokenizer import Tokenizer

__all__ = ["load_drafting"]


def load_drafting(
    entry: ModelEntry,
    logits: LoadedLogits,
    entries: Mapping[str, ModelEntry],
    *,
    tokenizer: Tokenizer,
    placement: Placement,
) -> Speculation | None:
    """Load what a logits stage, whose config has no error, asks for; None if there are to be no drafts.

    Where it says nothing, tokens are looked up in the prompt and the answer if a forward of several tokens
    of a sequence costs little more than one: that of an ONNX graph over a cache in place, on the CPU.

    Args:
        entry: the stage.
        logits: as it was loaded.
        entries: all models, of which one may draft.
        tokenizer: of the stage's ensemble.
        placement: where the stage runs.

    Raises:
        RepositoryError: what is to draft cannot be loaded, or has another vocabulary.
    """
    config = entry.config
    assert config is not None  # or it would have an error
    pays = (
        config.backend == "onnxruntime"
        and cache_kind(config) is CacheKind.IN_PLACE
        and placement.kind != "GPU"
    )
    name, method = (config.parameters.get(key) for key in ("draft_model", "speculation"))
    if method == "none":
        return None
    if name is not None:
        return Speculation(_draft_model(name, logits, entries, tokenizer=tokenizer))
    return Speculation(PromptLookup()) if method == "prompt_lookup" or pays else None


def _draft_model(
    name: str, logits: LoadedLogits, entries: Mapping[str, ModelEntry], *, tokenizer: Tokenizer
) -> DraftModel:
    """Load the logits stage of an ensemble once more, to draft on the CPU."""
    stages = generation_stages(entries[name], entries)
    assert stages is not None  # or the logits stage's config would have an error
    accept(fault for stage in stages.values() for fault in model_faults(stage, entries))
    if not tokenizer.has_vocabulary_of(Tokenizer.from_folder(stages["tokenizer"].latest_version())):
        raise RepositoryError(
            f"draft_model {name!r} has another vocabulary: its token ids mean other words",
            remedy="take a smaller model of the same family, whose tokenizer.json is the same",
        )
    return DraftModel(load_logits(stages["logits"]), vocab_size=logits.vocab_size)
