"""SSE decoder: decodes bytes into server-sent events, and events into the deltas of an answer; no I/O.

It follows the standard (https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6) except
for `id` and `retry`, which serve reconnection: a generation cannot be resumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from genserve.client.reply_errors import error_of_event, unknown_reply
from genserve.completion import Delta
from genserve.errors import StreamBroken

# Not `str.splitlines`, which also splits at U+2028, a character that JSON strings may contain.
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The longest events have a whole answer, or log-probabilities of many tokens.
_MAX_EVENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a stream."""

    data: str                   # the `data` lines, joined by line feeds
    name: str = "message"


class EventDecoder:
    """Decodes the events of one stream; chunks may end anywhere. Linear in the number of bytes.

    It keeps at most one event, of up to 16 MiB.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False      # a following line feed belongs to the same line end
        self._at_start = True
        self._data: list[str] = []
        self._data_bytes = 0
        self._name = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that the next bytes complete; raises StreamBroken for one that is too long."""
        if not chunk:
            return []
        lines = _LINE_END.split(chunk[1:] if self._after_cr and chunk.startswith(b"\n") else chunk)
        self._after_cr = chunk.endswith(b"\r")
        events = []
        for line_end in lines[:-1]:
            event = self._end_line(line_end)
            if event is not None:
                events.append(event)
        self._line += lines[-1]
        if len(self._line) + self._data_bytes > _MAX_EVENT_BYTES:
            raise StreamBroken(
                f"an event of the stream is longer than {_MAX_EVENT_BYTES >> 20} MiB",
                remedy="check that the base URL is that of a genserve server",
            )
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
            self._data_bytes += len(value)
        elif field == "event":
            self._name = value
        # An empty field name is a comment, which servers send to keep the connection alive.

    def _dispatch(self) -> Event | None:
        event = Event(data="\n".join(self._data), name=self._name or "message") if self._data else None
        self._data.clear()
        self._data_bytes = 0
        self._name = ""
        return event


class _AnswerEvents(Protocol):
    """The reader of one dialect's events."""

    def read(self, event: Mapping[str, Any], /) -> Delta | None: ...


class DeltaDecoder:
    """Decodes the deltas of one streamed reply; chunks may end anywhere."""

    def __init__(self, answer: _AnswerEvents) -> None:
        self._events = EventDecoder()
        self._answer = answer
        self._finished = False

    def feed(self, chunk: bytes) -> Iterator[Delta]:
        """Yield the deltas that the next bytes complete; the caller must exhaust the iterator.

        Raises:
            GenserveError: an event reports that the request failed.
            Unreachable: an event has another shape.
        """
        for event in self._events.feed(chunk):
            if self._finished or event.data == "[DONE]":
                continue
            delta = self._read(event.data)
            if delta is not None:
                self._finished = delta.finish_reason is not None
                yield delta

    def end(self) -> None:
        """Check that the answer is complete, after the last byte.

        Raises:
            StreamBroken: the last delta is missing.
        """
        if not self._finished:
            raise StreamBroken(
                "the stream ended before its last event", remedy="see the server's log, and retry"
            )

    def _read(self, data: str) -> Delta | None:
        with unknown_reply():
            payload = json.loads(data)
            if payload.get("error") is None:
                return self._answer.read(payload)
        raise error_of_event(payload)
