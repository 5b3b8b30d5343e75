"""Delta decoder: the bytes of a streamed reply in, the deltas of the answer out; no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from genserve.client.failures import error_of_event, not_understood
from genserve.client.sse import EventDecoder
from genserve.errors import StreamBroken
from genserve.request import Delta

__all__ = ["DeltaDecoder"]


class _AnswerEvents(Protocol):
    """What one dialect says in its events."""

    def read(self, event: Mapping[str, Any], /) -> Delta | None: ...


class DeltaDecoder:
    """Decodes one streamed reply, whatever the borders of its chunks."""

    def __init__(self, answer: _AnswerEvents) -> None:
        self._events = EventDecoder()
        self._answer = answer
        self._finished = False

    def feed(self, chunk: bytes) -> Iterator[Delta]:
        """Take the next bytes; yield the deltas that they complete. To be read to its end.

        Raises:
            GenserveError: an event says that the request failed.
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
        """Say that no more bytes come.

        Raises:
            StreamBroken: the last delta is missing.
        """
        if not self._finished:
            raise StreamBroken(
                "the stream ended before its last event", remedy="see the server's log; ask again"
            )

    def _read(self, data: str) -> Delta | None:
        with not_understood():
            payload = json.loads(data)
            if payload.get("error") is None:
                return self._answer.read(payload)
        raise error_of_event(payload)
