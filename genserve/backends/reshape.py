"""Reshape: between the shape that clients see and the one that a model takes or gives."""

from __future__ import annotations

from collections.abc import Sequence

from genserve.config.model_config import TensorSpec
from genserve.tensor import Tensor

__all__ = ["from_model_shape", "to_model_shape"]


def to_model_shape(tensor: Tensor, spec: TensorSpec, *, has_batch: bool) -> Tensor:
    """Return an input as the model takes it: in `reshape` of its config, if there is one; no copy.

    Args:
        tensor: in the shape of `spec.dims`; behind the batch dimension, if there is one.
        spec: of the input.
        has_batch: whether the first dimension of the tensor is of the batch.
    """
    if spec.reshape is None:
        return tensor
    return _reshaped(tensor, source=spec.dims, target=spec.reshape, has_batch=has_batch)


def from_model_shape(tensor: Tensor, spec: TensorSpec, *, has_batch: bool) -> Tensor:
    """Return an output as clients see it: in the `dims` of its config, if it has a `reshape`; no copy."""
    if spec.reshape is None:
        return tensor
    return _reshaped(tensor, source=spec.reshape, target=spec.dims, has_batch=has_batch)


def _reshaped(tensor: Tensor, *, source: Sequence[int], target: Sequence[int], has_batch: bool) -> Tensor:
    batch, sizes = (tensor.shape[:1], tensor.shape[1:]) if has_batch else ((), tensor.shape)
    # The wildcards of both correspond by their order. -1 is left where there is none: numpy finds it.
    wildcards = iter([size for dim, size in zip(source, sizes, strict=False) if dim == -1])
    return tensor.reshaped((*batch, *(next(wildcards, -1) if dim == -1 else dim for dim in target)))
