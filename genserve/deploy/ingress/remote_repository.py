"""Remote repository: the models of a deployment, as the routes of a server see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from genserve.config.schema import model_config, new_model_config
from genserve.deploy.ingress.deployment_metrics import DeploymentMetrics
from genserve.deploy.ingress.failover import Failover
from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.ingress.remote_inference import RemoteInference
from genserve.deploy.ingress.remote_text_model import load_remote_text_model
from genserve.deploy.replica.description import ReplicaReport, VersionDescription, identity_of
from genserve.deploy.replica_messages import ReplicaSet
from genserve.errors import SEE_LOG, GenserveError, InferenceError, RepositoryError
from genserve.histogram import Histogram
from genserve.inference_statistics import ModelStatistics
from genserve.repository.model_versions import ModelRuntime, ModelState, ModelVersion
from genserve.repository.options import RepositoryOptions
from genserve.repository.served_models import ServedModels
from genserve.repository.text_stages import TextStages
from genserve.textmodel.text_inference import TextInference
from genserve.textmodel.text_model import TextModel

logger = logging.getLogger(__name__)

_FOLLOW_S = 1.0  # how often replicas are asked what they serve
# A version that another one has replaced waits for its calls, which end with their replicas at the latest:
# Serve stops replicas after the `graceful_shutdown_timeout_s` of their deployment. This time is longer.
_RETIRE_S = 7 * 24 * 3600.0
_REDEPLOY = "change the repository and run `genserve deploy ray` again"


class RemoteRepository(ServedModels):
    """The models of replicas, which load them; here are their configs, tokenizers and templates.

    A model is served as most of its replicas describe it. So a rolling update changes it once, when more new
    replicas than old ones take calls; the calls that were made before end at the old ones. Belongs to the
    event loop that follows.
    """

    def __init__(
        self,
        roots: Iterable[Path],
        replicas: Mapping[str, ReplicaSet],
        *,
        options: RepositoryOptions,
        metrics: DeploymentMetrics,
    ) -> None:
        """Read the same folders as the replicas; nothing is served yet.

        Args:
            roots: folders of the repository.
            replicas: the replicas of each deployment, by the name of its model; they may serve other models
                too.
            options: the settings of the repository.
            metrics: the metrics of the deployment.

        Raises:
            RepositoryError: a root is not a folder.
        """
        super().__init__(roots, options=replace(options, exit_timeout_s=_RETIRE_S), metrics=metrics)
        self.wanted = list(replicas)
        self._deployments = {
            name: LiveReplicas(name, Failover(one, name=name, metrics=metrics))
            for name, one in replicas.items()
        }
        self._owners = {name: name for name in replicas}  # deployments, by the models that they serve
        self._deployment_metrics = metrics
        self._following: asyncio.Task[None] | None = None
        self._described = asyncio.Event()

    @property
    def state(self) -> ModelState:
        """The state of each model: READY while a replica that has the identity of what is served lives."""
        deployments = self._deployments.values()
        if any(not one.num_alive if one.identity else one.failed for one in deployments):
            return ModelState.UNAVAILABLE
        return ModelState.READY if all(one.identity for one in deployments) else ModelState.LOADING

    def follow(self) -> None:
        """Begin to serve what the replicas serve, and go on until `stop`."""
        for name in self._deployments:
            self.table.set_state(name, self._latest(name), ModelState.LOADING)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def described(self, *, timeout_s: float) -> None:
        """Wait until each model is served, or cannot be, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._described.wait()

    async def all_served(self, *, patience_s: float) -> None:
        """Wait until each model is served, as long as its replicas load.

        Raises:
            GenserveError: a model has not been served for `patience_s` after all could have been.
        """
        await self._described.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not all(one.identity for one in self._deployments.values()):  # noqa: ASYNC110  # 1 s each
                    await asyncio.sleep(_FOLLOW_S)
        for name, deployment in self._deployments.items():
            if not deployment.identity:
                raise self.errors[name]

    async def stop(self) -> None:
        """Stop following, and end all requests."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await asyncio.to_thread(self.lifecycle.close)

    async def refresh_reports(self) -> None:
        """Take over the statistics and metrics of all replicas."""
        deployments = list(self._deployments.values())
        reports = await asyncio.gather(*(one.report() for one in deployments))
        for deployment, (_, of_replicas) in zip(deployments, reports, strict=True):
            for served in self.table.served:
                if self._owners.get(served.name) == deployment.name:
                    _replace_statistics(served, of_replicas)
        self._deployment_metrics.set_reported(
            {one.replica: one.metrics for living, _ in reports for one in living},
            [one.metrics for _, several in reports for one in several],
        )

    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes | Path] | None = None,
        allow_code: bool = True,
    ) -> None:
        """Reject a load request. Raises InferenceError."""
        raise _not_here("loaded")

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Reject a request to unload. Raises InferenceError."""
        raise _not_here("unloaded")

    async def _follow(self) -> None:
        await asyncio.gather(*map(self._follow_one, self._deployments.values()))

    async def _follow_one(self, deployment: LiveReplicas) -> None:
        while True:
            await self._look_at(deployment)
            if all(one.identity or one.failed for one in self._deployments.values()):
                self._described.set()
            await asyncio.sleep(_FOLLOW_S)

    async def _look_at(self, deployment: LiveReplicas) -> None:
        """Serve what most replicas of a deployment serve.

        A version that fails is tried again with each look, since files of a shared volume may come later.
        """
        current = await deployment.look()
        if current in ("", deployment.identity):
            if current:
                self._forget_failure(deployment)
            return
        answers: list[list[VersionDescription]] = await deployment.ask("describe")
        described = next((answer for answer in answers if identity_of(answer) == current), None)
        if described is None:
            return      # the next look will see the change
        event_loop = asyncio.get_running_loop()
        try:
            serve = partial(self._serve, deployment, described, identity=current, event_loop=event_loop)
            await asyncio.to_thread(serve)
        except Exception as error:  # any file may be broken; the other models are still followed
            if deployment.failed != current:
                unexpected = not isinstance(error, GenserveError)
                logger.error(  # noqa: TRY400
                    "model %s is not served: %s", deployment.name, error, exc_info=unexpected
                )
            self.lifecycle.errors[deployment.name] = _as_ours(error, deployment.name)
            deployment.failed = current
        else:
            deployment.identity = current
            self._forget_failure(deployment)

    def _forget_failure(self, deployment: LiveReplicas) -> None:
        """Record that the ingress serves what most replicas of a deployment serve."""
        self.lifecycle.errors.pop(deployment.name, None)
        deployment.failed = ""

    def _serve(
        self,
        deployment: LiveReplicas,
        described: Sequence[VersionDescription],
        *,
        identity: str,
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Replace the versions that the deployment has served so far; blocks."""
        self.lifecycle.scan_folders()  # files may have changed since the ingress has started
        fresh: dict[str, list[ModelVersion]] = {}
        for one in described:
            if self._owners.setdefault(one.name, deployment.name) == deployment.name:
                version = self._version(one, deployment, identity=identity, event_loop=event_loop)
                fresh.setdefault(one.name, []).append(version)
        for name in deployment.names - fresh.keys():
            self.lifecycle.serve(name, ())
            del self._owners[name]
        for name, versions in fresh.items():
            self.lifecycle.serve(name, versions)
        deployment.names = frozenset(fresh)

    def _version(
        self,
        one: VersionDescription,
        deployment: LiveReplicas,
        *,
        identity: str,
        event_loop: asyncio.AbstractEventLoop,
    ) -> ModelVersion:
        config = model_config(new_model_config().FromString(one.config), name=one.name)
        statistics = ModelStatistics()
        text_model: TextModel | None = None
        if one.text is None:
            runtime: ModelRuntime = RemoteInference(deployment, identity=identity, event_loop=event_loop)
        else:
            text_model = load_remote_text_model(
                one.name,
                one.text,
                self._stages(one.name),
                replicas=deployment,
                identity=identity,
                event_loop=event_loop,
                metrics=self._deployment_metrics,
            )
            runtime = TextInference(text_model, config, statistics=statistics)
        return ModelVersion(
            runtime,
            config=config,
            version=one.version,
            statistics=statistics,
            labels=one.labels,
            load_s=one.load_s,
            histogram_latencies=self.options.histogram_latencies,
            text_model=text_model,
        )

    def _stages(self, name: str) -> TextStages:
        stages = self.text_stages(name)
        if stages is None:
            raise RepositoryError(
                f"the ingress finds no text model {name!r} in its repository",
                remedy="give the ingress the same repository as the replicas",
            )
        return stages

    def _latest(self, name: str) -> int:
        entry = self.lifecycle.entries.get(name)
        return entry.versions[-1] if entry and entry.versions else 1


def _replace_statistics(served: ModelVersion, reports: Sequence[ReplicaReport]) -> None:
    """Replace the statistics of a version by the sum of its replicas' statistics, ended replicas included.

    The statistics of a text model stay: its inferences are generations to the replicas, and end here.
    """
    runtime = served.runtime
    if not isinstance(runtime, RemoteInference):
        return
    whole = ModelStatistics()
    if served.statistics.first_response is not None:
        whole.first_response = Histogram(served.config.first_response_buckets_ms)
    key = served.name, served.version
    of_version = [report.versions[key] for report in reports if key in report.versions]
    for one in of_version:
        whole.add(one.statistics)
    served.statistics = whole
    runtime.num_waiting = sum(one.num_waiting for one in of_version)


def _as_ours(error: Exception, name: str) -> GenserveError:
    if isinstance(error, GenserveError):
        return error
    return RepositoryError(f"the ingress cannot load what it needs of model {name!r}", remedy=SEE_LOG)


def _not_here(done: str) -> InferenceError:
    return InferenceError(f"the models of a deployment cannot be {done} by a request", remedy=_REDEPLOY)
