"""Drafting: what drafts the tokens of an ensemble, by the config of its logits stage."""

from __future__ import annotations

from collections.abc import Mapping

from genserve.backends.backend import Placement
from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.onnx_verifier import OnnxVerifier
from genserve.backends.parameters import integer_parameter
from genserve.errors import RepositoryError
from genserve.generation.draft_model import DraftModel
from genserve.generation.prompt_lookup import PromptLookup
from genserve.generation.speculation import Draft, Speculation
from genserve.repository.check import accept, model_faults
from genserve.repository.draft_rules import wanted_drafts
from genserve.repository.ensemble_steps import generation_stages
from genserve.repository.index import ModelEntry
from genserve.repository.logits_runtime import LoadedLogits, load_logits, logits_file
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
    """Load what a logits stage, whose config has no error, asks for; None if it does not.

    Args:
        entry: the stage.
        logits: as it was loaded.
        entries: all models, of which one may draft.
        tokenizer: of the stage's ensemble.
        placement: where the stage runs.

    Raises:
        RepositoryError: it is none that can look at several tokens, or lacks the graph for it; or what is to
            draft cannot be loaded, or has another vocabulary.
    """
    assert entry.config is not None  # or it would have an error
    parameters, wanted = entry.config.parameters, wanted_drafts(entry.config)
    if not wanted:
        return None
    if not isinstance(logits, OnnxLogits) or placement.kind == "GPU":
        raise RepositoryError(
            f"model {entry.name} cannot speculate: that takes a graph that `genserve export` has built, "
            "in ONNX, on the CPU",
            remedy=f"take the parameter `{wanted[0]}` out of {entry.name}/config.pbtxt",
        )
    num_threads = integer_parameter(parameters, "intra_op_thread_count", default=0)
    verifier = OnnxVerifier(logits, logits_file(entry), num_threads=num_threads)
    draft: Draft = PromptLookup()
    if (name := parameters.get("draft_model")) is not None:
        draft = _draft_model(name, logits, entries, tokenizer=tokenizer, num_slots=verifier.max_rows)
    return Speculation(verifier, draft)


def _draft_model(
    name: str,
    logits: LoadedLogits,
    entries: Mapping[str, ModelEntry],
    *,
    tokenizer: Tokenizer,
    num_slots: int,
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
    model = load_logits(stages["logits"])
    fitting = max(1, model.max_cached_tokens // model.max_length)
    return DraftModel(
        model, num_slots=min(num_slots, model.num_slots, fitting), vocab_size=logits.vocab_size
    )
