"""Request queue: the requests that wait for the instances of a model, without threads or clocks.

`Queue` is the interface of all queues; `DirectQueue` is the default: first come, first served, one request
per execution.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import Inference, InferenceRequest, with_request_id

ANY_INSTANCE = -1


class BatchPlan(NamedTuple):
    """The batch that an instance may execute now."""

    batch: tuple[Inference, ...] = ()   # empty: none yet
    until_ns: int | None = None         # when to plan again even if nothing has changed; None: never


NO_BATCH = BatchPlan()


class Rejection(NamedTuple):
    """An inference that leaves the queue without being executed."""

    inference: Inference
    error: GenserveError | None         # None: it was cancelled

    def send(self) -> None:
        """End the inference with the error."""
        if self.error is None:
            self.inference.fail_cancelled()
        else:
            self.inference.fail(self.error)


class Queue(Protocol):
    """Decides which requests of one scheduler run when. Times are `time.monotonic_ns()`.

    The caller sends the rejections after it has released its lock, since a requester may call back
    immediately.
    """

    def __len__(self) -> int:
        """Number of waiting inferences."""

    @property
    def expires_ns(self) -> int | None:
        """Time at which `expire` has to be called next; None: not while the queue stays as it is."""

    def add(self, inference: Inference, *, now_ns: int) -> int | None:
        """Append an inference; return the instance that should plan now, ANY_INSTANCE, or None.

        Raises:
            InferenceError: the queue is full, or the request violates the rules of its sequence.
        """

    def plan(self, instance: int, *, now_ns: int) -> BatchPlan:
        """Return the batch that an instance may execute now; changes nothing."""

    def start(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Remove a planned batch from the queue; return the batch that the instance executes."""

    def done(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> list[Rejection]:
        """Record that an instance has executed the batch that `start` returned."""

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Rejection]:
        """Remove a cancelled inference, and the inferences that depend on it, if it is still waiting."""

    def expire(self, *, now_ns: int) -> list[Rejection]:
        """Remove the inferences that have waited too long."""

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Remove the inferences that only this instance, which has died, could execute. ANY_INSTANCE: all."""


class DirectQueue:
    """A `Queue` without batching."""

    expires_ns: int | None = None   # inferences do not expire

    def __init__(self) -> None:
        self._waiting: OrderedDict[Inference, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of waiting inferences."""
        return len(self._waiting)

    def add(self, inference: Inference, *, now_ns: int) -> int:
        """Append an inference; there is no limit."""
        self._waiting[inference] = None
        return ANY_INSTANCE

    def plan(self, instance: int, *, now_ns: int) -> BatchPlan:
        """Return the oldest inference."""
        return BatchPlan((next(iter(self._waiting)),)) if self._waiting else NO_BATCH

    def start(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Remove the planned inference."""
        for inference in batch:
            del self._waiting[inference]
        return tuple(batch)

    def done(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> list[Rejection]:
        """Do nothing."""
        return []

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Rejection]:
        """Remove an inference if it is still waiting."""
        if inference not in self._waiting:
            return []
        del self._waiting[inference]
        return [Rejection(inference, None)]

    def expire(self, *, now_ns: int) -> list[Rejection]:
        """Do nothing."""
        return []

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Remove everything if the last instance has died: any instance executes any inference."""
        lost = list(self._waiting) if instance == ANY_INSTANCE else []
        for inference in lost:
            del self._waiting[inference]
        return lost


def stopping_error(request: InferenceRequest) -> InferenceError:
    """Return the error of a request that arrives after `close`."""
    return InferenceError(
        with_request_id(
            "Server is stopping, scheduler for model has stopped accepting new inference requests", request.id
        ),
        status=Status.UNAVAILABLE,
        remedy="the model is being unloaded; try again once it is ready",
    )
