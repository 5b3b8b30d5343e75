"""Connection: the URL, key and timeouts of a client, and when it retries."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import httpx2

from genserve.api_key import bearer
from genserve.client.api_calls import ApiRequest
from genserve.errors import GenserveError, InvalidRequest, ModelNotReady, Overloaded, Unreachable
from genserve.version import __version__

__all__ = ["LIMITS", "Connection", "connection", "retry_wait_s"]


_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0      # a server that asks for more is not waited for
_NEVER_ARRIVED = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout)


def retry_wait_s(failure: GenserveError, *, attempt: int, max_retries: int, chance: float) -> float | None:
    """Return the seconds to wait before the next try, or None to give up.

    Tried again are refusals for the moment (statuses 429 and 503) and connections that failed, not
    answers that took too long: the server may still be at work on those. The wait doubles from try to
    try, and is never shorter than the server asks for.

    Args:
        failure: what became of this try; raised by `failures`.
        attempt: tries before this one.
        max_retries: tries allowed after the first.
        chance: a random number in [0, 1), which spreads the clients of a server that has come back.
    """
    if attempt >= max_retries or not _may_pass(failure):
        return None
    backoff_s = _FIRST_WAIT_S * (1 << attempt) * (0.5 + chance / 2)
    asked_s = failure.retry_after_s if isinstance(failure, (Overloaded, ModelNotReady)) else 0
    if asked_s > _LONGEST_WAIT_S:
        return None
    return max(backoff_s, asked_s + chance / 2)


def _may_pass(failure: GenserveError) -> bool:
    if isinstance(failure, Unreachable):
        return isinstance(failure.__cause__, _NEVER_ARRIVED)
    return isinstance(failure, (Overloaded, ModelNotReady))


_CONNECT_S = 5.0
# The transport's own limit of 100 connections would queue streams in the client, unseen.
LIMITS = httpx2.Limits(max_connections=1000, max_keepalive_connections=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The settings of a client."""

    base_url: str                                       # without a slash at its end
    max_retries: int
    headers: dict[str, str] = field(repr=False)         # holds the key
    timeout: httpx2.Timeout

    def url(self, request: ApiRequest) -> str:
        """Return where the request goes."""
        return self.base_url + request.path

    def build(self, http: httpx2.Client | httpx2.AsyncClient, request: ApiRequest) -> httpx2.Request:
        """Return the transport's form of the request."""
        return http.build_request(
            request.method,
            self.url(request),
            content=request.body or None,
            headers=self.headers,
            timeout=self.timeout,
        )


def connection(
    base_url: str | None, *, api_key: str | None, timeout_s: float, max_retries: int
) -> Connection:
    """Fill in what is None from GENSERVE_BASE_URL and GENSERVE_API_KEY, or their defaults.

    Raises:
        InvalidRequest: the URL is not an HTTP one, or has a /v1, or no header can hold the key; `field` is
            "base_url" or "api_key".
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
            f"base_url {base_url!r} ends with /v1, which OpenAI's clients want and this one adds by itself",
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
