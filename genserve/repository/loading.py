"""Loading: one version of a model, from its files to a runner that answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from genserve.backends.backend import Backend, ModelSource, Placement
from genserve.backends.registry import find_backend
from genserve.backends.warmup import run_warmups, warmup_batches
from genserve.config.model_config import EnsembleStep, InstanceGroup, ModelConfig
from genserve.errors import RepositoryError
from genserve.generation_metrics import Metrics
from genserve.inference import InferenceServer
from genserve.inference_statistics import ModelStatistics
from genserve.repository.ensemble import Ensemble
from genserve.repository.instances import Instances, group_placements
from genserve.repository.model_versions import ModelRuntime, ModelTable, ModelVersion
from genserve.repository.options import RepositoryOptions
from genserve.repository.preparation import Prepared
from genserve.repository.response_cache import ResponseCache
from genserve.repository.upload import Upload
from genserve.schedulers.queue_scheduler import make_scheduler
from genserve.schedulers.rate_limiter import RateLimiter, ResourcePermit

__all__ = ["Loader", "output_labels"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Loads versions; holds what they share."""

    server: InferenceServer
    versions: ModelTable
    options: RepositoryOptions
    metrics: Metrics
    cache: ResponseCache | None
    rate_limiter: RateLimiter | None

    def load(self, model: Prepared, version: int, *, upload: Upload | None = None) -> ModelVersion:
        """Load one version, warmed up and ready to answer.

        Args:
            model: prepared.
            version: the number of a folder.
            upload: the folder that the model is from, if a load call brought it.

        Raises:
            Exception: any that the model's own code raised; GenserveError for what is known.
        """
        started_s = time.monotonic()
        config, statistics = model.config, ModelStatistics()
        if config.ensemble_steps:
            runner: ModelRuntime = Ensemble(
                config, server=self.server, config_of=self._config_of, statistics=statistics
            )
        else:
            runner = self._instances(model, version, statistics)
        return ModelVersion(
            runner,
            config=config,
            version=version,
            statistics=statistics,
            cache=self.cache if config.response_cache else None,
            labels=output_labels(config, model.path),
            upload=upload,
            load_s=time.monotonic() - started_s,
            histogram_latencies=self.options.histogram_latencies,
        )

    def _config_of(self, step: EnsembleStep) -> ModelConfig:
        return self.versions.find(step.model_name, step.model_version).config

    def _instances(self, model: Prepared, version: int, statistics: ModelStatistics) -> Instances:
        config = model.config
        backend = find_backend(config.backend, backend_directory=self.options.backend_directory)
        source = ModelSource(
            config=config,
            version=version,
            path=model.path,
            folder=model.path / str(version),
            server=self.server,
            metrics=self.metrics,
        )
        shared = backend.load(source)
        warmups = warmup_batches(config, model.path)

        def start(placement: Placement) -> Backend:
            instance = backend(source, shared, placement)
            try:
                run_warmups(instance.execute, warmups)
            except BaseException:
                instance.close()
                raise
            return instance

        groups_and_places = [
            (group, place) for group in config.instance_groups for place in group_placements(group)
        ]
        permits = self._permits(groups_and_places)
        try:
            scheduler = make_scheduler(
                config, num_instances=len(groups_and_places), path=model.path, permits=permits
            )
        except RepositoryError:
            _withdraw(permits)
            raise
        return Instances(
            start,
            placements=[placement for _, placement in groups_and_places],
            scheduler=scheduler,
            statistics=statistics,
            exit_timeout_s=self.options.exit_timeout_s,
            permits=permits,
        )

    def _permits(self, places: Iterable[tuple[InstanceGroup, Placement]]) -> list[ResourcePermit]:
        """Register the instances with the rate limiter, if there is one: all of them, or none."""
        permits: list[ResourcePermit] = []
        if self.rate_limiter is None:
            return permits
        try:
            for group, place in places:
                permits.append(self.rate_limiter.register(group.rate_limiter, device_id=place.device_id))
        except RepositoryError:
            _withdraw(permits)
            raise
        return permits


def _withdraw(permits: Iterable[ResourcePermit]) -> None:
    for permit in permits:
        permit.withdraw()


def output_labels(config: ModelConfig, path: Path) -> dict[str, Sequence[str]]:
    """Read the label files of a model's outputs: one label per line, its number is the class."""
    labels: dict[str, Sequence[str]] = {}
    for spec in config.outputs:
        if spec.label_filename:
            try:
                labels[spec.name] = (path / spec.label_filename).read_text(encoding="utf-8").splitlines()
            except OSError as error:
                file = path / spec.label_filename
                logger.warning("%s cannot be read, and classes have no labels: %s", file, error.strerror)
    return labels
