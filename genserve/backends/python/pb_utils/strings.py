"""Strings: tensors of bytes as one buffer, each element after its length."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.tensor import DataType, Tensor

__all__ = ["deserialize_bytes_tensor", "serialize_byte_tensor"]


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """Return the elements of an array of `bytes` or `str`, row by row, each after its length (uint32).

    Returns:
        `()` for an array without elements, None for one that is not of strings.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(Tensor("", input_tensor, data_type=DataType.BYTES).to_bytes())


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[Any]:
    """Return the elements that `serialize_byte_tensor` wrote, [n] `bytes` objects."""
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        start = position + 4
        position = start + int.from_bytes(encoded_tensor[position:start], "little")
        elements.append(bytes(encoded_tensor[start:position]))
    return np.array(elements, dtype=np.object_)
