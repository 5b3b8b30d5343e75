"""Sequence slots: the batch rows of one instance, and which of its sequences run together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from genserve.config.model_config import DirectStrategy, DynamicBatching, OldestStrategy
from genserve.inference import Inference
from genserve.schedulers.dynamic_batcher import BatchKey, DynamicQueue, QueuedRequest
from genserve.schedulers.request_queue import NO_BATCH, BatchPlan
from genserve.schedulers.sequence_tensors import SequenceControls, null_inference
from genserve.tensor import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class RequestSequence:
    """The requests with one correlation id, from START to END.

    Attributes:
        id: its correlation id.
        instance: the instance of its slot; None: it waits for a slot.
        slot: its slot at the instance.
        waiting: its requests that have not started.
        running: its request that is being executed.
        is_finished: whether it accepts no more requests.
        states: its implicit states.
        due_ns: when it will have been idle, or have waited for a slot, for too long; None: never.
        heap_ns: its time in the heap of deadlines; None: it is not there.
    """

    id: int | str
    instance: int | None = None
    slot: int = 0
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    running: Inference | None = None
    is_finished: bool = False
    states: dict[str, Tensor] | None = None
    due_ns: int | None = None
    heap_ns: int | None = None


class Slots(Protocol):
    """The slots of one instance: which sequences run together, each with at most one request."""

    def ready(self, sequence: RequestSequence, *, now_ns: int) -> None:
        """Note that the first request of a sequence may run. Idempotent."""

    def withdraw(self, sequence: RequestSequence) -> None:
        """Note that the first request of a sequence will not run."""

    def plan(self, *, now_ns: int) -> BatchPlan:
        """Return the batch that may run now."""

    def start(
        self, batch: Sequence[Inference], sequences: Sequence[RequestSequence]
    ) -> tuple[Inference, ...]:
        """Remove a planned batch; return the batch that the instance executes."""


class DirectSlots:
    """The slot of a sequence is its row in each batch; null requests fill empty rows before the last one."""

    def __init__(
        self, strategy: DirectStrategy, *, num_slots: int, controls: SequenceControls, batch_key: BatchKey
    ) -> None:
        self._strategy = strategy
        self._batch_key = batch_key
        self._controls = controls
        self._ready: list[RequestSequence | None] = [None] * num_slots

    def ready(self, sequence: RequestSequence, *, now_ns: int) -> None:
        """Note that the first request of a sequence may run. Idempotent."""
        if self._ready[sequence.slot] is None:
            head = sequence.waiting[0]
            head.batch_key = self._batch_key(head.inference)
            self._ready[sequence.slot] = sequence

    def withdraw(self, sequence: RequestSequence) -> None:
        """Note that the first request of a sequence will not run."""
        self._ready[sequence.slot] = None

    def plan(self, *, now_ns: int) -> BatchPlan:
        """Return the requests that share the key of the oldest, if enough are ready or its delay is over."""
        heads = [sequence.waiting[0] for sequence in self._ready if sequence is not None]
        if not heads:
            return NO_BATCH
        oldest = min(heads, key=lambda head: head.added_ns)
        due_ns = oldest.added_ns + self._strategy.max_queue_delay_us * 1000
        are_enough = len(heads) / len(self._ready) >= self._strategy.minimum_slot_utilization
        if not are_enough and now_ns < due_ns:
            return BatchPlan(until_ns=due_ns)
        return BatchPlan(tuple(head.inference for head in heads if head.batch_key == oldest.batch_key))

    def start(
        self, batch: Sequence[Inference], sequences: Sequence[RequestSequence]
    ) -> tuple[Inference, ...]:
        """Place each request at its row."""
        rows: list[Inference | None] = [None] * (max(sequence.slot for sequence in sequences) + 1)
        for inference, sequence in zip(batch, sequences, strict=True):
            rows[sequence.slot] = inference
            self._ready[sequence.slot] = None
        return tuple(row or null_inference(batch[0], controls=self._controls) for row in rows)


class OldestSlots:
    """Batches the requests that are ready dynamically, the oldest first."""

    def __init__(self, strategy: OldestStrategy, *, max_batch_size: int, batch_key: BatchKey) -> None:
        batching = DynamicBatching(
            preferred_batch_sizes=strategy.preferred_batch_sizes,
            max_queue_delay_us=strategy.max_queue_delay_us,
            preserve_ordering=strategy.preserve_ordering,
        )
        self._queue = DynamicQueue(batching, max_batch_size=max_batch_size, batch_key=batch_key)
        self._queued: set[Inference] = set()

    def ready(self, sequence: RequestSequence, *, now_ns: int) -> None:
        """Queue the first request of a sequence. Idempotent."""
        inference = sequence.waiting[0].inference
        if inference not in self._queued:
            self._queued.add(inference)
            self._queue.add(inference, now_ns=now_ns)

    def withdraw(self, sequence: RequestSequence) -> None:
        """Remove the first request of a sequence from the queue."""
        inference = sequence.waiting[0].inference
        self._queued.discard(inference)
        self._queue.cancel(inference, now_ns=0)

    def plan(self, *, now_ns: int) -> BatchPlan:
        """Return the batch at the head of the queue, if it is complete."""
        return self._queue.plan(0, now_ns=now_ns)

    def start(
        self, batch: Sequence[Inference], sequences: Sequence[RequestSequence]
    ) -> tuple[Inference, ...]:
        """Remove a planned batch."""
        self._queued.difference_update(batch)
        return self._queue.start(0, batch, now_ns=0)
