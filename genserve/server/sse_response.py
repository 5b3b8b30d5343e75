"""SSE response: a stream of deltas as server-sent events; deltas that wait together are written together."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from genserve.completion import Delta
from genserve.errors import GenserveError
from genserve.generation.delta_streams import AsyncDeltaStream
from genserve.log import fail_request
from genserve.server.offload import answer_cost, offload_if_large

# sse-starlette would end every stream at the first SIGTERM, but streams may finish during the drain.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

_PING_S = 15

_T = TypeVar("_T")


class Frames(ABC):
    """How a dialect writes a stream. All methods return bytes to send, which may be empty."""

    def start(self) -> bytes:
        """Return what precedes the events of the first delta."""
        return b""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the events of one delta, which may be the last."""

    @abstractmethod
    def error(self, error: GenserveError) -> bytes:
        """Return the event of an error in the middle of the stream."""

    def end(self) -> bytes:
        """Return what follows the last delta, or an error."""
        return b""


def documented(*content_types: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entry of a successful answer that is not, or not always, JSON."""
    return {200: {"content": {content_type: {} for content_type in content_types}}}


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


def event(json_text: str, *, name: str = "") -> bytes:
    """Return one event. JSON has no raw line breaks, so it is one `data:` line.

    Args:
        json_text: the data.
        name: of the event's type; empty: it has none.
    """
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json_text}\n\n".encode()


class EventStream(EventSourceResponse):
    """A streamed answer, which closes its stream of deltas however it ends.

    The status is sent with the first delta, so that an error before it has its own status: 429 for a request
    that has waited too long. If there is no delta by the time of the first ping, the answer begins without
    one, and later errors are events.

    Attributes:
        content_type: of the response.
        ping_s: how often a ping is sent; 0: never.
        ping_event: the ping; None: a comment.
    """

    content_type: ClassVar[str] = "text/event-stream"
    ping_s: ClassVar[int] = _PING_S
    ping_event: ClassVar[ServerSentEvent | None] = None

    def __init__(self, stream: AsyncDeltaStream, frames: Frames) -> None:
        self._stream = stream
        super().__init__(
            _events(stream, frames),
            media_type=self.content_type,
            ping=self.ping_s,
            ping_message_factory=self._ping_event if self.ping_event else None,
            sep="\n",
            headers={"Cache-Control": "no-cache"},
        )

    def _ping_event(self) -> ServerSentEvent:
        assert self.ping_event is not None
        return self.ping_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the ASGI protocol. Raises what `_first_delta` raises."""
        try:
            await _first_delta(self._stream, receive)
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()

    @override
    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # No `send_timeout` is set; the cancel scope for one would be a quarter of the cost of an event.
        await send(message)


async def _events(stream: AsyncDeltaStream, frames: Frames) -> AsyncIterator[bytes]:
    first = frames.start()  # sent with the first token, since load generators measure the time to it
    try:
        async for deltas in stream:
            if deltas[0].prompt_logprobs:   # perhaps of a long prompt
                written = await offload_if_large(answer_cost(deltas), _written, frames, deltas)
            else:
                written = _written(frames, deltas)
            if chunk := first + written:
                yield chunk
            first = b""
    except GenserveError as error:
        fail_request(error)
        yield first + frames.error(error)
    if last := frames.end():
        yield last


def _written(frames: Frames, deltas: list[Delta]) -> bytes:
    return b"".join(map(frames.delta, deltas))


async def read_all(stream: AsyncDeltaStream, request: Request) -> list[Delta]:
    """Return all deltas of an answer; stop it if the client disconnects.

    Raises:
        ClientLeft: the client has disconnected.
        GenserveError: the model failed.
    """
    async with stream:
        deltas = await while_connected(_collect(stream), request.receive)
        assert deltas is not None
        return deltas


async def _first_delta(stream: AsyncDeltaStream, receive: Receive) -> None:
    """Wait for the first delta, at most until the first ping; raises as `read_all` does."""
    await while_connected(stream.first(), receive, timeout_s=_PING_S)


async def while_connected(
    work: Awaitable[_T], receive: Receive, *, timeout_s: float | None = None
) -> _T | None:
    """Return the result of `work`, or None on a timeout; raises ClientLeft if the client disconnects."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise ClientLeft
        return None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _collect(stream: AsyncDeltaStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
