"""Reply errors: turns error replies and broken connections into exceptions of genserve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from genserve.client_credentials import tls_failure
from genserve.errors import (
    Closed,
    ContextLengthExceeded,
    DeadlineExceeded,
    Forbidden,
    GenserveError,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    RateLimited,
    StreamBroken,
    Unauthenticated,
    Unreachable,
)

_KINDS: tuple[type[GenserveError], ...] = (
    InvalidRequest, ContextLengthExceeded, Unauthenticated, Forbidden, ModelNotFound, ModelNotReady,
    Overloaded, RateLimited, ModelFailed, DeadlineExceeded,
)
# The exceptions by genserve's and OpenAI's error codes, and by OpenAI's and TGI's error types.
_BY_WORD: Mapping[str, type[GenserveError]] = {kind.code: kind for kind in _KINDS} | {
    "slow_down": Overloaded,
    "server_is_overloaded": Overloaded,
    "invalid_request_error": InvalidRequest,
    "authentication_error": Unauthenticated,
    "permission_error": Forbidden,
    "not_found_error": ModelNotFound,
    "rate_limit_error": Overloaded,
    "server_error": ModelFailed,
    "validation": InvalidRequest,
    "generation": ModelFailed,
    "incomplete_generation": ModelFailed,
}
_BY_STATUS: Mapping[int, type[GenserveError]] = {
    401: Unauthenticated, 403: Forbidden, 404: Unreachable, 429: Overloaded, 502: Unreachable,
    503: Overloaded, 504: Unreachable,
}
# The largest answer, which may have log-probabilities of many tokens, and the largest error.
MAX_ANSWER_BYTES = 256 << 20
MAX_ERROR_BYTES = 1 << 20
_REMEDIES: Mapping[int, str] = {
    404: "check that the base URL is that of a genserve server",
}


def error_of_reply(*, status: int, headers: Mapping[str, str], body: bytes, url: str) -> GenserveError:
    """Return the exception for an error reply of either dialect, or of a proxy.

    Args:
        status: 300 or above.
        headers: looked up in lower case; `retry-after-ms` and `retry-after` in seconds are read.
        body: JSON in the shape of TGI or OpenAI, or anything else.
        url: named in the message if the body has none.
    """
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        payload = None
    reply = payload if isinstance(payload, dict) and "error" in payload else {}
    return _error(reply, status=status, retry_after_s=_retry_after_s(headers), url=url)


def error_of_event(payload: Mapping[str, Any]) -> GenserveError:
    """Return the exception for an event with the key `error`."""
    return _error(payload, status=500, retry_after_s=0, url="the stream")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the wait that the server requests; OpenAI's header in milliseconds comes first; 0: none."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text) * unit_s
    return 0


def _error(payload: Mapping[str, Any], *, status: int, retry_after_s: float, url: str) -> GenserveError:
    inner = payload.get("error")
    details = inner if isinstance(inner, dict) else {**payload, "message": inner}
    kind = _kind(details, status=status)
    message = str(details.get("message") or f"{url} answered with status {status}")
    remedy = str(details.get("remedy") or _REMEDIES.get(status, ""))
    # It is in the message too, for clients that show nothing else.
    if remedy and (at := message.lower().rfind(remedy.lower())) > 0:
        message = message[:at].rstrip("; ")
    if kind is Unauthenticated:     # the server's remedy is for users who write headers themselves
        return Unauthenticated(message, remedy="set GENSERVE_API_KEY to the server's key, or pass api_key=")
    if issubclass(kind, Overloaded):
        return kind(message, retry_after_s=retry_after_s or 1, remedy=remedy)
    if kind is ModelNotReady:
        return ModelNotReady(message, retry_after_s=retry_after_s, remedy=remedy)
    return kind(message, remedy=remedy, field=details.get("field") or details.get("param"))


def _kind(details: Mapping[str, Any], *, status: int) -> type[GenserveError]:
    kind = _named_kind(details, status=status)
    # With these statuses the server has computed nothing, for whatever reason, for example because it stops.
    if status in (408, 429, 503) and kind not in (Overloaded, RateLimited, ModelNotReady):
        return Overloaded
    return kind


def _named_kind(details: Mapping[str, Any], *, status: int) -> type[GenserveError]:
    for word in (details.get("code"), details.get("error_type"), details.get("type")):
        if isinstance(word, str) and word in _BY_WORD:
            return _BY_WORD[word]
    if status < 400:
        return Unreachable  # a redirection does not come from a genserve server
    return _BY_STATUS.get(status, InvalidRequest if status < 500 else ModelFailed)


class ReplyBody:
    """The received part of a reply's body, which is limited in size."""

    def __init__(self, url: str, *, max_bytes: int) -> None:
        self._url = url
        self._max_bytes = max_bytes
        self._received = bytearray()

    def add(self, chunk: bytes) -> None:
        """Append the next bytes; raises Unreachable if the body is too large."""
        self._received += chunk
        if len(self._received) > self._max_bytes:
            raise Unreachable(
                f"the reply of {self._url} is longer than {self._max_bytes >> 20} MiB",
                remedy="check that the base URL is that of a genserve server",
            )

    def __bytes__(self) -> bytes:
        return bytes(self._received)


@contextmanager
def unreachable_at(url: str) -> Iterator[None]:
    """Turn an error of the transport before the reply is complete into Unreachable, as its `__cause__`."""
    try:
        yield
    except httpx2.ConnectError as error:
        raise tls_failure(error, url=url) or Unreachable(
            f"no server answers at {url}", remedy="start one with `genserve serve`, or check the URL"
        ) from error
    except httpx2.TimeoutException as error:
        raise Unreachable(
            f"{url} did not answer in time", remedy="increase timeout_s of the client, or lower max_tokens"
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        tls = ": a server with a certificate needs https://" if url.startswith("http://") else ""
        raise tls_failure(error, url=url) or Unreachable(
            f"the request to {url} failed: {error}", remedy=f"see the server's log, or check the URL{tls}"
        ) from error


@contextmanager
def broken_stream() -> Iterator[None]:
    """Turn an error of the transport within a stream into StreamBroken, as its `__cause__`."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise StreamBroken(
            f"the stream broke off: {error or type(error).__name__}", remedy="see the server's log, and retry"
        ) from error


@contextmanager
def closed_if(is_closed: Callable[[], bool]) -> Iterator[None]:
    """Raise Closed for a broken connection if the client has been closed."""
    try:
        yield
    except (Unreachable, StreamBroken) as error:
        if is_closed():
            raise closed() from error
        raise


@contextmanager
def unknown_reply() -> Iterator[None]:
    """Turn an error from reading a reply of another shape into Unreachable."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreachable(
            "the reply is not that of a genserve server",
            remedy="check that the base URL is that of a genserve server",
        ) from error


def closed() -> Closed:
    """Return the error of a client that is used after `close`."""
    return Closed("the client was closed", remedy="create another one")
