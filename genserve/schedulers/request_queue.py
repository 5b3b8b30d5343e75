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

__all__ = ["ANY_INSTANCE", "NOTHING_TO_DO", "DirectQueue", "Plan", "Queue", "Refusal", "stopping"]


ANY_INSTANCE = -1


class Plan(NamedTuple):
    """What an instance may do now."""

    batch: tuple[Inference, ...] = ()   # empty: nothing
    until_ns: int | None = None         # then plan again, even if nothing has changed; None: no need to


NOTHING_TO_DO = Plan()


class Refusal(NamedTuple):
    """An inference that leaves the queue without having run."""

    inference: Inference
    error: GenserveError | None         # None: it was cancelled

    def tell(self) -> None:
        """End the inference."""
        if self.error is None:
            self.inference.fail_cancelled()
        else:
            self.inference.fail(self.error)


class Queue(Protocol):
    """The order of things of one scheduler. Times are those of `time.monotonic_ns()`.

    The caller ends what is refused, after it has let go of its lock: a requester may call back at once.
    """

    def __len__(self) -> int:
        """Inferences that wait."""

    @property
    def expires_ns(self) -> int | None:
        """When `expire` has something to do; None: never, as things stand."""

    def add(self, inference: Inference, *, now_ns: int) -> int | None:
        """Queue an inference; return the number of the instance that should plan now, ANY_INSTANCE, or None.

        Raises:
            InferenceError: the queue is full, or the request breaks the rules of its sequence.
        """

    def plan(self, instance: int, *, now_ns: int) -> Plan:
        """Return what an instance may execute now; changes nothing."""

    def start(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Take a planned batch out, for an instance; return what it executes."""

    def done(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> list[Refusal]:
        """Note that an instance has executed what `start` gave it."""

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Refusal]:
        """Take out an inference that was cancelled, and what has no sense without it, if it waits."""

    def expire(self, *, now_ns: int) -> list[Refusal]:
        """Take out what has waited for too long."""

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Take out what only this instance could have executed: it is gone. ANY_INSTANCE: everything."""


def stopping(request: InferenceRequest) -> InferenceError:
    """Return the error of a request that comes after `close`."""
    return InferenceError(
        with_request_id(
            "Server is stopping, scheduler for model has stopped accepting new inference requests", request.id
        ),
        status=Status.UNAVAILABLE,
        remedy="the model is being unloaded; try again once it is ready",
    )


class DirectQueue:
    """A queue without batching; the `Queue` protocol."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Inference, None] = OrderedDict()

    def __len__(self) -> int:
        """Inferences that wait."""
        return len(self._waiting)

    @property
    def expires_ns(self) -> int | None:
        """Nothing expires."""
        return None

    def add(self, inference: Inference, *, now_ns: int) -> int:
        """Queue an inference, without a limit."""
        self._waiting[inference] = None
        return ANY_INSTANCE

    def plan(self, instance: int, *, now_ns: int) -> Plan:
        """Return the one that has waited longest."""
        return Plan((next(iter(self._waiting)),)) if self._waiting else NOTHING_TO_DO

    def start(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Take it out."""
        for inference in batch:
            del self._waiting[inference]
        return tuple(batch)

    def done(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> list[Refusal]:
        """Nothing follows an execution."""
        return []

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Refusal]:
        """Take it out, if it waits."""
        if inference not in self._waiting:
            return []
        del self._waiting[inference]
        return [Refusal(inference, None)]

    def expire(self, *, now_ns: int) -> list[Refusal]:
        """Nothing expires."""
        return []

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Any instance executes anything."""
        lost = list(self._waiting) if instance == ANY_INSTANCE else []
        for inference in lost:
            del self._waiting[inference]
        return lost
