"""Requested output: how a client wants one output of a model."""

from __future__ import annotations

from dataclasses import dataclass

from genserve.kserve.classification import classify
from genserve.kserve.models import ServedModel
from genserve.kserve.shared_memory import RegionPart
from genserve.tensor import Tensor

__all__ = ["RequestedOutput", "prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutput:
    """One entry of `outputs`.

    Attributes:
        name: of the output.
        binary: HTTP: after the JSON, not in it.
        classification: so many classes in place of the values; 0: the values.
        target: the shared memory that it is written into; None: it is sent.
    """

    name: str
    binary: bool = False
    classification: int = 0
    target: RegionPart | None = None


def prepared(tensor: Tensor, *, requested: RequestedOutput | None, model: ServedModel) -> Tensor:
    """Return an output of a model as it was requested, and write it into shared memory where it was to.

    Raises:
        InferenceError: it cannot be classified, or has no room in the shared memory.
    """
    if requested is None:
        return tensor
    if requested.classification:
        return classify(
            tensor,
            count=requested.classification,
            labels=model.labels.get(tensor.name, ()),
            batched=bool(model.config.max_batch_size),
        )
    if requested.target is not None:
        requested.target.store(tensor)
    return tensor
