"""Load generator: sends the requests of a load when they are due, and records when the answers arrive."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio.lowlevel
import httpcore2
import orjson
import uvloop

from genserve.bench.answers import Answer, Failure, LoadResult
from genserve.bench.datasets import BenchPrompt
from genserve.bench.dialects import Dialect, Requested
from genserve.client.sse_decoder import EventDecoder
from genserve.client_credentials import tls_failure

_TICK_S = 0.5
_MAX_QUOTED = 300       # characters of a server's error
_REJECTED = (429, 503)
_RETRY_S = 1.0          # the wait after a rejection without a Retry-After
_KEEPALIVE_S = 2.0      # idle connections are closed before servers close them, after 5 s or more
_BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)

_Sent: TypeAlias = tuple[httpcore2.AsyncHTTPConnection, httpcore2.Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send, and when."""

    prompts: Iterable[BenchPrompt]          # prompts or arrivals may be endless, but not both
    arrivals_s: Iterable[float] = field(default_factory=lambda: repeat(0.0))    # when each is due; 0: at once
    max_concurrency: int | None = None      # further requests wait in the client; None: no limit
    duration_s: float | None = None         # afterwards, unfinished answers are cut; None: until the last one
    timeout_s: float = 600.0                # the longest time of a request
    retry_rejected: bool = False            # repeat a request after a 429 or 503, when the server says


def run_load(
    load: Load, target: Target, result: LoadResult, *, on_tick: Callable[[], None] = lambda: None
) -> None:
    """Send all requests, and add their answers to `result` as they arrive.

    A request that fails is an answer with a `failure`. Ctrl-C raises KeyboardInterrupt; `result` then has
    everything measured so far.

    Args:
        load: the requests, and when to send them.
        target: the server to send them to.
        result: receives the answers.
        on_tick: is called twice a second; it must be quick, since it delays the answers.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(load, target, result, on_tick))


async def _run(load: Load, target: Target, result: LoadResult, on_tick: Callable[[], None]) -> None:
    async with Endpoint(target) as endpoint:
        await anyio.lowlevel.checkpoint()   # imports a backend, which would delay the first request
        ticks = asyncio.create_task(_tick(on_tick))
        result.started_s, cpu_started_s = time.perf_counter(), time.process_time()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(load.duration_s):
                    await _send_all(load, endpoint, result)
        finally:
            result.elapsed_s = time.perf_counter() - result.started_s
            result.cpu_s = time.process_time() - cpu_started_s
            ticks.cancel()


async def _tick(on_tick: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        on_tick()


async def _send_all(load: Load, endpoint: Endpoint, result: LoadResult) -> None:
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    async with asyncio.TaskGroup() as tasks:
        for due_s, prompt in zip(load.arrivals_s, load.prompts, strict=False):
            # A loop, since uvloop rounds to milliseconds and may wake too early.
            while (early_s := result.started_s + due_s - time.perf_counter()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(early_s)
            if places:
                await places.acquire()
            task = tasks.create_task(_send(prompt, load, endpoint, result))
            if places:
                task.add_done_callback(lambda _task: places.release())


async def _send(prompt: BenchPrompt, load: Load, endpoint: Endpoint, result: LoadResult) -> None:
    answer = Answer(sent_s=time.perf_counter())
    result.answers.append(answer)
    try:
        async with asyncio.timeout(load.timeout_s):
            while not await _asked(prompt, load, endpoint, answer):
                pass
    except RequestFailed as error:
        answer.failure = error.failure
    except TimeoutError:
        answer.failure = Failure(kind="timeout", message=f"no complete answer within {load.timeout_s:g} s")
    finally:
        if not answer.is_complete:
            answer.end_s = time.perf_counter()


async def _asked(prompt: BenchPrompt, load: Load, endpoint: Endpoint, answer: Answer) -> bool:
    """Send a request; return False, after the wait that the server asks for, if it is to be repeated."""
    try:
        await endpoint.ask(prompt, answer)
    except RequestFailed as error:
        if not load.retry_rejected or error.retry_s is None:
            raise
        answer.rejections_s.append(time.perf_counter() - answer.sent_s)
        await asyncio.sleep(error.retry_s)
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server to send requests to, and what all requests share."""

    base_url: str                                           # without a trailing slash
    dialect: Dialect
    requested: Requested
    endpoint: str = ""                                      # the path; empty: the dialect's
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)    # may hold a key
    extra_body: Mapping[str, Any] = field(default_factory=dict)     # more fields; None removes one
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        """The URL of the requests."""
        if self.endpoint:
            return self.base_url + self.endpoint
        return self.dialect.url(self.base_url, model=self.requested.model)

    def content(self, prompt: BenchPrompt) -> bytes:
        """Return the body of a request."""
        body = {**self.dialect.body(prompt, self.requested), **prompt.fields, **self.extra_body}
        return orjson.dumps({name: value for name, value in body.items() if value is not None})


class RequestFailed(Exception):
    """A request has no complete answer."""

    def __init__(self, kind: str, message: str, *, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message)
        self.retry_s = retry_s      # after how long to repeat the request; None: never


class Endpoint:
    """An HTTP client for one target; an async context manager.

    It keeps its connections itself, each for one request at a time: a pool of httpx2 scans all connections
        for
    every request, which takes milliseconds with hundreds of connections.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._dialect = target.dialect
        self._url = httpcore2.URL(target.url)
        host, port = self._url.host, self._url.port
        headers = {
            "host": (host if port is None else b"%s:%d" % (host, port)).decode(),
            "content-type": "application/json",
            "accept-encoding": "identity",
            **target.headers,
        }
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._idle: list[httpcore2.AsyncHTTPConnection] = []    # the most recently used last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._idle:
            await connection.aclose()

    async def ask(self, prompt: BenchPrompt, answer: Answer) -> None:
        """Send a request, and record its answer until the last event.

        Raises:
            RequestFailed: the server cannot be reached, rejects it, or does not complete the answer.
        """
        connection, response = await self._send(self._target.content(prompt), answer)
        try:
            if 200 <= response.status < 300:
                await self._read(response, answer)
            else:
                await _raise_status(response)
        except _BROKEN as error:
            raise RequestFailed("stream_cut", str(error) or type(error).__name__) from error
        finally:
            await response.aclose()
            if connection.is_idle():
                self._idle.append(connection)
            else:
                await connection.aclose()

    async def _send(self, content: bytes, answer: Answer) -> _Sent:
        """Send a request, and return the connection and the head of the answer; raises RequestFailed."""
        headers = [*self._headers, (b"content-length", b"%d" % len(content))]
        request = httpcore2.Request("POST", self._url, headers=headers, content=content)
        try:
            while (idle := await self._pop_idle()) is not None:
                # The server may close an idle connection right now. RFC 9112 (9.3.1) allows sending the
                # request again.
                with suppress(*_BROKEN):
                    answer.sent_s = time.perf_counter()
                    return idle, await idle.handle_async_request(request)
            connection = httpcore2.AsyncHTTPConnection(
                self._url.origin, ssl_context=self._target.tls, keepalive_expiry=_KEEPALIVE_S
            )
            answer.sent_s = time.perf_counter()
            return connection, await connection.handle_async_request(request)
        except _BROKEN as error:
            if failure := tls_failure(error, url=self._target.url):
                raise RequestFailed("tls", str(failure)) from error
            raise RequestFailed("connection", str(error) or type(error).__name__) from error

    async def _pop_idle(self) -> httpcore2.AsyncHTTPConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return None

    async def _read(self, response: httpcore2.Response, answer: Answer) -> None:
        if not self._dialect.is_streamed:
            content = await response.aread()
            self._record(content, answer, time.perf_counter())
            answer.text_times_s.clear()     # an answer that is not streamed has a latency and no other times
            answer.is_complete = True
            return
        decoder, is_ended = EventDecoder(), not self._dialect.marks_end
        async for chunk in response.aiter_stream():
            now_s = time.perf_counter()
            for event in decoder.feed(chunk):
                if event.data != "[DONE]":
                    is_ended |= self._record(event.data, answer, now_s)
        if not answer.end_s:
            raise RequestFailed("invalid_event", "the answer has no events")
        if not is_ended:
            raise RequestFailed("stream_cut", "the answer ended before its last event")
        answer.is_complete = True

    def _record(self, data: str | bytes, answer: Answer, now_s: float) -> bool:
        """Record an event; return whether it completes the answer.

        Raises:
            RequestFailed: the event reports an error, or is not an event of the dialect.
        """
        try:
            event = orjson.loads(data)
            error = event.get("error")
            chunk = None if error else self._dialect.read(event)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            text = data if isinstance(data, str) else data.decode(errors="replace")
            raise RequestFailed("invalid_event", f"unexpected event: {text[:_MAX_QUOTED]}") from None
        answer.end_s = now_s
        if chunk is None:
            raise RequestFailed("error_event", _message_of(orjson.dumps({"error": error}).decode()))
        if chunk.has_text:
            answer.text_times_s.append(now_s)
        if chunk.prompt_tokens is not None:
            answer.prompt_tokens = chunk.prompt_tokens
        if chunk.output_tokens is not None:
            answer.output_tokens = chunk.output_tokens
        return chunk.is_last


async def _raise_status(response: httpcore2.Response) -> None:
    text = (await response.aread()).decode(errors="replace")
    message = _message_of(text) or response.extensions["reason_phrase"].decode(errors="replace")
    retry_s = _retry_after_s(response.headers) if response.status in _REJECTED else None
    raise RequestFailed(f"http_{response.status}", message, retry_s=retry_s)


def _message_of(text: str) -> str:
    """Return the message in the body of an error."""
    with suppress(ValueError):
        document = orjson.loads(text.removeprefix("data:"))
        error = document.get("error") if isinstance(document, dict) else None
        text = str(error.get("message", error) if isinstance(error, dict) else error or text)
    return text.strip()[:_MAX_QUOTED]


def _retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float:
    """Return the seconds that a rejection asks to wait."""
    found = {name.lower(): value for name, value in headers}
    for name, unit_s in ((b"retry-after-ms", 1e-3), (b"retry-after", 1.0)):
        try:
            return max(0.0, float(found[name]) * unit_s)
        except (KeyError, ValueError):      # the header is missing, or has a date
            continue
    return _RETRY_S
