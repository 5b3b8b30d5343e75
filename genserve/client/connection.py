"""Connection: where the server is, and how it is spoken to; what both clients are told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import httpx2

from genserve.api_key import bearer
from genserve.client.calls import Request
from genserve.errors import InvalidRequest
from genserve.version import __version__

__all__ = ["LIMITS", "Connection", "connection"]

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

    def url(self, request: Request) -> str:
        """Return where the request goes."""
        return self.base_url + request.path

    def build(self, http: httpx2.Client | httpx2.AsyncClient, request: Request) -> httpx2.Request:
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
