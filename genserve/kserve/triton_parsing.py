"""Triton parsing: JSON documents, tensor elements and numbers as Triton reads them, with its error texts.

orjson parses; what it refuses (NaN and Infinity, which Triton takes, and broken text) goes to RapidJSON, the
parser that Triton itself uses: its texts and offsets are the ones that clients compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import orjson
import rapidjson
from numpy.typing import NDArray

from genserve.errors import InferenceError, Status
from genserve.tensor import DataType, Tensor

__all__ = [
    "JsonText",
    "Kind",
    "Members",
    "checked",
    "elements_of",
    "leading_number",
    "member",
    "read_elements",
    "read_json",
    "read_pairs",
    "read_version",
    "texts_of",
]


_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")
_MANY_DIGITS = 40  # beyond any number of 64 bits, and well within what `int` takes


def leading_number(text: str) -> int | None:
    """Return the number; what follows it does not count. None: there is none.

    One beyond 64 bits is some number beyond 64 bits.
    """
    found = _NUMBER.match(text)
    return None if found is None else int(found[1][:_MANY_DIGITS])


_MAX = 2**63 - 1


def read_version(text: str) -> int:
    """Return the number of a version; -1, the latest, for an empty text.

    Raises:
        InferenceError: it is none.
    """
    if not text:
        return -1
    version = leading_number(text)
    if version is None or abs(version) > _MAX:
        raise InferenceError(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if version < 0:
        raise InferenceError(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version


JsonText: TypeAlias = bytes | bytearray | memoryview

# Beyond 64 bits a whole number is a double, or too big; Python's own have no end.
_NUMBERS = rapidjson.NM_NATIVE | rapidjson.NM_NAN
_FAILED = "failed to parse the request JSON buffer"


class Kind(Enum):
    """A kind of JSON value, and what Triton says where another is found."""

    STRING = "attempt to access JSON non-string as string"
    BOOLEAN = "attempt to access JSON non-boolean as boolean"
    UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
    ARRAY = "attempt to access JSON non-array as array"
    OBJECT = "attempt to access JSON non-object as object"


class Members(list[tuple[str, Any]]):
    """The members of an object in their order; a key may be there twice."""


def read_json(text: JsonText) -> Any:
    """Parse a document; of a key given twice, the last counts.

    Raises:
        InferenceError: INTERNAL, it is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _read_slowly(text, partial(rapidjson.loads, number_mode=_NUMBERS))


def read_pairs(text: JsonText) -> Any:
    """Parse a document with each object as its `Members`.

    Raises:
        InferenceError: INTERNAL, it is not JSON.
    """
    return _read_slowly(text, _PairDecoder(number_mode=_NUMBERS))


def checked(value: Any, kind: Kind, *, doing: str = "") -> Any:
    """Return a value that is of a kind.

    Args:
        value: parsed.
        kind: what it has to be.
        doing: what comes before the text of the error: "Unable to parse 'name'".

    Raises:
        InferenceError: INTERNAL, it is of another kind.
    """
    if _is(value, kind):
        return value
    raise InferenceError(f"{doing}: {kind.value}" if doing else kind.value, status=Status.INTERNAL)


def member(owner: Any, name: str, kind: Kind) -> Any:
    """Return a member of an object, which must be there and of a kind.

    Raises:
        InferenceError: INTERNAL, it is missing or of another kind.
    """
    if isinstance(owner, dict) and name in owner and _is(owner[name], kind):
        return owner[name]
    doing = f"Unable to parse '{name}'"
    if not isinstance(owner, dict) or name not in owner:
        text = f"{doing}: attempt to access non-existing object member '{name}'"
        raise InferenceError(text, status=Status.INTERNAL)
    return checked(owner[name], kind, doing=doing)


class _PairDecoder(rapidjson.Decoder):
    def start_object(self) -> Members:
        return Members()


def _read_slowly(text: JsonText, parse: Any) -> Any:
    try:
        return parse(bytes(text))
    except UnicodeDecodeError as error:
        reason = f"Invalid encoding in string. at {error.start}"
    except RecursionError:
        raise InferenceError("JSON nesting depth exceeds maximum allowed limit (100)") from None
    except rapidjson.JSONDecodeError as error:
        place, _, what = str(error).removeprefix("Parse error at offset ").partition(": ")
        reason = f"{what} at {place}"
    raise InferenceError(f"{_FAILED}: {reason}", status=Status.INTERNAL)


# The members of an enumeration are looked up anew each time that they are named, and this is asked most.
_STRING, _BOOLEAN, _UNSIGNED, _ARRAY = Kind.STRING, Kind.BOOLEAN, Kind.UNSIGNED, Kind.ARRAY


def _is(value: Any, kind: Kind) -> bool:
    if kind is _STRING:
        return isinstance(value, str)
    if kind is _BOOLEAN:
        return isinstance(value, bool)
    if kind is _UNSIGNED:
        return type(value) is int and 0 <= value < 2**64
    return isinstance(value, list if kind is _ARRAY else dict)


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
