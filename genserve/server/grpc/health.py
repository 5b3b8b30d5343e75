"""Health: the standard health service, `grpc.health.v1.Health`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from genserve.server.services import Services

__all__ = ["Health"]

_WATCH_S = 0.5  # between two looks at the models


class Health:
    """Tells whether the server is ready; for any service, as Triton does.

    The requests are never read, as they say nothing that matters here: these calls need no key, and a message
    of gigabytes would be held in memory first.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._watched: Any = None       # what watchers saw last
        self._next_look = 0.0           # time of the event loop

    @property
    def handler(self) -> Any:
        """What a gRPC server calls."""
        write = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                # The kind that reads requests only when asked to; clients with one request cannot tell.
                "Check": grpc.stream_stream_rpc_method_handler(self._check, response_serializer=write),
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=write),
            },
        )

    async def _check(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """SERVING, or NOT_SERVING while a model loads or has failed, or the server drains."""
        yield health_pb2.HealthCheckResponse(status=await self._status())

    async def _watch(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Say it, and say it again whenever it has changed, until the server drains."""
        last = None
        while True:
            await self._look()
            if self._watched != last:
                last = self._watched
                yield health_pb2.HealthCheckResponse(status=last)
            if self._services.draining:
                return
            await asyncio.sleep(_WATCH_S)

    async def _look(self) -> None:
        """Bring what is watched up to date: one look for all watchers."""
        now = asyncio.get_running_loop().time()
        if self._watched is None or now >= self._next_look or self._services.draining:
            self._next_look = now + _WATCH_S
            self._watched = await self._status()

    async def _status(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses.SERVING if await self._services.is_ready() else statuses.NOT_SERVING
