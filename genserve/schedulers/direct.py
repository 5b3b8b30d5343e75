"""Direct: Triton's default scheduler, first come, first served, one request per execution."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from genserve.errors import InferenceError, Status
from genserve.inference import Inference

__all__ = ["DirectScheduler"]


class DirectScheduler:
    """A queue without batching; the `Scheduler` protocol."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Inference] = deque()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Inferences accepted and not taken."""
        return len(self._waiting)

    def submit(self, inference: Inference) -> None:
        """Queue an inference."""
        with self._changed:
            if self._closed:
                raise InferenceError("the model is being unloaded", status=Status.UNAVAILABLE)
            self._waiting.append(inference)
            self._changed.notify()

    def take(self, instance: int) -> Sequence[Inference] | None:
        """Wait for the next inference."""
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return None
                    self._changed.wait()
                inference = self._waiting.popleft()
            if not inference.cancelled:
                return (inference,)
            inference.fail_cancelled()

    def done(self, instance: int, batch: Sequence[Inference]) -> None:
        """Nothing follows an execution."""

    def close(self) -> None:
        """Accept no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
