"""Number lists: long lists of numbers in JSON, read and written slice by slice.

orjson and numpy hold the interpreter's lock during a call, a second for 64 MiB of numbers; here they are
called for one slice at a time, between which other threads run.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

# Bytes of JSON, and elements, of a slice: about a millisecond. A list of fewer bytes is not cut out.
SLICE_BYTES = 2**17
SLICE_ELEMENTS = 2**15
_DATA = re.compile(rb'"data"\s*:\s*(?=\[)')
_NUMBERS = re.compile(rb"[-+0-9.eE,\s\[\]]*")
_BLANKED = bytes.maketrans(b"[]", b"  ")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]")
# Neighbours that brackets do not have in JSON; the parser checks what is left without brackets. A number is
# written as zeros.
_AS_ZEROS = bytes.maketrans(b"123456789.eE+-", b"00000000000000")
_MISPLACED = (b"0[", b"]0", b"][", b"[,", b"[]", b",,", b",]")
_MAX_DEPTH = 100


class NotNumbersError(Exception):
    """A text that was cut out is not a list of numbers in JSON."""


@dataclass(frozen=True, slots=True)
class CutText:
    """A document in which markers replace long lists of numbers.

    Attributes:
        text: JSON; the value of a list that was cut out is a list with its marker.
        lists: the texts of the lists, by their markers.
    """

    text: bytes | bytearray | memoryview
    lists: Mapping[str, memoryview] = field(default_factory=dict)


def cut_lists(text: bytes | bytearray | memoryview) -> CutText:
    """Cut the long lists of numbers that are the values of keys `data` out of a document."""
    source = memoryview(text)
    if len(source) <= SLICE_BYTES:
        return CutText(text)
    parts: list[bytes | memoryview] = []
    lists: dict[str, memoryview] = {}
    position = copied = 0
    secret = secrets.token_hex(8)   # so that no string of the document is a marker
    while found := _DATA.search(source, position):
        start = found.end()
        position = end = _end_of_list(source, start)
        if end - start > SLICE_BYTES:
            marker = f"{secret}:{len(lists)}"
            lists[marker] = source[start:end]
            parts += [source[copied:start], f'["{marker}"]'.encode()]
            copied = end
    return CutText(b"".join([*parts, source[copied:]]), lists) if lists else CutText(text)


def _end_of_list(source: memoryview, start: int) -> int:
    """Return the place after the last bracket of a run of numbers and brackets."""
    end, is_last = start, False
    closing = start
    while not is_last:
        run = _NUMBERS.match(source, end, end + SLICE_BYTES)
        assert run is not None
        is_last = run.end() < end + SLICE_BYTES
        bracket = bytes(source[end : run.end()]).rfind(b"]")
        closing = end + bracket + 1 if bracket >= 0 else closing
        end = run.end()
    return closing


def read_numbers(text: memoryview, read_slice: Callable[[list[Any], int], NDArray[Any]]) -> NDArray[Any]:
    """Return the numbers of a list, nested in any way, as an array of one dimension.

    Args:
        text: JSON that was cut out.
        read_slice: makes an array of a list of numbers and the place of its first; its exceptions are
            raised.

    Raises:
        NotNumbersError: it is not valid JSON.
    """
    arrays: list[NDArray[Any]] = []
    num_read = 0
    brackets: list[bytes] = []
    for piece in _slices(text):
        found = piece.translate(None, _NOT_BRACKETS)
        brackets.append(found)
        if found and _is_misplaced(b"," + piece if arrays else piece):
            raise NotNumbersError
        numbers = piece.translate(_BLANKED).removesuffix(b",")
        try:
            values = orjson.loads(b"[" + numbers + b"]")
        except orjson.JSONDecodeError:
            raise NotNumbersError from None
        arrays.append(read_slice(values, num_read))
        num_read += len(values)
    if not _is_nested(b"".join(brackets)):
        raise NotNumbersError
    return np.concatenate(arrays)


def _slices(text: memoryview) -> Iterator[bytes]:
    """Yield a text in slices that end with a comma, except the last; raises NotNumbersError."""
    start = 0
    while start < len(text):
        piece = bytes(text[start : start + SLICE_BYTES])
        if start + len(piece) < len(text):
            piece = piece[: piece.rfind(b",") + 1]
        if not piece:
            raise NotNumbersError
        start += len(piece)
        yield piece


def _is_misplaced(piece: bytes) -> bool:
    zeros = piece.translate(_AS_ZEROS, b" \t\r\n")
    return any(neighbours in zeros for neighbours in _MISPLACED)


def _is_nested(brackets: bytes) -> bool:
    """Whether each bracket has its counterpart, and the first that of the last."""
    inner = brackets[1:-1]
    for _ in range(_MAX_DEPTH):
        inner = inner.replace(b"[]", b"")
    return not inner and brackets[:1] == b"["


def write_list(values: list[Any] | NDArray[Any]) -> bytes:
    """Return a list, or an array of one dimension, as JSON."""
    slices = (values[start : start + SLICE_ELEMENTS] for start in range(0, len(values), SLICE_ELEMENTS))
    written = [orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for part in slices]
    return b"[" + b",".join(written) + b"]"
