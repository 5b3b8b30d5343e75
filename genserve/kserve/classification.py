"""Classification: the highest values of an output as text, `value:index:label`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.data_type import DataType
from genserve.errors import InferenceError
from genserve.tensor import Tensor

__all__ = ["classify"]

_UNSUPPORTED = frozenset({DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES})


def classify(tensor: Tensor, *, count: int, labels: Sequence[str] = (), batched: bool) -> Tensor:
    """Return the `count` highest values of each row, the highest first; all of them if there are fewer.

    Args:
        tensor: the output of a model.
        count: at least 1.
        labels: of the classes, by their index; a class without one shows its index alone.
        batched: whether the first dimension is that of the batch; else all of it is one row.

    Returns:
        BYTES of shape [batch, k] or [k]: `0.900000:2:cat`; integers without a point.

    Raises:
        InferenceError: INVALID_ARG, the elements are no numbers, or are half precision.
    """
    if tensor.data_type in _UNSUPPORTED:
        name = tensor.data_type.name
        raise InferenceError(f"class result not available for output due to unsupported type '{name}'")
    shape = tensor.shape[:1] if batched and tensor.shape else ()
    rows = tensor.array.reshape(*shape, -1)
    kept = min(count, rows.shape[-1])
    # Reversed before and after the stable sort, so that equal values stay in the order of their classes.
    order = rows.shape[-1] - 1 - np.argsort(rows[..., ::-1], axis=-1, kind="stable")[..., ::-1][..., :kept]
    values = np.take_along_axis(rows, order, axis=-1)
    pattern = "%f" if values.dtype.kind == "f" else "%d"
    texts = [
        _text(pattern % value, index, labels)
        for value, index in zip(values.reshape(-1).tolist(), order.reshape(-1).tolist(), strict=True)
    ]
    result = np.empty(len(texts), dtype=object)
    result[:] = texts
    return Tensor(tensor.name, result.reshape(order.shape))


def _text(value: str, index: int, labels: Sequence[str]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{value}:{index}{label}".encode()
