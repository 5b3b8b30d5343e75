"""JSON elements: the values of a tensor in JSON text, to an array and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.data_type import DataType
from genserve.errors import InferenceError, Status
from genserve.tensor import Tensor

__all__ = ["elements_of", "read_elements", "texts_of"]

_MAX_DEPTH = 100
_HALF = frozenset({DataType.FP16, DataType.BF16})
# By the kind of the numpy type: the types of the values, what they are read as first, and Triton's text
# for others. Integers wrap to the size of their type, as Triton's do.
_READING: Mapping[str, tuple[frozenset[type], Any, str]] = {
    "b": (frozenset({bool}), np.bool_, "non-boolean as boolean"),
    "i": (frozenset({int}), np.int64, "non-signed-integer as signed-integer"),
    "u": (frozenset({int}), np.uint64, "non-unsigned-integer as unsigned-integer"),
    "f": (frozenset({int, float}), np.float64, "non-number as double"),
}


def read_elements(name: str, data: list[Any], data_type: DataType) -> NDArray[Any]:
    """Return the values of a list, flat or nested in any way, as an array of one dimension.

    Raises:
        InferenceError: values that are not of the type (INTERNAL), or a type that has no JSON (INVALID_ARG).
    """
    if data_type in _HALF:
        raise InferenceError(
            f"receiving {data_type.name} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    flat, kinds = _flattened(data)
    if data_type is DataType.BYTES:
        return _strings(flat, kinds)
    allowed, first, wrong = _READING[data_type.numpy.kind]
    try:
        if not kinds <= allowed:
            raise OverflowError
        with np.errstate(over="ignore"):
            return np.array(flat, dtype=first).astype(data_type.numpy, copy=False)
    except OverflowError:
        text = f"Unable to parse 'data': attempt to access JSON {wrong}"
        raise InferenceError(text, status=Status.INTERNAL) from None


def elements_of(tensor: Tensor) -> Any:
    """Return the values of a tensor as what `orjson` or `json` writes as one flat list.

    FP32 is widened, so that it is printed as Triton prints it. NaN and infinities are left for the caller.

    Raises:
        InferenceError: INVALID_ARG, a type that has no JSON.
    """
    if tensor.data_type in _HALF:
        raise InferenceError(
            f"sending {tensor.data_type.name} data via JSON is not supported. "
            "Please use the binary data format for output",
            remedy=f"ask for output '{tensor.name}' with the parameter binary_data",
        )
    if tensor.data_type is DataType.BYTES:
        return texts_of(tensor.array)
    flat = np.ascontiguousarray(tensor.array).reshape(-1)
    return flat.astype(np.float64) if tensor.data_type is DataType.FP32 else flat


def texts_of(array: NDArray[Any]) -> list[str]:
    """Return strings as text; bytes that are not UTF-8 become replacement characters."""
    return [
        element.decode("utf-8", "replace") if isinstance(element, bytes) else _clean(str(element))
        for element in array.reshape(-1).tolist()
    ]


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _flattened(data: list[Any]) -> tuple[list[Any], set[type]]:
    """Return the values without their nesting, and the types there are among them."""
    for _ in range(_MAX_DEPTH):
        kinds = set(map(type, data))
        if list not in kinds:
            return data, kinds
        levels = data if kinds == {list} else (x if type(x) is list else (x,) for x in data)
        data = list(chain.from_iterable(levels))
    raise InferenceError(f"JSON nesting depth exceeds maximum allowed limit ({_MAX_DEPTH})")


def _strings(flat: list[Any], kinds: set[type]) -> NDArray[Any]:
    if not kinds <= {str}:
        text = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
        raise InferenceError(text, status=Status.INTERNAL)
    array = np.empty(len(flat), dtype=object)
    array[:] = [text.encode() for text in flat]
    return array
