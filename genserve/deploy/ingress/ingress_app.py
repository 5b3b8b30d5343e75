"""Ingress: the application of a single server over models whose replicas run in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from genserve.deploy.ingress.deployment_metrics import DeploymentMetrics
from genserve.deploy.ingress.remote_repository import RemoteRepository
from genserve.deploy.replica_messages import ReplicaSet
from genserve.errors import InferenceError
from genserve.kserve.shared_memory import SharedMemory
from genserve.server.app import create_app
from genserve.server.event_loop_lag import EventLoopLag
from genserve.server.services import Services, repository_options
from genserve.server.triton_metrics import CpuCollector, InferenceCollector, read_metrics_config
from genserve.server.watched_files import WatchedFiles
from genserve.settings import ServerSettings

_START_S = 60.0     # how long an ingress waits for its models before it answers that they are loading


def make_ingress_app(settings: ServerSettings, replicas: Mapping[str, ReplicaSet]) -> ASGIApp:
    """Return the ASGI application of a deployment; its lifespan follows the replicas.

    Args:
        settings: of a single server. Those of ports and of the loading of models have no effect.
        replicas: of each model that is deployed, by its name.

    Raises:
        RepositoryError: a folder of the repository cannot be read.
        GenserveError: a setting is not valid.
    """
    metrics = DeploymentMetrics()
    repository = RemoteRepository(
        settings.model_repository, replicas, options=repository_options(settings), metrics=metrics
    )
    services = Services(settings=settings, repository=repository, metrics=metrics)
    services.shared_memory = _NoSharedMemory(allowed=False)
    reads_config = read_metrics_config(settings.metrics_config)
    metrics.registry.register(
        InferenceCollector(repository, latency_counters=reads_config["counter_latencies"])
    )
    if settings.allow_cpu_metrics:
        metrics.registry.register(CpuCollector(interval_s=settings.metrics_interval_ms / 1000))
    lag = EventLoopLag()
    metrics.registry.register(lag)
    watched_files = WatchedFiles()
    watched_files.add(services.keys.files, services.keys.reload)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with services.log_settings.written():
            lag.start()
            services.keys.report()
            watched_files.start()
            repository.follow()
            await repository.described(timeout_s=_START_S)
            yield
            services.draining = True
            await repository.stop()
            await asyncio.to_thread(services.trace_settings.close)
            if services.request_spans is not None:
                await asyncio.to_thread(services.request_spans.close)
            watched_files.close()
            lag.stop()

    return _Ingress(create_app(services, lifespan=lifespan), repository)


class _NoSharedMemory(SharedMemory):
    """Shared memory of a deployment, in which a client and an ingress may run on different machines."""

    def require_enabled(self) -> None:
        """Raise InferenceError."""
        raise InferenceError(
            "shared memory cannot be registered with a deployment, which may run on another machine",
            remedy="send and receive tensors in requests and responses",
        )


class _Ingress:
    """Asks the replicas for their figures before a request reads them."""

    def __init__(self, app: FastAPI, repository: RemoteRepository) -> None:
        self._app = app
        self._repository = repository
        self._asking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; the ASGI protocol."""
        if root := scope.get("root_path"):  # a prefix of the application, which our routes do not know
            scope = {**scope, "path": scope["path"].removeprefix(root) or "/"}
        if scope["type"] == "http" and _reads_figures(scope["path"]):
            await self._refreshed()
        await self._app(scope, receive, send)

    async def _refreshed(self) -> None:
        """Wait for figures that are not older than this call; concurrent ones share them."""
        if self._asking is not None:  # for older ones
            await asyncio.wait({self._asking})
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._repository.refresh_reports())
        await asyncio.shield(self._asking)


def _reads_figures(path: str) -> bool:
    return path == "/metrics" or (path.startswith("/v2/") and path.endswith("/stats"))
