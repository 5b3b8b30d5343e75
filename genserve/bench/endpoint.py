"""Endpoint: sends one request to a server, and notes when its answer arrives."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import orjson

from genserve.bench.answers import Answer, Failure
from genserve.bench.datasets import BenchPrompt
from genserve.bench.dialects import Dialect, Requested
from genserve.client.sse_decoder import EventDecoder
from genserve.errors import InvalidRequest

_MAX_QUOTED = 300       # characters of a server's error
_REJECTED = (429, 503)
_RETRY_S = 1.0          # after a rejection that names no time
_KEEPALIVE_S = 2.0      # of an idle connection: less than that of servers, which close it after 5 s or more
_CLOSED = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and what all of them have."""

    base_url: str                                           # without a trailing slash
    dialect: Dialect
    requested: Requested
    endpoint: str = ""                                      # the path; empty: that of the dialect
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)    # may hold a key
    extra_body: Mapping[str, Any] = field(default_factory=dict)     # more fields; None removes one
    tls: ssl.SSLContext | bool = False

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


def tls_context(base_url: str, *, ca: Path | None, insecure: bool) -> ssl.SSLContext | bool:
    """Return how to verify the certificate of a server: by the system's authorities, by `ca`, or not at all.

    Raises:
        InvalidRequest: the file has no certificate.
    """
    if insecure or not base_url.startswith("https://"):
        return False        # reading the authorities takes 20 ms
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:    # also ssl.SSLError
        raise InvalidRequest(f"{ca} has no certificates: {error.strerror or error}", field="ca") from error


class RequestFailed(Exception):
    """A request has no complete answer."""

    def __init__(self, kind: str, message: str, *, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message)
        self.retry_s = retry_s      # when the server wants the request again; None: never


class Endpoint:
    """An HTTP client for one target; an async context manager."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._dialect = target.dialect
        self._http = httpx2.AsyncClient(
            headers={"accept-encoding": "identity", "content-type": "application/json", **target.headers},
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S
            ),
            timeout=None,       # the load has one for the whole request
            verify=target.tls,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, prompt: BenchPrompt, answer: Answer) -> None:
        """Send a request, and note its answer until the last event.

        Raises:
            RequestFailed: the server cannot be reached, rejects it, or does not complete the answer.
        """
        response = await self._send(self._target.content(prompt), answer)
        try:
            if response.is_success:
                await self._read(response, answer)
            else:
                await _raise_status(response)
        except httpx2.HTTPError as error:
            raise RequestFailed("stream_cut", _said(error)) from error
        finally:
            await response.aclose()

    async def _send(self, content: bytes, answer: Answer) -> httpx2.Response:
        """Send a request, and return the head of the answer; raises RequestFailed.

        A server may close an idle connection at the moment at which a request is sent over it. Such a request
        is sent again, as RFC 9112 (section 9.3.1) allows.
        """
        request = self._http.build_request("POST", self._target.url, content=content)
        answer.sent_s = time.perf_counter()
        try:
            try:
                return await self._http.send(request, stream=True)
            except _CLOSED:
                answer.sent_s = time.perf_counter()
                return await self._http.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise RequestFailed("connection", _said(error)) from error

    async def _read(self, response: httpx2.Response, answer: Answer) -> None:
        if not self._dialect.is_streamed:
            content = await response.aread()
            self._note(content, answer, time.perf_counter())
            answer.text_times_s.clear()     # the whole answer is no chunk: it has a latency and nothing else
            answer.is_complete = True
            return
        decoder, is_ended = EventDecoder(), not self._dialect.marks_end
        async for chunk in response.aiter_raw():
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


async def _raise_status(response: httpx2.Response) -> None:
    text = (await response.aread()).decode(errors="replace")
    kind = f"http_{response.status_code}"
    retry_s = _retry_after_s(response.headers) if response.status_code in _REJECTED else None
    raise RequestFailed(kind, _message_of(text) or response.reason_phrase, retry_s=retry_s)


def _message_of(text: str) -> str:
    """Return the message in the body of an error."""
    with suppress(ValueError):
        document = orjson.loads(text.removeprefix("data:"))
        error = document.get("error") if isinstance(document, dict) else None
        text = str(error.get("message", error) if isinstance(error, dict) else error or text)
    return text.strip()[:_MAX_QUOTED]


def _retry_after_s(headers: httpx2.Headers) -> float:
    """Return the seconds that a rejection asks to wait."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit_s)
        except (KeyError, ValueError):      # missing, or a date
            continue
    return _RETRY_S


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
