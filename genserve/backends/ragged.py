"""Ragged: requests of different shapes in one batch: flat inputs, numbers that describe them, outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from genserve.config.model_config import BatchInput, TensorSpec
from genserve.data_type import DataType
from genserve.tensor import Tensor

__all__ = ["batch_input_tensors", "flat_input", "scatter_output"]

Shape = tuple[int, ...]


def flat_input(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor [all elements of all requests]; that of a single request is not copied."""
    arrays = [tensor.array.reshape(-1) for tensor in tensors]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return Tensor(name, joined, data_type=tensors[0].data_type)


def batch_input_tensors(batch_input: BatchInput, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Return the inputs that are computed from the shapes of a batch, one for each target name.

    Args:
        batch_input: what to compute.
        shapes: of the source input, of each request, with the batch dimension.

    Source: `BatchInput.Kind` of Triton's model_config.proto.
    """
    data_type = DataType.from_config_name(batch_input.data_type)
    array = _described(batch_input.kind, shapes).astype(data_type.numpy)
    return tuple(Tensor(name, array, data_type=data_type) for name in batch_input.target_names)


def _described(kind: str, shapes: Sequence[Shape]) -> NDArray[np.int64]:
    counts = [math.prod(shape) for shape in shapes]
    match kind.removeprefix("BATCH_"):
        case "ELEMENT_COUNT":
            return np.array(counts)
        case "ACCUMULATED_ELEMENT_COUNT":
            return np.cumsum(counts)
        case "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return np.cumsum([0, *counts])
        case "MAX_ELEMENT_COUNT_AS_SHAPE":
            return np.zeros(max(counts), dtype=np.int64)
        case "ITEM_SHAPE":
            return _item_shapes(shapes)
        case "ITEM_SHAPE_FLATTEN":
            return _item_shapes(shapes).reshape(-1)
        case _:
            raise ValueError(f"unknown kind of batch_input: {kind}")


def _item_shapes(shapes: Sequence[Shape]) -> NDArray[np.int64]:
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(shapes[0]) - 1)


def scatter_output(output: Tensor, spec: TensorSpec, shapes: Sequence[Shape]) -> list[Tensor]:
    """Divide a flat output over the requests: views, each in the shape that the config gives it.

    Args:
        output: the elements of all requests, one after the other.
        spec: of the output; a -1 of its dims (behind the batch dimension) is the size of the same
            dimension of the source input.
        shapes: of the source input, of each request, with the batch dimension.

    Source: BATCH_SCATTER_WITH_INPUT_SHAPE of Triton's model_config.proto.
    """
    dims = (-1, *(spec.dims if spec.reshape is None else spec.reshape))
    flat = output.data.reshape(-1)
    parts: list[Tensor] = []
    start = 0
    for shape in shapes:
        target = tuple(shape[axis] if dim == -1 else dim for axis, dim in enumerate(dims))
        stop = start + math.prod(target)
        part = flat[start:stop].reshape(target)
        parts.append(Tensor(output.name, part, data_type=output.data_type))
        start = stop
    return parts
