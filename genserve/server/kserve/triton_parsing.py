"""Triton parsing: JSON, tensor elements, numbers and headers parsed as Triton does, with its error messages.

orjson parses first. Documents that it rejects, with NaN or Infinity, which Triton accepts, or with syntax
errors, go to RapidJSON, the parser that Triton uses: clients compare its messages and offsets. The status is
400, as the client can mend its request; Triton's is 500.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import orjson
import rapidjson
from numpy.typing import NDArray

from genserve.errors import InferenceError
from genserve.inference import Parameter
from genserve.tensor import DataType, Tensor, narrowed

_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")
_MANY_DIGITS = 40  # more than in any number of 64 bits, and within the limit of `int`
_MAX = 2**63 - 1
JsonText: TypeAlias = bytes | bytearray | memoryview
# An integer beyond 64 bits becomes a double, or is rejected; those of Python are unbounded.
_NUMBERS = rapidjson.NM_NATIVE | rapidjson.NM_NAN
_FAILED = "failed to parse the request JSON buffer"
_MAX_DEPTH = 100
_HALF = frozenset({DataType.FP16, DataType.BF16})
# By the kind of the numpy type: the Python types, the numpy type to convert to first, and Triton's message
# for other types.
_READING: Mapping[str, tuple[frozenset[type], Any, str]] = {
    "b": (frozenset({bool}), np.bool_, "non-boolean as boolean"),
    "i": (frozenset({int}), np.int64, "non-signed-integer as signed-integer"),
    "u": (frozenset({int}), np.uint64, "non-unsigned-integer as unsigned-integer"),
    "f": (frozenset({int, float}), np.float64, "non-number as double"),
}
# Parameters that the protocol defines, for which no header may pass (kReservedParameterKeys of Triton).
_RESERVED_HEADERS = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
# Names are matched in any case, as header names are. A switch of RE2, Triton's library, changes that.
_IN_THIS_CASE = "(?-i)"


def leading_number(text: str) -> int | None:
    """Return the integer at the start of a text, as C's `strtol` does; None: there is none.

    An integer beyond 64 bits is returned as some integer beyond 64 bits.
    """
    found = _NUMBER.match(text)
    return None if found is None else int(found[1][:_MANY_DIGITS])


def read_version(text: str) -> int:
    """Parse a version; -1, the latest, for an empty text.

    Raises:
        InferenceError: it is not a positive integer.
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


class JsonKind(Enum):
    """A kind of JSON value, and Triton's message for a value of another kind."""

    STRING = "attempt to access JSON non-string as string"
    BOOLEAN = "attempt to access JSON non-boolean as boolean"
    UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
    ARRAY = "attempt to access JSON non-array as array"
    OBJECT = "attempt to access JSON non-object as object"


class Members(list[tuple[str, Any]]):
    """The members of an object in their order; keys may repeat."""


def read_json(text: JsonText) -> Any:
    """Parse a document; the last of repeated keys counts.

    Raises:
        InferenceError: the text is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _read_slowly(text, partial(rapidjson.loads, number_mode=_NUMBERS))


def read_pairs(text: JsonText) -> Any:
    """Parse a document into `Members` in place of dicts.

    Raises:
        InferenceError: the text is not JSON.
    """
    return _read_slowly(text, _PairDecoder(number_mode=_NUMBERS))


def checked(value: Any, kind: JsonKind, *, doing: str = "") -> Any:
    """Return a value after checking its kind.

    Args:
        value: parsed.
        kind: the required kind.
        doing: the prefix of the error message: "Unable to parse 'name'".

    Raises:
        InferenceError: the value is of another kind.
    """
    if _is(value, kind):
        return value
    raise InferenceError(f"{doing}: {kind.value}" if doing else kind.value)


def member(owner: Any, name: str, kind: JsonKind) -> Any:
    """Return a required member of an object after checking its kind.

    Raises:
        InferenceError: the member is missing or of another kind.
    """
    if isinstance(owner, dict) and name in owner and _is(owner[name], kind):
        return owner[name]
    doing = f"Unable to parse '{name}'"
    if not isinstance(owner, dict) or name not in owner:
        text = f"{doing}: attempt to access non-existing object member '{name}'"
        raise InferenceError(text)
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
    raise InferenceError(f"{_FAILED}: {reason}")


# Local names, as `_is` is called most and access to members of an enumeration is slow.
_STRING, _BOOLEAN, _UNSIGNED, _ARRAY = JsonKind.STRING, JsonKind.BOOLEAN, JsonKind.UNSIGNED, JsonKind.ARRAY


def _is(value: Any, kind: JsonKind) -> bool:
    if kind is _STRING:
        return isinstance(value, str)
    if kind is _BOOLEAN:
        return isinstance(value, bool)
    if kind is _UNSIGNED:
        return type(value) is int and 0 <= value < 2**64
    return isinstance(value, list if kind is _ARRAY else dict)


def read_elements(name: str, data: list[Any], data_type: DataType, *, start: int = 0) -> NDArray[Any]:
    """Return the values of a list, nested in any way, as an array of one dimension.

    Args:
        name: the input's name, for errors.
        data: the list.
        data_type: the input's type.
        start: the place of the list's first value in the input, for errors.

    Raises:
        InferenceError: a value is of another type, or does not fit its type, or the type has no
            representation in JSON.
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
        values = np.array(flat, dtype=first)
    except OverflowError:
        place = start + next(place for place, value in enumerate(flat) if not _is_held(value, allowed, first))
        raise InferenceError(
            f"Unable to parse 'data': attempt to access JSON {wrong}",
            remedy=f"write element {place} of input '{name}' as {data_type.elements}",
        ) from None
    return narrowed(values, data_type, name=name, start=start)


def _is_held(value: Any, allowed: frozenset[type], first: Any) -> bool:
    """Whether a numpy type can hold a value of one of these Python types."""
    if type(value) not in allowed:
        return False
    try:
        np.array(value, dtype=first)
    except OverflowError:
        return False
    return True


def elements_of(tensor: Tensor) -> Any:
    """Return the values of a tensor as a flat list or array, for `orjson` and `json`.

    FP32 is widened, to be printed as in Triton. NaN and infinities are left to the caller.

    Raises:
        InferenceError: INVALID_ARG, the type has no representation in JSON.
    """
    if tensor.data_type in _HALF:
        raise InferenceError(
            f"sending {tensor.data_type.name} data via JSON is not supported. "
            "Please use the binary data format for output",
            remedy=f"request output '{tensor.name}' with the parameter binary_data",
        )
    if tensor.data_type is DataType.BYTES:
        return texts_of(tensor.array)
    flat = np.ascontiguousarray(tensor.array).reshape(-1)
    return flat.astype(np.float64) if tensor.data_type is DataType.FP32 else flat


def texts_of(array: NDArray[Any]) -> list[str]:
    """Return strings as text; invalid UTF-8 becomes replacement characters."""
    return [
        element.decode("utf-8", "replace") if isinstance(element, bytes) else _clean(str(element))
        for element in array.reshape(-1).tolist()
    ]


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _flattened(data: list[Any]) -> tuple[list[Any], set[type]]:
    """Return the values without their nesting, and the set of their types."""
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
        raise InferenceError(text)
    array = np.empty(len(flat), dtype=object)
    array[:] = [text.encode() for text in flat]
    return array


def header_pattern(pattern: str) -> re.Pattern[str]:
    """Compile the value of `--http-header-forward-pattern` or `--grpc-header-forward-pattern`.

    Raises:
        re.error: it is not a regular expression.
    """
    if pattern.startswith(_IN_THIS_CASE):
        return re.compile(pattern.removeprefix(_IN_THIS_CASE))
    return re.compile(pattern, re.IGNORECASE)


def forwarded_headers(headers: Iterable[tuple[str, str]], pattern: str) -> dict[str, Parameter]:
    """Return the headers whose names match; an empty pattern matches none.

    Raises:
        InferenceError: the name of one is reserved.
    """
    if not pattern:
        return {}
    search = header_pattern(pattern).search
    forwarded: dict[str, Parameter] = {name: value for name, value in headers if search(name)}
    for name in forwarded:
        if name in _RESERVED_HEADERS or name.startswith("triton_"):
            raise InferenceError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
    return forwarded
