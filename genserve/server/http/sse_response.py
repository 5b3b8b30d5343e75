"""SSE response: a stream of deltas as server-sent events; deltas that wait together are written together."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from genserve.completion import Delta, PromptProgress
from genserve.engine.delta_streams import AsyncDeltaStream
from genserve.errors import GenserveError
from genserve.request_context import current_request
from genserve.server.http.offload import answer_cost, offload_if_large

# sse-starlette would end every stream at the first SIGTERM, but streams may finish during the drain.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

PING_S = 15.0
# Delay before the client is watched: most answers are ready sooner, and to watch costs two tasks.
_WATCH_DELAY_S = 0.05
# The sign of life of a stream of server-sent events: a comment.
PING = b": ping\n\n"

_T = TypeVar("_T")


class Frames(ABC):
    """How a dialect writes a stream. All methods return bytes to send, which may be empty."""

    def start(self, *, num_cached_tokens: int) -> bytes:
        """Return what precedes the events of the first delta, or an error in its place.

        Args:
            num_cached_tokens: tokens of the prompt that were in the prefix cache.
        """
        return b""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the events of one delta, which may be the last."""

    def progress(self, progress: PromptProgress) -> bytes:
        """Return the event that says how much of the prompt was read."""
        return b""

    def part(self, part: Delta) -> bytes:
        """Return what `progress` or `delta` does."""
        return self.progress(part) if isinstance(part, PromptProgress) else self.delta(part)

    @abstractmethod
    def error(self, error: GenserveError) -> bytes:
        """Return the event of an error in the middle of the stream."""

    def end(self) -> bytes:
        """Return what follows the last delta, or an error."""
        return b""

    def ping(self) -> bytes:
        """Return a sign of life, sent every `PING_S` seconds, maybe before `start` is called."""
        return PING


def documented(*content_types: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entry of a successful answer that is not, or not always, JSON."""
    return {200: {"content": {content_type: {} for content_type in content_types}}}


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


def event(json_text: str, *, name: str = "") -> bytes:
    """Return one event. JSON has no raw line breaks, so it is one `data:` line.

    Args:
        json_text: the data.
        name: the type of the event; empty: it has none.
    """
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json_text}\n\n".encode()


class EventStream(EventSourceResponse):
    """A streamed answer, which closes its stream of deltas however it ends.

    The status is sent with the first delta, so that an error before it has its own status: 429 for a request
    that has waited too long. If there is no delta by the time of the first ping, the answer begins without
    one, and later errors are events. Call `begin` first.

    Attributes:
        content_type: the content type of the response.
    """

    content_type: ClassVar[str] = "text/event-stream"

    def __init__(self, stream: AsyncDeltaStream, frames: Frames) -> None:
        self._stream = stream
        self._frames = frames
        super().__init__(
            _events(stream, frames),
            media_type=self.content_type,
            ping=PING_S,
            sep="\n",
            headers={"Cache-Control": "no-cache"},
        )

    async def begin(self, receive: Receive) -> None:
        """Wait for the first delta, or for the time of the first ping.

        Raises:
            ClientLeft: the client has disconnected.
            GenserveError: the request ended before its first delta.
        """
        try:
            await while_connected(self._stream.first(), receive, timeout_s=PING_S)
        except TimeoutError:
            self.body_iterator = _events(self._stream, self._frames, first=self._frames.ping())
        except BaseException:
            self._stream.close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the ASGI protocol."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()

    @staticmethod
    def framed_error(document: bytes) -> bytes:
        """Return an error before the first delta, a JSON text, as the stream has it."""
        return b"data: %b\n\n" % document

    @override
    async def _ping(self, send: Send) -> None:
        # The library waits for a lock before it sends, and what was written later could overtake a ping.
        while True:     # to return would cancel what is still being sent
            await asyncio.sleep(PING_S)
            if self.active:
                ping = self._frames.ping()
                await send({"type": "http.response.body", "body": ping, "more_body": True})

    @override
    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # No `send_timeout` is set; the cancel scope for one would be a quarter of the cost of an event.
        await send(message)


class LoadingStream(Response, Generic[_T]):
    """A streamed answer that has begun before its model is loaded, with signs of life until it is."""

    def __init__(
        self,
        loading: asyncio.Task[_T],
        answer: Callable[[_T], Awaitable[Response]],
        *,
        ping: Callable[[], bytes] = lambda: PING,
        streams: type[EventStream] = EventStream,
    ) -> None:
        """Wait for a load.

        Args:
            loading: waits for the model.
            answer: makes the streamed answer of the loaded model.
            ping: returns a sign of life.
            streams: the class of that answer.
        """
        self._loading = loading
        self._answer = answer
        self._ping = ping
        self._streams = streams
        super().__init__(media_type=streams.content_type, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the signs of life and the answer; the ASGI protocol."""

        async def send_rest(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        async def write(body: bytes, *, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await write(self._ping(), more=True)
        try:
            while not (await asyncio.wait([self._loading], timeout=PING_S))[0]:
                await write(self._ping(), more=True)
            response = await self._answer(self._loading.result())
            await response(scope, receive, send_rest)
        except ClientLeft:
            return
        except Exception as error:
            errors = scope["app"].errors
            rejected = errors.response if isinstance(error, GenserveError) else errors.unexpected
            await write(self._streams.framed_error(bytes(rejected(scope, error).body)), more=False)
        finally:
            self._loading.cancel()


async def _events(
    stream: AsyncDeltaStream, frames: Frames, *, first: bytes = b""
) -> AsyncIterator[bytes]:
    if first:
        yield first
    write = frames.part if stream.requests[0].return_progress else frames.delta
    begun = False   # sent with the first token, since load generators measure the time to it
    try:
        async for deltas in stream:
            start = b"" if begun else frames.start(num_cached_tokens=deltas[0].cached_tokens)
            begun = True
            if deltas[0].prompt_logprobs:   # perhaps of a long prompt
                written = await offload_if_large(answer_cost(deltas), _written, write, deltas)
            else:
                written = _written(write, deltas)
            if chunk := start + written:
                yield chunk
    except GenserveError as error:
        current_request().fail(error)
        start = b"" if begun else frames.start(num_cached_tokens=0)
        yield start + frames.error(error)
    if last := frames.end():
        yield last


def _written(write: Callable[[Delta], bytes], deltas: list[Delta]) -> bytes:
    return b"".join(map(write, deltas))


async def while_connected(work: Awaitable[_T], receive: Receive, *, timeout_s: float = math.inf) -> _T:
    """Return the result of `work`, which is cancelled if it takes too long for the client.

    Raises:
        ClientLeft: the client has disconnected.
        TimeoutError: `timeout_s` seconds have passed.
    """
    event_loop = asyncio.get_running_loop()
    working = asyncio.ensure_future(work)
    watching: list[asyncio.Task[None]] = []
    reasons: list[Exception] = []   # why the work was cancelled here

    def give_up(reason: Exception) -> None:
        reasons.append(reason)
        working.cancel()

    def watch() -> None:
        watcher = event_loop.create_task(_disconnect(receive))
        watcher.add_done_callback(lambda _: give_up(ClientLeft()))
        watching.append(watcher)

    timers = [event_loop.call_later(_WATCH_DELAY_S, watch)]
    if timeout_s != math.inf:
        timers.append(event_loop.call_later(timeout_s, give_up, TimeoutError()))
    try:
        return await working
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not reasons or (task is not None and task.cancelling()):
            raise
        raise reasons[0] from None
    finally:
        for timer in timers:
            timer.cancel()
        if working.done() and not working.cancelled():
            working.exception()     # otherwise asyncio would log it, if this task is cancelled meanwhile
        if watching:
            watching[0].cancel()
            await asyncio.gather(*watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
