"""Handle deployment: `waiting_deployment.py` with Ray Serve's own paths in place of genserve's connections.

Serve imports one of two applications. `behind_haproxy` has Serve's HAProxy in front of the ingress, and
Serve's handles from the ingress to the replicas. `listening` has an ingress with a port of its own, and
handles. Neither needs a router, since each has one replica.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from waiting_deployment import waiting_stages

from genserve.deploy.ingress.ingress_server import IngressServer
from genserve.deploy.ray.application import ServedModel
from genserve.deploy.ray.application_args import ApplicationArgs
from genserve.deploy.ray.deploy_config import INGRESS
from genserve.deploy.ray.serve_replicas import ServeReplicas
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Call
from genserve.engine.generation_request import GenerationRequest

_MAX_CALLS = 1000   # concurrent calls


class HandleReplicas:
    """A `ReplicaSet` that generates through a handle of Serve."""

    def __init__(self, handle: Any) -> None:
        self.broadcast = ServeReplicas(handle).broadcast
        self._generate = handle.options(stream=True, _by_reference=False).generate    # by gRPC

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Any]:
        async for deltas in self._generate.remote(call):
            yield deltas

    def load(self, _identity: str) -> ReplicaLoad:
        return ReplicaLoad()


class HandledModel(ServedModel):
    """A replica that is called by a handle."""

    def __init__(self, *args: Any) -> None:
        with waiting_stages():
            super().__init__(*args)

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Any]:
        async for deltas in self._replica.generate(call):
            yield deltas


class Ingress:
    """An ingress that listens itself, and calls its replicas through handles."""

    async def __init__(self, args: ApplicationArgs, models: Mapping[str, Any]) -> None:     # type: ignore[misc]
        settings = replace(args.server_settings(), reuse_http_port=True)
        self._server = IngressServer(settings, {name: HandleReplicas(one) for name, one in models.items()})
        await self._server.start()


async def _passed_on(scope: Any, receive: Any, send: Any) -> None:
    """Pass a request to the application of this process's ingress; an ASGI application."""
    if scope["type"] == "http":
        await IngressBehindProxy.app(scope, receive, send)
        return
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


@serve.ingress(lambda: _passed_on)     # which Serve calls in the replica
class IngressBehindProxy:
    """An ingress that gets its requests from Serve."""

    app: Any = None

    async def __init__(self, args: ApplicationArgs, models: Mapping[str, Any]) -> None:     # type: ignore[misc]
        replicas = {name: HandleReplicas(handle) for name, handle in models.items()}
        server = IngressServer(args.server_settings(), replicas)
        server._repository.follow()
        await server._repository.described(timeout_s=60)
        IngressBehindProxy.app = server.config.app


def behind_haproxy(args: Mapping[str, Any]) -> Any:
    """Return the application whose ingress is behind Serve's proxy."""
    return _application(args, IngressBehindProxy)


def listening(args: Mapping[str, Any]) -> Any:
    """Return the application whose ingress listens itself."""
    return _application(args, Ingress)


def _application(args: Mapping[str, Any], ingress: Any) -> Any:
    checked = ApplicationArgs.model_validate(dict(args))
    models = {
        name: serve.deployment(HandledModel, name=name, max_ongoing_requests=_MAX_CALLS).bind(checked, name)
        for name in checked.models
    }
    return serve.deployment(ingress, name=INGRESS, max_ongoing_requests=_MAX_CALLS).bind(checked, models)
