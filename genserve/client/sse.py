"""SSE: server-sent events, decoded from bytes as they arrive.

By the standard (https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6), but for
`id` and `retry`: they serve reconnection, and a generation cannot be taken up again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Event", "EventDecoder"]

# Only these three end a line: `str.splitlines` would also break at U+2028, which JSON may hold raw.
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a stream."""

    data: str                   # the `data` lines, joined by line feeds
    name: str = "message"


class EventDecoder:
    """Decodes one stream, whatever the borders of its chunks. Linear in the bytes given."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False      # a line feed that comes next belongs to the line end before it
        self._at_start = True
        self._data: list[str] = []
        self._name = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes; return the events that they complete."""
        if not chunk:
            return []
        lines = _LINE_END.split(chunk[1:] if self._after_cr and chunk.startswith(b"\n") else chunk)
        self._after_cr = chunk.endswith(b"\r")
        events = []
        for ended in lines[:-1]:
            event = self._end_line(ended)
            if event is not None:
                events.append(event)
        self._line += lines[-1]
        return events

    def _end_line(self, rest: bytes) -> Event | None:
        line = bytes(self._line + rest)
        self._line.clear()
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            return self._dispatch()
        field, _, value = line.decode("utf-8", errors="replace").partition(":")
        self._read_field(field, value.removeprefix(" "))
        return None

    def _read_field(self, field: str, value: str) -> None:
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        # An empty field name is a comment: servers send them to keep the connection alive.

    def _dispatch(self) -> Event | None:
        event = Event(data="\n".join(self._data), name=self._name or "message") if self._data else None
        self._data.clear()
        self._name = ""
        return event
