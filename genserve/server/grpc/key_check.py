"""Key check: the API key that every call needs, but those of the health service; and what some calls need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from genserve.api_key import bearer, is_bearer
from genserve.log import LoggedRequest, quoted
from genserve.server.grpc.administration import log_call
from genserve.server.restrictions import Restrictions

__all__ = ["KeyCheck", "RestrictionCheck"]

_OPEN = "/grpc.health.v1.Health/"
_PARTS = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}


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
        return _refusing(call.method, grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong")

    def _knows(self, given: str | bytes) -> bool:
        return is_bearer(given.encode() if isinstance(given, str) else given, self._expected)


class RestrictionCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Asks for the metadata of `--grpc-restricted-protocol`, as Triton does."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Let the call through, or have it end as UNAVAILABLE."""
        handler = await continuation(call)
        restriction = self._restrictions.get(_part(call.method))
        if handler is None or restriction is None:
            return handler
        if restriction.is_met_by(dict(call.invocation_metadata or ()).get(restriction.header)):
            return handler
        text = f"This protocol is restricted, expecting header '{restriction.header}'"
        return _refusing(call.method, grpc.StatusCode.UNAVAILABLE, text)


def _part(method: str) -> str:
    """Return the part of KServe that a method belongs to; empty: none."""
    name = method.rpartition("/")[2]
    if method.startswith(_OPEN):
        return "health"
    return "shared-memory" if "SharedMemory" in name else _PARTS.get(name, "")


def _refusing(method: str, code: grpc.StatusCode, text: str) -> Any:
    """Return a handler that logs every call of a method, and ends it with an error."""

    async def refuse(requests: Any, context: Any) -> None:
        log_call(LoggedRequest(id=""), code, context=context, method=quoted(method.rpartition("/")[2]))
        await context.abort(code, text)

    # The kind that reads requests only when asked to: one may be of gigabytes.
    return grpc.stream_stream_rpc_method_handler(refuse)
