"""Remote repository: the models of a deployment, as the routes of a server see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from genserve.config.schema import model_config, new_model_config
from genserve.deploy.ingress.deployment_metrics import DeploymentMetrics
from genserve.deploy.ingress.failover import Failover
from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.ingress.remote_inference import RemoteInference
from genserve.deploy.ingress.remote_text_model import load_remote_text_model
from genserve.deploy.replica.description import ReplicaReport, VersionDescription, digest
from genserve.deploy.replica_messages import ReplicaSet
from genserve.errors import SEE_LOG, GenserveError, InferenceError, RepositoryError
from genserve.histogram import Histogram
from genserve.inference_statistics import ModelStatistics
from genserve.repository.model_versions import ModelRuntime, ModelState, ModelVersion
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.repository.text_stages import TextStages
from genserve.textmodel.text_inference import TextInference
from genserve.textmodel.text_model import TextModel

logger = logging.getLogger(__name__)

_FOLLOW_S = 1.0  # how often replicas are asked what they serve
_REDEPLOY = "change the repository and run `genserve deploy ray` again"


class RemoteRepository(Repository):
    """The models of replicas, which load them; here are their configs, tokenizers and templates.

    A model is served as its first replica describes it, until no living one serves that any more: so a
    rolling update changes it once, with its last replica. Belongs to the event loop that follows.
    """

    def __init__(
        self,
        roots: Iterable[Path],
        replicas: Mapping[str, ReplicaSet],
        *,
        options: RepositoryOptions,
        metrics: DeploymentMetrics,
    ) -> None:
        """Read the folders, which are those of the replicas; nothing is served yet.

        Args:
            roots: folders of the repository.
            replicas: by the name of the model that they were deployed for; they may serve others too.
            options: of the repository.
            metrics: of the deployment.

        Raises:
            RepositoryError: a root is not a folder.
        """
        super().__init__(roots, options=options, metrics=metrics)
        self._wanted = list(replicas)
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
        """READY while a replica of each model lives."""
        deployments = self._deployments.values()
        if self.errors or any(one.digest and not one.num_alive for one in deployments):
            return ModelState.UNAVAILABLE
        return ModelState.READY if all(one.digest for one in deployments) else ModelState.LOADING

    def follow(self) -> None:
        """Begin to serve what the replicas serve, and go on until `stop`."""
        for name in self._deployments:
            self._table.set_state(name, self._latest(name), ModelState.LOADING)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def described(self, *, timeout_s: float) -> None:
        """Wait until each model is served, or cannot be, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._described.wait()

    async def stop(self) -> None:
        """Stop following, and end all requests."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await asyncio.to_thread(self.close)

    async def refresh_reports(self) -> None:
        """Take over the statistics and metrics of all replicas."""
        deployments = list(self._deployments.values())
        reports = await asyncio.gather(*(one.report() for one in deployments))
        for deployment, of_replicas in zip(deployments, reports, strict=True):
            for served in self._table.served:
                if self._owners.get(served.name) == deployment.name:
                    _take_over(served, of_replicas)
        self._deployment_metrics.set_reported([one.metrics for several in reports for one in several])

    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
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
            if all(one.digest or one.failed for one in self._deployments.values()):
                self._described.set()
            await asyncio.sleep(_FOLLOW_S)

    async def _look_at(self, deployment: LiveReplicas) -> None:
        """Serve what a deployment serves, once no replica serves any more what it has served so far.

        What fails is tried again with each look, since files of a shared volume may come later.
        """
        digests = await deployment.look()
        if not digests or deployment.digest in digests:
            return
        current = digests[0]
        answers: list[list[VersionDescription]] = await deployment.ask("describe")
        described = next((answer for answer in answers if digest(answer) == current), None)
        if described is None:
            return      # the next look will see the change
        event_loop = asyncio.get_running_loop()
        try:
            serve = partial(self._serve, deployment, described, event_loop=event_loop)
            await asyncio.to_thread(serve)
        except Exception as error:  # of any file of the repository; the other models are still followed
            if deployment.failed != current:
                unexpected = not isinstance(error, GenserveError)
                logger.error(  # noqa: TRY400
                    "model %s is not served: %s", deployment.name, error, exc_info=unexpected
                )
            self._lifecycle.errors[deployment.name] = _as_ours(error, deployment.name)
            deployment.failed = current
        else:
            self._lifecycle.errors.pop(deployment.name, None)
            deployment.digest = current

    def _serve(
        self,
        deployment: LiveReplicas,
        described: Sequence[VersionDescription],
        *,
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Serve versions in place of those that the deployment has served so far; blocks."""
        self._lifecycle.scan_folders()  # files may have changed since the ingress has started
        fresh: dict[str, list[ModelVersion]] = {}
        for one in described:
            if self._owners.setdefault(one.name, deployment.name) == deployment.name:
                version = self._version(one, deployment, event_loop=event_loop)
                fresh.setdefault(one.name, []).append(version)
        for name in deployment.names - fresh.keys():
            self._lifecycle.serve(name, ())
            del self._owners[name]
        for name, versions in fresh.items():
            self._lifecycle.serve(name, versions)
        deployment.names = frozenset(fresh)

    def _version(
        self, one: VersionDescription, deployment: LiveReplicas, *, event_loop: asyncio.AbstractEventLoop
    ) -> ModelVersion:
        config = model_config(new_model_config().FromString(one.config), name=one.name)
        statistics = ModelStatistics()
        text_model: TextModel | None = None
        if one.text is None:
            runtime: ModelRuntime = RemoteInference(deployment, event_loop=event_loop)
        else:
            text_model = load_remote_text_model(
                one.name,
                one.text,
                self._stages(one.name),
                replicas=deployment,
                event_loop=event_loop,
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
        entry = self._lifecycle.entries.get(name)
        return entry.versions[-1] if entry and entry.versions else 1


def _take_over(served: ModelVersion, reports: Sequence[ReplicaReport]) -> None:
    """Replace the statistics of a version by the sum of those of its replicas, ended ones included.

    Those of a text model stay: its inferences are generations to the replicas, and end here.
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
