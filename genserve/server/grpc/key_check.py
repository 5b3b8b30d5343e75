"""Key check: the API key that every call needs, but those of the health service."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from genserve.api_key import bearer

__all__ = ["KeyCheck"]

_OPEN = "/grpc.health.v1.Health/"


class KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Asks for the metadata `authorization: Bearer KEY`, as the HTTP port does; compared in constant time."""

    def __init__(self, api_key: str) -> None:
        self._expected = bearer(api_key).encode()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Let the call through, or have it end as UNAUTHENTICATED."""
        handler = await continuation(call)
        given = dict(call.invocation_metadata or ()).get("authorization", "")
        if handler is None or call.method.startswith(_OPEN) or self._knows(given):
            return handler
        # The kind that reads requests only when asked to: one may be of gigabytes.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _knows(self, given: str | bytes) -> bool:
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected)


async def _refuse(requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong")
