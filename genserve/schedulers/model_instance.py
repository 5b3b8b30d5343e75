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
from genserve.schedulers.queue_scheduler import QueueScheduler

__all__ = ["ModelInstance"]


logger = logging.getLogger(__name__)


class ModelInstance:
    """One instance on a dedicated thread, since Python models may be bound to their thread.

    Each inference that it takes ends, or is held by the model. If it dies, the inferences that wait for it
    fail.

    Attributes:
        placement: its name, kind and device.
        executor: its current batch.
        started: done when the backend has started; has the exception of a backend that fails to.
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
        remedy="see the server's log for the reason, and load the model again",
    )
