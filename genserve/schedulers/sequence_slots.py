"""Sequence slots: the batch rows of one instance, and which of its sequences run together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Protocol

from genserve.config.model_config import DirectStrategy, DynamicBatching, OldestStrategy
from genserve.inference import Inference
from genserve.schedulers.dynamic_batcher import Alike, DynamicQueue, Entry
from genserve.schedulers.request_queue import NOTHING_TO_DO, Plan
from genserve.schedulers.sequence_tensors import SequenceControls, null_inference
from genserve.tensor import Tensor

__all__ = ["DirectSlots", "OldestSlots", "Sequence", "Slots"]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Requests with one correlation id, from a START to the END.

    Attributes:
        id: its correlation id.
        instance: where it has a slot; None: it waits for one.
        slot: which.
        waiting: its requests that have not been executed.
        running: the one that is.
        is_over: whether no more requests will come.
        states: its implicit states.
        due_ns: when it is idle for too long, or has waited too long for a slot; None: neither can be.
        watched_ns: the time at which somebody looks whether it is due.
    """

    id: int | str
    instance: int | None = None
    slot: int = 0
    waiting: deque[Entry] = field(default_factory=deque)
    running: Inference | None = None
    is_over: bool = False
    states: dict[str, Tensor] | None = None
    due_ns: int | None = None
    watched_ns: int | None = None


class Slots(Protocol):
    """Which sequences run together; each has at most one request that does."""

    def ready(self, sequence: Sequence, *, now_ns: int) -> None:
        """Note that the first request of a sequence may run; a second call does nothing."""

    def withdraw(self, sequence: Sequence) -> None:
        """Note that the first request of a sequence will not run."""

    def plan(self, *, now_ns: int) -> Plan:
        """Return what may run now."""

    def start(self, batch: Ordered[Inference], sequences: Ordered[Sequence]) -> tuple[Inference, ...]:
        """Take a planned batch out; return all that the instance executes."""


class DirectSlots:
    """A sequence stays at one row of the batch; empty rows below the last are filled with null requests."""

    def __init__(
        self, strategy: DirectStrategy, *, num_slots: int, controls: SequenceControls, alike: Alike
    ) -> None:
        self._strategy = strategy
        self._alike = alike
        self._controls = controls
        self._ready: list[Sequence | None] = [None] * num_slots

    def ready(self, sequence: Sequence, *, now_ns: int) -> None:
        """Note it at its slot."""
        if self._ready[sequence.slot] is None:
            head = sequence.waiting[0]
            head.alike = self._alike(head.inference)
            self._ready[sequence.slot] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Clear its slot."""
        self._ready[sequence.slot] = None

    def plan(self, *, now_ns: int) -> Plan:
        """Return what can share a batch with the oldest, if enough are ready or it has waited long enough."""
        heads = [sequence.waiting[0] for sequence in self._ready if sequence is not None]
        if not heads:
            return NOTHING_TO_DO
        oldest = min(heads, key=lambda head: head.added_ns)
        due_ns = oldest.added_ns + self._strategy.max_queue_delay_us * 1000
        are_enough = len(heads) / len(self._ready) >= self._strategy.minimum_slot_utilization
        if not are_enough and now_ns < due_ns:
            return Plan(until_ns=due_ns)
        return Plan(tuple(head.inference for head in heads if head.alike == oldest.alike))

    def start(self, batch: Ordered[Inference], sequences: Ordered[Sequence]) -> tuple[Inference, ...]:
        """Put each at its row."""
        rows: list[Inference | None] = [None] * (max(sequence.slot for sequence in sequences) + 1)
        for inference, sequence in zip(batch, sequences, strict=True):
            rows[sequence.slot] = inference
            self._ready[sequence.slot] = None
        return tuple(row or null_inference(batch[0], controls=self._controls) for row in rows)


class OldestSlots:
    """The requests that are ready are batched dynamically, the oldest first."""

    def __init__(self, strategy: OldestStrategy, *, max_batch_size: int, alike: Alike) -> None:
        batching = DynamicBatching(
            preferred_batch_sizes=strategy.preferred_batch_sizes,
            max_queue_delay_us=strategy.max_queue_delay_us,
            preserve_ordering=strategy.preserve_ordering,
        )
        self._queue = DynamicQueue(batching, max_batch_size=max_batch_size, alike=alike)
        self._queued: set[Inference] = set()

    def ready(self, sequence: Sequence, *, now_ns: int) -> None:
        """Queue it."""
        inference = sequence.waiting[0].inference
        if inference not in self._queued:
            self._queued.add(inference)
            self._queue.add(inference, now_ns=now_ns)

    def withdraw(self, sequence: Sequence) -> None:
        """Take it out of the queue."""
        inference = sequence.waiting[0].inference
        self._queued.discard(inference)
        self._queue.cancel(inference, now_ns=0)

    def plan(self, *, now_ns: int) -> Plan:
        """Return the batch at the head of the queue, if it is complete."""
        return self._queue.plan(0, now_ns=now_ns)

    def start(self, batch: Ordered[Inference], sequences: Ordered[Sequence]) -> tuple[Inference, ...]:
        """Take it out of the queue."""
        self._queued.difference_update(batch)
        return self._queue.start(0, batch, now_ns=0)
