"""Application: the Ray Serve application of a model repository, which Serve's config files import.

`import_path: genserve.deploy.ray.application:build`, with `args` as in `application_args.py`. The options of
deployments, such as replicas and resources, are in the config file: `deploy_config.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from genserve.deploy.calls.call_protocol import CallPort
from genserve.deploy.calls.call_server import CallServer
from genserve.deploy.calls.routed_replicas import RoutedReplicas
from genserve.deploy.ingress.ingress_server import IngressServer
from genserve.deploy.ray.application_args import ApplicationArgs
from genserve.deploy.ray.autoscaling import USAGE, WAITING_TOKENS
from genserve.deploy.ray.deploy_config import INGRESS
from genserve.deploy.ray.serve_library import import_ray
from genserve.deploy.ray.serve_replicas import ServeReplicas
from genserve.deploy.replica.description import ReplicaReport, ReplicaStatus, VersionDescription
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.errors import ModelNotReady
from genserve.server.http.offload import start_daemon
from genserve.server.observe.engine_watch import EngineWatch, engines_of
from genserve.server.observe.log_settings import LogSettings
from genserve.server.observe.triton_metrics import read_metrics_config
from genserve.server.services import repository_options

logger = logging.getLogger(__name__)

_CLOSE_S = 30.0     # for models to end, after their last call
# Each replica tries this often to start: most errors are of a model or a port, and come again.
_MAX_LOADS = 3


def build(args: Mapping[str, Any]) -> Any:
    """Return the Serve application: a deployment for each model, and the ingress.

    Raises:
        pydantic.ValidationError: the arguments do not fit `ApplicationArgs`.
        MissingDependency: Ray is not installed.
    """
    serve = import_ray("ray.serve")
    checked = ApplicationArgs.model_validate(dict(args))
    models = {
        name: serve.deployment(ServedModel, name=name, max_constructor_retry_count=_MAX_LOADS).bind(
            checked, name
        )
        for name in checked.models
    }
    return serve.deployment(Ingress, name=INGRESS, max_constructor_retry_count=_MAX_LOADS).bind(
        checked, models
    )


class Ingress:
    """One replica of the ingress, as Serve calls it: an HTTP server of its own, without Serve's proxy."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: ApplicationArgs, models: Mapping[str, Any]
    ) -> None:
        """Open the port, when the models answer.

        Other replicas of the ingress on this machine share the port, and so does the replica that will
        replace this one, which it does only when it serves all models itself.

        Args:
            args: the arguments of the application.
            models: the handle of the deployment of each model, by name.

        Raises:
            GenserveError: see `IngressServer`.
        """
        settings = replace(args.server_settings(), reuse_http_port=True)
        weights = args.routing.model_dump(exclude_none=True)
        self._replicas = {
            name: RoutedReplicas(ServeReplicas(handle).broadcast, weights) for name, handle in models.items()
        }
        self._server = IngressServer(settings, self._replicas)
        await self._server.start(others_serve=await _others_serve())

    def check_health(self) -> None:
        """Raise Closed if the server has ended: Serve then replaces the replica."""
        self._server.check()

    def __del__(self) -> Awaitable[None] | None:
        """Let the requests end; Serve awaits this when another replica has taken the place of this one."""
        server = self.__dict__.pop("_server", None)     # a second time Python calls it
        return None if server is None else self._stop(server)

    async def _stop(self, server: IngressServer) -> None:
        await server.stop()
        for replicas in self._replicas.values():
            replicas.close()


async def _others_serve() -> bool:
    """Whether other replicas of the ingress run; Serve stops one of them when this one has started."""
    serve = import_ray("ray.serve")
    context = serve.get_replica_context()
    status = await asyncio.to_thread(serve.status)
    application = status.applications.get(context.app_name)
    ingress = application.deployments.get(context.deployment) if application else None
    return bool(ingress and ingress.replica_states.get("RUNNING"))


class ServedModel:
    """One replica of a model, as Serve calls it."""

    def __init__(self, args: ApplicationArgs, name: str) -> None:
        """Load the model; blocks. Raises as `ModelReplica` and `LogSettings` do."""
        settings = args.server_settings()
        options = replace(repository_options(settings), renumber_gpus=True)
        self._listening: asyncio.Future[CallPort] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closing = ExitStack()
        self._closing.enter_context(LogSettings(settings).written())
        self._replica = ModelReplica(
            args.model_repository,
            name,
            needed=args.models[name],
            options=options,
            latency_counters=read_metrics_config(settings.metrics_config)["counter_latencies"],
        )
        self._closing.callback(self._replica.close)
        self._calls = CallServer(self._replica)

    async def status(self) -> ReplicaStatus:
        """See `ModelReplica.status`; begins to take calls."""
        if self._calls.stopping:
            return await self._replica.status()
        if self._listening is None:     # here, since the constructor may run without an event loop
            watch = EngineWatch(partial(engines_of, self._replica.repository))
            self._watching = asyncio.create_task(watch.run())
            address = import_ray("ray.util").get_node_ip_address()
            self._listening = asyncio.ensure_future(self._calls.start(address))
        return replace(await self._replica.status(), port=await self._listening)

    async def describe(self) -> list[VersionDescription]:
        """See `ModelReplica.describe`."""
        return await self._replica.describe()

    async def report(self) -> ReplicaReport:
        """See `ModelReplica.report`."""
        return await self._replica.report()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics that `TokenLoadPolicy` reads."""
        load = self._replica.load()
        places = sum(model.max_num_seqs for model in self._replica.repository.text_models)
        usage = max(load.kv_usage, load.running / places if places else 0.0)
        return {USAGE: min(1.0, usage), WAITING_TOKENS: load.waiting_tokens}

    def check_health(self) -> None:
        """Raise ModelNotReady if the model has died or hangs: Serve then replaces the replica."""
        if not self._replica.ready:
            raise ModelNotReady("the model has failed, or hangs", remedy="the replica's log has the reason")

    def __del__(self) -> Awaitable[None] | None:
        """Let the calls end, and unload the model; Serve awaits this when other replicas take the calls."""
        closing = self.__dict__.pop("_closing", None)   # a second time Python calls it
        if closing is not None and self._listening is not None:
            return self._stop(closing)
        if closing is not None:     # nobody has ever called; perhaps it could not be loaded
            closing.close()
        return None

    async def _stop(self, closing: ExitStack) -> None:
        await self._calls.stop()
        self._calls.close()
        if self._watching is not None:
            self._watching.cancel()
        closed = start_daemon(closing.close, name="close")
        if not (await asyncio.wait({closed}, timeout=_CLOSE_S))[0]:
            # An engine that hangs does not end, and its memory is needed by the replica that takes its place.
            logger.error("a model does not end: the process ends without it")
            os._exit(1)
        closed.result()
