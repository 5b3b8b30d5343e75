"""Connection: the URL, key and timeouts of a client, and when it retries."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import httpx2

from genserve.client.api_calls import ApiRequest
from genserve.client_credentials import (
    bearer,
    has_client_certificate,
    load_client_certificate,
    tls_failure,
)
from genserve.errors import GenserveError, InvalidRequest, ModelNotReady, Overloaded, Unreachable
from genserve.version import __version__

Sent = TypeVar("Sent")

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0      # for a longer Retry-After the client gives up
_NEVER_ARRIVED = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout)
_CONNECT_S = 5.0
# With httpx2's default of 100 connections, further streams would wait in the client unnoticed.
LIMITS = httpx2.Limits(max_connections=1000, max_keepalive_connections=100)


def retry_wait_s(error: GenserveError, *, attempt: int, max_retries: int, jitter: float) -> float | None:
    """Return the seconds to wait before the next attempt, or None to give up.

    Rejections because of load (statuses 429 and 503) and failed connections are retried. Timeouts are not:
    the server may still work on the request. The wait doubles with each attempt, and is at least the server's
    Retry-After.

    Args:
        error: the error of this attempt.
        attempt: the number of attempts before this one.
        max_retries: the number of attempts after the first.
        jitter: a random number in [0, 1), which spreads the retries of many clients.
    """
    if attempt >= max_retries or not _is_temporary(error):
        return None
    backoff_s = _FIRST_WAIT_S * (1 << attempt) * (0.5 + jitter / 2)
    retry_after_s = error.retry_after_s if isinstance(error, (Overloaded, ModelNotReady)) else 0
    if retry_after_s > _LONGEST_WAIT_S:
        return None
    return max(backoff_s, retry_after_s + jitter / 2)


async def with_retries(send: Callable[[], Awaitable[Sent]], *, max_retries: int) -> Sent:
    """Return what `send` returns, after further attempts; raises the error of the last one."""
    attempt = 0
    while True:
        try:
            return await send()
        except GenserveError as error:
            wait_s = retry_wait_s(error, attempt=attempt, max_retries=max_retries, jitter=random.random())
            if wait_s is None:
                raise
        await asyncio.sleep(wait_s)
        attempt += 1


def _is_temporary(error: GenserveError) -> bool:
    if isinstance(error, Unreachable):
        cause = error.__cause__
        return isinstance(cause, _NEVER_ARRIVED) and tls_failure(cause, url="") is None
    return isinstance(error, (Overloaded, ModelNotReady))


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The settings of a client."""

    base_url: str                                       # without a trailing slash
    max_retries: int
    headers: dict[str, str] = field(repr=False)         # holds the key
    timeout: httpx2.Timeout

    def url(self, request: ApiRequest) -> str:
        """Return the URL of a request."""
        return self.base_url + request.path

    def build(self, http: httpx2.Client | httpx2.AsyncClient, request: ApiRequest) -> httpx2.Request:
        """Return the httpx2 request with URL, headers and timeout."""
        return http.build_request(
            request.method,
            self.url(request),
            content=request.body or None,
            headers=self.headers,
            timeout=self.timeout,
        )


def tls_verification(verify: ssl.SSLContext | bool = True) -> ssl.SSLContext | bool:  # noqa: FBT001, FBT002
    """Return `verify` of httpx2, with the certificate that a client shows to servers, unless it is a context.

    Raises:
        InvalidRequest: GENSERVE_CLIENT_CERT names a file that cannot be used.
    """
    if isinstance(verify, ssl.SSLContext) or not has_client_certificate():
        return verify
    context = httpx2.create_ssl_context(verify=verify)
    load_client_certificate(context)
    return context


def connection(
    base_url: str | None, *, api_key: str | None, timeout_s: float, max_retries: int
) -> Connection:
    """Return the settings of a client; None means GENSERVE_BASE_URL and GENSERVE_API_KEY.

    Raises:
        InvalidRequest: the URL is not an HTTP URL, or ends with /v1, or the key is not a valid header value;
            `field` is "base_url" or "api_key".
    """
    base_url = base_url or os.environ.get("GENSERVE_BASE_URL") or "http://127.0.0.1:8000"
    if not base_url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"base_url {base_url!r} does not begin with http:// or https://",
            remedy=f"try http://{base_url}",
            field="base_url",
        )
    base_url = base_url.rstrip("/")
    if base_url.endswith("/v1"):
        raise InvalidRequest(
            f"base_url {base_url!r} ends with /v1, which this client adds itself",
            remedy=f"write {base_url.removesuffix('/v1')}",
            field="base_url",
        )
    headers = {"content-type": "application/json", "user-agent": f"genserve/{__version__}"}
    api_key = api_key or os.environ.get("GENSERVE_API_KEY")
    if api_key:
        headers["authorization"] = bearer(api_key)
    return Connection(
        base_url=base_url,
        max_retries=max_retries,
        headers=headers,
        timeout=httpx2.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s)),
    )
