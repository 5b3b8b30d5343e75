"""Instances: the instances of one version of a model behind its scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from genserve.backends.backend import Backend, Placement
from genserve.config.model_config import InstanceGroup
from genserve.inference import Inference
from genserve.inference_statistics import ModelStatistics
from genserve.schedulers.model_instance import ModelInstance
from genserve.schedulers.queue_scheduler import QueueScheduler
from genserve.schedulers.rate_limiter import ResourcePermit

__all__ = ["Instances", "group_placements"]

logger = logging.getLogger(__name__)

_ABORTED_WITHIN_S = 5.0


class Instances:
    """Instances, each on a thread of its own, that pull from one scheduler; a `ModelRuntime`."""

    def __init__(
        self,
        start: Callable[[Placement], Backend],
        *,
        placements: Sequence[Placement],
        scheduler: QueueScheduler,
        statistics: ModelStatistics,
        exit_timeout_s: float,
        permits: Sequence[ResourcePermit] = (),
    ) -> None:
        """Start every instance, and wait until all have started.

        Args:
            start: makes one instance ready, warmed up; called on the thread of the instance.
            placements: one for each instance.
            scheduler: closed with this.
            statistics: to count executions in.
            exit_timeout_s: how long a close waits for the model's code.
            permits: of the rate limiter, which the scheduler asks for; withdrawn with the instances.

        Raises:
            Exception: what the first instance that did not start raised; the others are closed again.
        """
        self._scheduler = scheduler
        self._exit_timeout_s = exit_timeout_s
        self._permits = permits
        self._instances = [
            ModelInstance(
                lambda placement=placement: start(placement),  # type: ignore[misc]
                number=number,
                placement=placement,
                scheduler=scheduler,
                statistics=statistics,
            )
            for number, placement in enumerate(placements)
        ]
        for instance, permit in zip(self._instances, permits, strict=False):  # no limiter, no permits
            permit.executor = instance.executor
            instance.executor.blocked_by = permit.blocked_by
        self._executors = tuple(instance.executor for instance in self._instances)
        try:
            for instance in self._instances:
                instance.started.result()
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether an instance runs that can execute."""
        return any(instance.ready for instance in self._instances)

    @property
    def num_waiting(self) -> int:
        """Inferences that wait for an instance."""
        return self._scheduler.num_waiting

    def submit(self, inference: Inference) -> None:
        """Queue an inference."""
        inference.executors = self._executors
        self._scheduler.submit(inference)

    def close(self) -> None:
        """Fail what waits, and close each instance on its thread.

        One that takes too long is made to end if its backend can do that, or else left behind.
        """
        self._scheduler.close()
        until_s = time.monotonic() + self._exit_timeout_s
        for number, instance in enumerate(self._instances):
            if not _ended(instance, until_s=until_s):
                name = instance.placement.name
                logger.error("instance %s is left behind: the model's code does not come to an end", name)
            elif self._permits:
                self._permits[number].withdraw()


def _ended(instance: ModelInstance, *, until_s: float) -> bool:
    if instance.join(max(0.0, until_s - time.monotonic())):
        return True
    return instance.abort() and instance.join(_ABORTED_WITHIN_S)


def group_placements(group: InstanceGroup) -> Iterator[Placement]:
    """Yield where each instance of a group of a normalised config runs, by Triton's names for them."""
    devices = group.gpus if group.kind == "KIND_GPU" else (None,)
    for number in range(len(devices) * max(1, group.count)):
        device = devices[number % len(devices)]
        suffix = "" if device is None else f"_gpu{device}"
        yield Placement(
            name=f"{group.name}_{number}{suffix}",
            kind=group.kind.removeprefix("KIND_"),
            device_id=device or 0,
        )
