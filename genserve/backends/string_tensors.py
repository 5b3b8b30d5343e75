"""String tensors: BYTES tensors for models that take and return text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from genserve.errors import InferenceError
from genserve.tensor import DataType, Tensor

__all__ = ["decode_strings", "string_tensor"]


def decode_strings(tensor: Tensor) -> list[str]:
    """Return the elements of a BYTES tensor, row-major, as str.

    Raises:
        InferenceError: an element is not UTF-8.
    """
    try:
        return [
            element.decode() if isinstance(element, bytes) else str(element)
            for element in tensor.array.reshape(-1).tolist()
        ]
    except UnicodeDecodeError as error:
        raise InferenceError(
            f"inference input '{tensor.name}' has an element that is not UTF-8: {error}",
            field=tensor.name,
            remedy="the model takes text; send other bytes as UINT8",
        ) from error


def string_tensor(name: str, elements: Iterable[str], *, shape: Sequence[int]) -> Tensor:
    """Return a BYTES tensor with the given strings in row-major order."""
    encoded = [element.encode() for element in elements]
    array = np.empty(len(encoded), dtype=object)
    array[:] = encoded
    return Tensor(name, array.reshape(tuple(shape)), data_type=DataType.BYTES)
