"""Model instance: a thread that owns one instance of a model and executes the batches of its scheduler."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from genserve.backends.backend import Backend, Placement
from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import CURRENT_EXECUTOR, Executor, Inference
from genserve.inference_statistics import ModelStatistics
from genserve.schedulers.queue_scheduler import Scheduler

__all__ = ["Instance"]


logger = logging.getLogger(__name__)


class Instance:
    """One instance on a thread of its own: Python models may be bound to their thread.

    Whatever it takes ends, or is in the hands of the model. If it dies, what waits for it fails.

    Attributes:
        placement: its name, kind and device.
        executor: what it does now.
        started: done once the backend has started; the exception is the backend's.
    """

    def __init__(
        self,
        start: Callable[[], Backend],
        *,
        number: int,
        placement: Placement,
        scheduler: Scheduler,
        statistics: ModelStatistics,
    ) -> None:
        """Begin to start the instance; `started` tells when it is."""
        self.placement = placement
        self.executor = Executor(name=placement.name)
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
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether it runs, and its backend does not say that it is not ready."""
        if self._backend is None or not self.alive:
            return False
        is_ready = getattr(self._backend, "is_ready", None)
        return is_ready is None or bool(is_ready())

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it has closed, after its scheduler was; False: it has not in this time."""
        self._thread.join(timeout_s)
        return not self.alive

    def abort(self) -> bool:
        """Have the backend break off what it executes; False: it cannot, or executes nothing."""
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
                del batch  # not kept alive while it waits for the next one
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
            inference.executors = (self.executor,)
        try:
            backend.execute(batch)
        except BaseException as error:
            if not isinstance(error, GenserveError):
                logger.exception("model %s failed", batch[0].model_name)
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
        remedy="the server's log has the reason; load the model again",
    )
