"""Load generator: sends the requests of a load when they are due, and notes when their answers arrive."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
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
from genserve.client_credentials import load_client_certificate
from genserve.errors import InvalidRequest

_TICK_S = 0.5
_MAX_QUOTED = 300       # characters of a server's error
_REJECTED = (429, 503)
_RETRY_S = 1.0          # after a rejection that names no time
_KEEPALIVE_S = 2.0      # of an idle connection: less than that of servers, which close it after 5 s or more
_BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)

_Sent: TypeAlias = tuple[httpcore2.AsyncHTTPConnection, httpcore2.Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send, and when."""

    prompts: Iterable[BenchPrompt]          # one of the two may have no end
    arrivals_s: Iterable[float] = field(default_factory=lambda: repeat(0.0))    # when each is due; 0: at once
    max_concurrency: int | None = None      # further requests wait in the client; None: no limit
    duration_s: float | None = None         # afterwards, unfinished answers are cut; None: until the last one
    timeout_s: float = 600.0                # of a request
    retry_rejected: bool = False            # repeat a request after a 429 or 503, when the server says


def run_load(
    load: Load, target: Target, result: LoadResult, *, on_tick: Callable[[], None] = lambda: None
) -> None:
    """Send all requests and wait for their answers, which are added to `result` as they arrive.

    A request that fails is an answer with a `failure`. Ctrl-C raises KeyboardInterrupt; `result` then has
    what was measured so far.

    Args:
        load: the requests.
        target: where they go.
        result: receives the answers.
        on_tick: called twice a second; it delays the answers, so it must be quick.
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
            # In a loop: uvloop rounds to milliseconds, and may wake too early.
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
    """Send a request; returns False, after the server's time, if it is to be repeated."""
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
    """Where requests go, and what all of them have."""

    base_url: str                                           # without a trailing slash
    dialect: Dialect
    requested: Requested
    endpoint: str = ""                                      # the path; empty: that of the dialect
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


def tls_context(base_url: str, *, ca: Path | None, insecure: bool) -> ssl.SSLContext | None:
    """Return how to verify the certificate of a server: by the system's authorities, by `ca`, or not at all.

    None: the URL is not https.

    Raises:
        InvalidRequest: the file has no certificate, or that of GENSERVE_CLIENT_CERT cannot be used.
    """
    if not base_url.startswith("https://"):
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:    # also ssl.SSLError
        raise InvalidRequest(f"{ca} has no certificates: {error.strerror or error}", field="ca") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    load_client_certificate(context)
    return context


class RequestFailed(Exception):
    """A request has no complete answer."""

    def __init__(self, kind: str, message: str, *, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message)
        self.retry_s = retry_s      # when the server wants the request again; None: never


class Endpoint:
    """An HTTP client for one target; an async context manager.

    It keeps its connections itself, each for one request at a time: a pool of httpx2 looks at all of its
    connections for every request, which takes milliseconds with hundreds of them.
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
        """Send a request, and note its answer until the last event.

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
                # The server may close it at this moment. RFC 9112 (9.3.1) allows to send the request again.
                with suppress(*_BROKEN):
                    answer.sent_s = time.perf_counter()
                    return idle, await idle.handle_async_request(request)
            connection = httpcore2.AsyncHTTPConnection(
                self._url.origin, ssl_context=self._target.tls, keepalive_expiry=_KEEPALIVE_S
            )
            answer.sent_s = time.perf_counter()
            return connection, await connection.handle_async_request(request)
        except _BROKEN as error:
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
            self._note(content, answer, time.perf_counter())
            answer.text_times_s.clear()     # the whole answer is no chunk: it has a latency and nothing else
            answer.is_complete = True
            return
        decoder, is_ended = EventDecoder(), not self._dialect.marks_end
        async for chunk in response.aiter_stream():
            now_s = time.perf_counter()
            for event in decoder.feed(chunk):
                if event.data != "[DONE]":
                    is_ended |= self._note(event.data, answer, now_s)
        if not answer.end_s:
            raise RequestFailed("invalid_event", "the answer has no events")
        if not is_ended:
            raise RequestFailed("stream_cut", "the answer ended before its last event")
        answer.is_complete = True

    def _note(self, data: str | bytes, answer: Answer, now_s: float) -> bool:
        """Note an event; returns whether it completes the answer.

        Raises:
            RequestFailed: it reports an error, or is not an event of the dialect.
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
        except (KeyError, ValueError):      # missing, or a date
            continue
    return _RETRY_S
