"""Drafting: what drafts the tokens of an ensemble, by the config of its logits stage."""

from __future__ import annotations

from genserve.backends.backend import Placement
from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.onnx_verifier import OnnxVerifier
from genserve.backends.parameters import integer_parameter
from genserve.errors import RepositoryError
from genserve.generation.prompt_lookup import PromptLookup
from genserve.generation.speculation import Speculation
from genserve.repository.index import ModelEntry
from genserve.repository.logits_runtime import LoadedLogits, logits_file

__all__ = ["load_drafting"]


def load_drafting(
    entry: ModelEntry, logits: LoadedLogits, *, placement: Placement
) -> Speculation | None:
    """Load what a logits stage, whose config has no error, asks for; None if it does not.

    Args:
        entry: the stage.
        logits: as it was loaded.
        placement: where.

    Raises:
        RepositoryError: it is none that can look at several tokens, or lacks the graph for it.
    """
    assert entry.config is not None  # or it would have an error
    parameters = entry.config.parameters
    if "speculation" not in parameters:
        return None
    if not isinstance(logits, OnnxLogits) or placement.kind == "GPU":
        raise RepositoryError(
            f"model {entry.name} cannot speculate: that takes a graph that `genserve export` has built, "
            "in ONNX, on the CPU",
            remedy=f"take the parameter `speculation` out of {entry.name}/config.pbtxt",
        )
    num_threads = integer_parameter(parameters, "intra_op_thread_count", default=0)
    verifier = OnnxVerifier(logits, logits_file(entry), num_threads=num_threads)
    return Speculation(verifier, PromptLookup())
