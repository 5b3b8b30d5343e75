"""SSE: a stream of deltas as server-sent events; what waits together is written together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from fastapi import Request
from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from genserve.errors import GenserveError
from genserve.generation.streams import AsyncStream
from genserve.log import fail_request
from genserve.request import Delta

__all__ = ["ClientLeft", "EventStream", "Frames", "event", "read_all"]

# sse-starlette would cut every stream at the first SIGTERM; answers may go on while the server drains.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

_PING_S = 15


class Frames(Protocol):
    """How a dialect writes a stream. All methods return bytes that are ready to send, or none."""

    def start(self) -> bytes:
        """What comes before the first delta."""

    def delta(self, delta: Delta) -> bytes:
        """One delta, the last one included."""

    def error(self, error: GenserveError) -> bytes:
        """An error in the middle of the stream."""

    def end(self) -> bytes:
        """What comes after the last delta, or after an error."""


class ClientLeft(Exception):
    """The client closed its connection before the answer was there."""


def event(json_text: str) -> bytes:
    """Return one event. JSON has no raw line breaks, so it is one `data:` line."""
    return f"data: {json_text}\n\n".encode()


class EventStream(EventSourceResponse):
    """The answer that streams; however it ends, the stream behind it is closed."""

    def __init__(self, stream: AsyncStream, frames: Frames) -> None:
        self._stream = stream
        super().__init__(
            _events(stream, frames), ping=_PING_S, sep="\n", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the ASGI protocol."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()

    @override
    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # No `send_timeout` is set, and a scope for one would be a quarter of what an event costs.
        await send(message)


async def _events(stream: AsyncStream, frames: Frames) -> AsyncIterator[bytes]:
    if first := frames.start():
        yield first
    try:
        async for deltas in stream:
            if chunk := b"".join(map(frames.delta, deltas)):
                yield chunk
    except GenserveError as error:
        fail_request(error)
        yield frames.error(error)
    if last := frames.end():
        yield last


async def read_all(stream: AsyncStream, request: Request) -> list[Delta]:
    """Wait for the whole answer, and stop it if the client leaves meanwhile.

    Raises:
        ClientLeft: nobody is there to be answered.
        GenserveError: the model failed.
    """
    async with stream:
        reading = asyncio.ensure_future(_collect(stream))
        leaving = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            raise ClientLeft
        finally:
            reading.cancel()
            leaving.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)


async def _collect(stream: AsyncStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
