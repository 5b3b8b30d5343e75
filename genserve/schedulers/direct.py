"""Direct: Triton's default scheduler, first come, first served, one request per execution."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from genserve.inference import Inference
from genserve.schedulers.queue import ANY_INSTANCE, NOTHING_TO_DO, Plan, Refusal

__all__ = ["DirectQueue"]


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
