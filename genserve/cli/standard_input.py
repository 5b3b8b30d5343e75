"""Standard input: what is piped into a command, as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from genserve.errors import InvalidRequest

__all__ = ["read_lines", "read_text"]


def read_text() -> str:
    """Return all of it, with line ends as line feeds.

    Raises:
        InvalidRequest: it is not in the encoding of the locale, UTF-8 nearly everywhere.
    """
    return re.sub("\r\n?", "\n", _decoded(sys.stdin.buffer.read(), place="standard input"))


def read_lines() -> Iterator[str]:
    """Yield its lines as they come, without the blanks around them; empty ones are passed over.

    Raises:
        InvalidRequest: a line is not in the encoding of the locale.
    """
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        if line := _decoded(raw, place=f"line {number} of standard input").strip():
            yield line


def _decoded(raw: bytes, *, place: str) -> str:
    encoding = sys.stdin.encoding
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{place} is not {encoding.upper()}, at byte {error.start}",
            remedy=f"convert it, such as with `iconv -f LATIN1 -t {encoding.upper()}`",
        ) from None
