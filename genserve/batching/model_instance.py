"""Model instance: a thread that executes the batches of a scheduler; the instances of one model version."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from genserve.backends.backend import Backend, Placement
from genserve.batching.queue_scheduler import QueueScheduler
from genserve.batching.rate_limiter import ResourcePermit
from genserve.config.model_config import InstanceGroup
from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import CURRENT_EXECUTOR, Executor, Inference
from genserve.inference_statistics import ModelStatistics

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 5.0


class ModelInstance:
    """One instance on a dedicated thread, since Python models may be bound to their thread.

    Each inference that it takes ends, or is held by the model. If it dies, the inferences that wait for it
    fail.

    Attributes:
        placement: the instance's name, kind and device.
        executor: the executor, which has the current batch.
        started: a future, done when the backend has started, or with the exception of a failed start.
    """

    def __init__(
        self,
        start: Callable[[], Backend],
        *,
        number: int,
        placement: Placement,
        scheduler: QueueScheduler,
        statistics: ModelStatistics,
    ) -> None:
        """Start the thread, which starts the backend; see `started`."""
        self.placement = placement
        self.executor = executor = Executor(name=placement.name)
        self._blockers = lambda: (executor,)
        self.started: Future[None] = Future()
        self._backend: Backend | None = None
        self._start = start
        self._number = number
        self._scheduler = scheduler
        self._statistics = statistics
        self._thread = threading.Thread(target=self._run, name=f"instance-{placement.name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread is running."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether it is running and its backend does not report that it is not ready."""
        if self._backend is None or not self.alive:
            return False
        is_ready = getattr(self._backend, "is_ready", None)
        return is_ready is None or bool(is_ready())

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it has closed, after its scheduler has; return False on timeout."""
        self._thread.join(timeout_s)
        return not self.alive

    def abort(self) -> bool:
        """Have the backend abort the current batch; return False if it cannot, or executes nothing."""
        abort = getattr(self._backend, "abort", None)
        return abort is not None and bool(self.executor.executing) and bool(abort())

    def _run(self) -> None:
        CURRENT_EXECUTOR.set(self.executor)
        try:
            backend = self._start()
        except BaseException as error:
            self.started.set_exception(error)
            return
        self._backend = backend
        self.started.set_result(None)
        try:
            while (batch := self._scheduler.take(self._number)) is not None:
                self._execute(backend, batch)
                del batch  # do not keep it alive while waiting for the next one
        except BaseException as error:
            logger.exception("instance %s died", self.placement.name)
            self._scheduler.abandon(self._number, _death(error, self.placement.name))
        finally:
            self._close(backend)

    def _execute(self, backend: Backend, batch: Sequence[Inference]) -> None:
        self.executor.executing = batch
        started_ns = time.monotonic_ns()
        for inference in batch:
            inference.started_ns = inference.started_ns or started_ns
            inference.blocked_by = self._blockers
        try:
            backend.execute(batch)
        except BaseException as error:
            if not isinstance(error, GenserveError):
                logger.exception("model %s failed", batch[0].request.model_name)
            failure = InferenceError.of(error)
            for inference in batch:
                inference.fail(failure)
            if not isinstance(error, Exception):
                raise
        finally:
            self.executor.executing = ()
            self._statistics.executed(batch, started_ns=started_ns, ended_ns=time.monotonic_ns())
            self._scheduler.done(self._number, batch)

    def _close(self, backend: Backend) -> None:
        try:
            backend.close()
        except Exception:
            logger.exception("instance %s failed to close", self.placement.name)


def _death(error: BaseException, name: str) -> InferenceError:
    return InferenceError(
        f"instance {name} died: {type(error).__name__}: {error}",
        status=Status.UNAVAILABLE,
        remedy="see the server's log for the reason, and load the model again",
    )


class ModelInstances:
    """The instances of one version of a model, which share a scheduler; a `ModelRuntime`."""

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
            start: starts and warms up one instance; called on its thread.
            placements: where each instance runs.
            scheduler: the scheduler, which is closed with the instances.
            statistics: the statistics that count the executions.
            exit_timeout_s: how long `close` waits for the model's code.
            permits: the permits of the rate limiter, which the scheduler acquires; withdrawn with the
                instances.

        Raises:
            Exception: the first instance that failed to start raised it; all instances are closed.
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
        executors = tuple(instance.executor for instance in self._instances)
        self._blockers = lambda: executors
        try:
            for instance in self._instances:
                instance.started.result()
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether at least one instance is ready."""
        return any(instance.ready for instance in self._instances)

    @property
    def num_waiting(self) -> int:
        """Inferences in the queue of the scheduler."""
        return self._scheduler.num_waiting

    def submit(self, inference: Inference) -> None:
        """Queue an inference."""
        inference.blocked_by = self._blockers
        self._scheduler.submit(inference)

    def close(self) -> None:
        """Fail the waiting inferences, and close each instance on its thread.

        An instance that exceeds the timeout is aborted if its backend can do that, or else abandoned.
        """
        self._scheduler.close()
        until_s = time.monotonic() + self._exit_timeout_s
        for number, instance in enumerate(self._instances):
            if not _ended(instance, until_s=until_s):
                name = instance.placement.name
                logger.error("instance %s is abandoned: the code of the model does not return", name)
            elif self._permits:
                self._permits[number].withdraw()


def _ended(instance: ModelInstance, *, until_s: float) -> bool:
    if instance.join(max(0.0, until_s - time.monotonic())):
        return True
    return instance.abort() and instance.join(_ABORT_TIMEOUT_S)


def group_placements(group: InstanceGroup) -> Iterator[Placement]:
    """Yield the placement of each instance of a group, with Triton's names.

    The config is as config/normalise.py leaves it.
    """
    devices = group.gpus if group.kind == "KIND_GPU" else (None,)
    for number in range(len(devices) * max(1, group.count)):
        device = devices[number % len(devices)]
        suffix = "" if device is None else f"_gpu{device}"
        yield Placement(
            name=f"{group.name}_{number}{suffix}",
            kind=group.kind.removeprefix("KIND_"),
            device_id=device or 0,
        )
