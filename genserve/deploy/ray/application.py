"""Application: the Ray Serve application of a model repository, which Serve's config files import.

`import_path: genserve.deploy.ray.application:build`, with `args` as in `application_args.py`. The options of
deployments, such as replicas and resources, are in the config file: `deploy_config.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import asdict, replace
from typing import Any

from genserve.deploy.ingress.ingress_app import make_ingress_app
from genserve.deploy.ray.application_args import ApplicationArgs
from genserve.deploy.ray.autoscaling import USAGE, WAITING_TOKENS
from genserve.deploy.ray.deploy_config import INGRESS
from genserve.deploy.ray.serve_library import import_ray
from genserve.deploy.ray.serve_replicas import ServeReplicas, packed
from genserve.deploy.replica.description import ReplicaReport, ReplicaStatus, VersionDescription
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import GenerationCall
from genserve.errors import ModelNotReady
from genserve.inference import InferenceRequest
from genserve.kserve.log_settings import LogSettings
from genserve.server.access_control import require_safe_addresses
from genserve.server.services import repository_options

# Each replica tries this often to load its model: most errors are of the model, and come again.
_MAX_LOADS = 3


def build(args: Mapping[str, Any]) -> Any:
    """Return the Serve application: a deployment for each model, and the ingress.

    Raises:
        pydantic.ValidationError: the arguments are not those of `ApplicationArgs`.
        MissingDependency: Ray is not installed.
    """
    serve = import_ray("ray.serve")
    checked = ApplicationArgs.model_validate(dict(args))
    models = [
        serve.deployment(
            ServedModel, name=name, max_constructor_retry_count=_MAX_LOADS
        ).bind(checked, name)
        for name in checked.models
    ]

    def make_app() -> Any:
        settings = checked.server_settings()
        # The proxies' address is not known here; they listen on all, unless the config file says otherwise.
        require_safe_addresses(replace(settings, host="0.0.0.0"))
        replicas = {name: ServeReplicas(serve.get_deployment_handle(name)) for name in checked.models}
        return make_ingress_app(settings, replicas)

    ingress = serve.deployment(serve.ingress(make_app)(), name=INGRESS)
    return ingress.bind(*models)


class ServedModel:
    """One replica of a model, as Serve calls it."""

    def __init__(self, args: ApplicationArgs, name: str) -> None:
        """Load the model; blocks. Raises as `ModelReplica` and `LogSettings` do."""
        settings = args.server_settings()
        options = replace(repository_options(settings), renumber_gpus=True)
        self._closing = ExitStack()
        self._closing.enter_context(LogSettings(settings).written())
        self._replica = ModelReplica(
            args.model_repository, name, needed=args.models[name], options=options
        )
        self._closing.callback(self._replica.close)

    async def generate(self, call: GenerationCall) -> AsyncIterator[Any]:
        """Yield the deltas of a call, packed; see `ReplicaSet.generate`."""
        async with aclosing(packed(self._replica.generate(call))) as items:  # type: ignore[type-var]
            async for item in items:
                yield item

    async def infer(self, request: InferenceRequest) -> AsyncIterator[Any]:
        """Yield the responses to a request, packed; see `ReplicaSet.infer`."""
        async with aclosing(packed(self._replica.infer(request))) as items:  # type: ignore[type-var]
            async for item in items:
                yield item

    async def status(self) -> ReplicaStatus:
        """See `ModelReplica.status`."""
        return await self._replica.status()

    async def describe(self) -> list[VersionDescription]:
        """See `ModelReplica.describe`."""
        return await self._replica.describe()

    async def report(self) -> ReplicaReport:
        """See `ModelReplica.report`."""
        return await self._replica.report()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the load, for the router."""
        return asdict(self._replica.load())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics that `TokenLoadPolicy` reads."""
        load = self._replica.load()
        places = sum(model.max_num_seqs for model in self._replica.repository.text_models)
        usage = max(load.kv_usage, load.running / places if places else 0.0)
        return {USAGE: min(1.0, usage), WAITING_TOKENS: load.waiting_tokens}

    def check_health(self) -> None:
        """Raise ModelNotReady if the model has died: Serve then replaces the replica."""
        if not self._replica.ready:
            raise ModelNotReady("the model has failed", remedy="the replica's log has the reason")

    def __del__(self) -> None:
        """Unload the model; Serve calls this when the last call has ended, or the time for that is over."""
        if closing := self.__dict__.get("_closing"):
            closing.close()
