"""JSON document: request bodies as Triton reads them, with its error texts.

orjson parses; what it refuses (NaN and Infinity, which Triton takes, and broken text) goes to RapidJSON, the
parser that Triton itself uses: its texts and offsets are the ones that clients compare.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import orjson
import rapidjson

from genserve.errors import InferenceError, Status

__all__ = ["JsonText", "Kind", "Members", "checked", "member", "read_json", "read_pairs"]

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
