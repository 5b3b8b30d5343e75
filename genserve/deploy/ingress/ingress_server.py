"""Ingress: the HTTP server of a deployment, over models whose replicas run in other processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from genserve.deploy.ingress.deployment_metrics import DeploymentMetrics
from genserve.deploy.ingress.remote_inference import RemoteInference
from genserve.deploy.ingress.remote_repository import RemoteRepository
from genserve.deploy.replica_messages import ReplicaSet
from genserve.errors import Closed, GenserveError, InferenceError
from genserve.server.access.access_control import require_safe_addresses
from genserve.server.http.http_server import HttpServer, open_http_port
from genserve.server.kserve.shared_memory import SharedMemory
from genserve.server.server_parts import ServerParts
from genserve.server.services import Services, repository_options
from genserve.settings import ServerSettings

_START_S = 60.0     # how long an ingress waits for its models before it answers that they are loading
# Where KubeRay asks whether the HTTP port of a pod may get requests; Serve's proxies answer with this text.
_SERVE_PROBE = "/-/healthz"


class IngressServer(HttpServer):
    """A server whose models run in replicas, on an event loop that other code uses too."""

    def __init__(self, settings: ServerSettings, replicas: Mapping[str, ReplicaSet]) -> None:
        """Read the folders of the repository.

        Args:
            settings: the settings of a single server. Settings of gRPC, of the metrics port and of loading
                models have no effect.
            replicas: the replicas of each deployed model, by its name.

        Raises:
            RepositoryError: a folder of the repository cannot be read.
            GenserveError: a setting is not valid, or the port would be open to other machines without a key.
        """
        require_safe_addresses(settings)
        metrics = DeploymentMetrics()
        self._repository = RemoteRepository(
            settings.model_repository, replicas, options=repository_options(settings), metrics=metrics
        )
        self._parts = parts = ServerParts(
            settings,
            self._repository,
            metrics,
            shared_memory=SharedMemory(allowed=False, refusal=_on_another_machine),
            counts=lambda served: not isinstance(served.runtime, RemoteInference),  # else replicas count
        )
        self._services = parts.services
        app = _IngressApp(parts.app, parts.services, self._repository)
        super().__init__(app, settings=settings, tls=parts.tls, drain_s=None)   # who stops it knows how long
        self._closing = ExitStack()
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, *, others_serve: bool = False) -> None:
        """Open the port when the models of the replicas are served, or cannot be, or after a minute.

        Args:
            others_serve: whether there are other ingresses, one of which may end as soon as this one has
                started. So this one opens the port only when it serves all models, as long as that takes.

        Raises:
            GenserveError: the port is taken, or the address is not one of this machine. With `others_serve`,
                a model cannot be served for a minute, for example because its files are not on this machine.
        """
        self._closing.enter_context(self._services.log_settings.written())
        self._parts.start()
        self._repository.follow()
        try:
            if others_serve:
                await self._repository.all_served(patience_s=_START_S)
            else:
                await self._repository.described(timeout_s=_START_S)
            self._listener = open_http_port(self._services.settings)
        except GenserveError:
            await self._close()
            raise
        self._serving = asyncio.create_task(self.serve(sockets=[self._listener]))

    @property
    def port(self) -> int:
        """The port on which the ingress listens."""
        assert self._listener is not None
        port: int = self._listener.getsockname()[1]
        return port

    def check(self) -> None:
        """Raise Closed if the ingress does not serve any more."""
        if self._serving is None or self._serving.done():
            raise Closed("the HTTP server has ended", remedy="the log of the ingress has the reason")

    async def stop(self) -> None:
        """Leave the port to other processes, and return when all requests have ended."""
        if self._serving is not None:
            self.should_exit = True
            await self._serving
        else:
            await self._close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the requests end, then stop following the replicas."""
        assert self._listener is not None
        await self.hand_over(self._listener)
        self._services.draining = True
        await super().shutdown(sockets=sockets)
        await self._close()

    async def _close(self) -> None:
        await self._repository.stop()
        await asyncio.to_thread(self._parts.kserve.trace_settings.close)
        if self._services.request_spans is not None:
            await asyncio.to_thread(self._services.request_spans.close)
        self._parts.stop()
        self._closing.close()


def _on_another_machine() -> InferenceError:
    return InferenceError(
        "shared memory cannot be registered with a deployment, which may run on another machine",
        remedy="send and receive tensors in requests and responses",
    )


class _IngressApp:
    """Answers KubeRay's probe, and asks the replicas for their figures before a request reads them."""

    def __init__(self, app: ASGIApp, services: Services, repository: RemoteRepository) -> None:
        self._app = app
        self._services = services
        self._repository = repository
        self._asking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; the ASGI protocol."""
        path = scope["path"]
        app = self._app
        if path == _SERVE_PROBE:
            text, status = ("success", 200) if await self._services.is_ready() else ("not ready", 503)
            app = PlainTextResponse(text, status_code=status)
        elif _reads_figures(path, scope["query_string"]):
            await self._refreshed()
        await app(scope, receive, send)

    async def _refreshed(self) -> None:
        """Wait for figures that are not older than this call; concurrent ones share them."""
        if self._asking is not None:  # for older ones
            await asyncio.wait({self._asking})
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._repository.refresh_reports())
        await asyncio.shield(self._asking)


def _reads_figures(path: str, query: bytes) -> bool:
    is_metrics = path == "/metrics" and b"replicas=" in query
    return is_metrics or (path.startswith("/v2/") and path.endswith("/stats"))
