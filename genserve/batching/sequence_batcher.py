"""Sequence batcher: the requests of a sequence run in order, requests of different sequences in one batch."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from genserve.batching.dynamic_batcher import QueuedRequest, batch_key
from genserve.batching.request_queue import ANY_INSTANCE, BatchPlan, Rejection
from genserve.batching.sequence_slots import (
    DirectSlots,
    OldestSlots,
    RequestSequence,
    SequenceControls,
    SequenceStates,
    Slots,
)
from genserve.config.model_config import ModelConfig, OldestStrategy, SequenceBatching
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest, RequestFlags

logger = logging.getLogger(__name__)


class SequenceQueue:
    """The `Queue` of a model with sequence batching.

    A sequence keeps a slot of an instance until its END has run, or until none of its requests has been
    waiting for `max_sequence_idle_us`. If no slot is free, the sequence waits for one. An iterative request
    is its own sequence, and is queued again until the model releases it.
    """

    def __init__(self, config: ModelConfig, *, num_instances: int, path: Path) -> None:
        """Make a queue.

        Args:
            config: the model's config, with `sequence_batching`.
            num_instances: the number of instances, each of which has its own slots.
            path: the model's folder, which has the files of initial states.

        Raises:
            RepositoryError: the file of an initial state cannot be read, or is too short.
        """
        assert config.sequence_batching is not None
        self._config: SequenceBatching = config.sequence_batching
        self._batch_key = batch_key(config)
        self._controls = SequenceControls(self._config, max_batch_size=config.max_batch_size)
        self._states = SequenceStates(self._config.states, max_batch_size=config.max_batch_size, path=path)
        self._max_idle_ns = self._config.max_sequence_idle_us * 1000
        num_slots = _num_slots(config)
        self._slots = [self._make_slots(config, num_slots=num_slots) for _ in range(num_instances)]
        self._free = [(slot, instance) for slot in range(num_slots) for instance in range(num_instances)]
        self._backlog: dict[RequestSequence, None] = {}  # sequences without a slot, in order
        self._open: dict[int | str, RequestSequence] = {}  # sequences that accept requests, by id
        self._sequence_of: dict[Inference, RequestSequence] = {}   # by waiting request
        self._running: dict[Inference, RequestSequence] = {}
        self._deadlines = _Deadlines()
        self._next_id = itertools.count(1)
        self._dead: set[int] = set()  # instances that have died

    def __len__(self) -> int:
        """Number of waiting inferences."""
        return len(self._sequence_of)

    @property
    def expires_ns(self) -> int | None:
        """When the next sequence has been idle, or has waited for a slot, for too long."""
        return self._deadlines.next_ns

    def add(self, inference: Inference, *, now_ns: int) -> int | None:
        """Append an inference to its sequence.

        Raises:
            InferenceError: the request has no correlation id or several rows, or it neither starts a sequence
                nor belongs to one.
        """
        is_single = self._config.iterative and not inference.request.correlation_id
        if is_single:
            inference.request = self._numbered(inference.request)
        self._check(inference)
        sequence = self._begin(inference.request) if is_single else self._joined(inference.request)
        self._append(sequence, inference, now_ns=now_ns)
        return sequence.instance

    def plan(self, instance: int, *, now_ns: int) -> BatchPlan:
        """Return the requests that may run together on an instance."""
        return self._slots[instance].plan(now_ns=now_ns)

    def start(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Remove a planned batch, and add its controls and states to its inputs."""
        sequences = [self._sequence_of.pop(inference) for inference in batch]
        for inference, sequence in zip(batch, sequences, strict=True):
            sequence.waiting.popleft()
            sequence.running = inference
            self._running[inference] = sequence
            inference.inputs.update(self._controls.of(inference.request), **(inference.states or {}))
            if not sequence.waiting and not sequence.is_finished:
                self._deadlines.set(sequence, now_ns + self._max_idle_ns)
        return self._slots[instance].start(batch, sequences)

    def done(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> list[Rejection]:
        """Continue the sequences, and queue iterative requests again that the model has rescheduled."""
        rejected: list[Rejection] = []
        for inference in batch:
            sequence = self._running.pop(inference, None)
            if sequence is None:
                continue  # a null request in an empty slot
            sequence.running = None
            if self._config.iterative:
                rejected += self._iterate(sequence, inference, now_ns=now_ns)
            self._advance(sequence, now_ns=now_ns)
        return rejected

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Rejection]:
        """Remove a request and all later ones of its sequence, or the whole sequence if it has no slot."""
        sequence = self._sequence_of.get(inference)
        if sequence is None:
            return []
        first = 0 if sequence in self._backlog else _index(sequence, inference)
        return self._end(sequence, first=first, now_ns=now_ns)

    def expire(self, *, now_ns: int) -> list[Rejection]:
        """End idle sequences, and reject sequences that have waited too long for a slot."""
        rejected: list[Rejection] = []
        while (due_ns := self.expires_ns) is not None and due_ns <= now_ns:
            sequence = self._deadlines.pop()
            late = self._end(sequence, first=0, now_ns=now_ns)  # empty if it was idle
            rejected += (Rejection(inference, _late_sequence()) for inference, _ in late)
        return rejected

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Remove the sequences with a slot of this instance, which has died."""
        self._dead.update(range(len(self._slots)) if instance == ANY_INSTANCE else (instance,))
        self._free = [(slot, owner) for slot, owner in self._free if owner not in self._dead]
        heapq.heapify(self._free)
        known = (*self._open.values(), *self._sequence_of.values(), *self._running.values())
        sequences = dict.fromkeys(known)
        lost: list[Rejection] = []
        for sequence in sequences:
            if instance in (ANY_INSTANCE, sequence.instance):
                lost += self._end(sequence, first=0, now_ns=now_ns)
        return [inference for inference, _ in lost]

    def _make_slots(self, config: ModelConfig, *, num_slots: int) -> Slots:
        strategy = self._config.strategy
        if isinstance(strategy, OldestStrategy):
            return OldestSlots(strategy, max_batch_size=config.max_batch_size, batch_key=self._batch_key)
        return DirectSlots(strategy, num_slots=num_slots, controls=self._controls, batch_key=self._batch_key)

    def _check(self, inference: Inference) -> None:
        request = inference.request
        if inference.batch_size > 1:
            raise InferenceError(
                f"inference request to model '{request.model_name}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if not request.correlation_id:
            raise InferenceError(
                f"inference request to model '{request.model_name}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        self._controls.check(request)

    def _numbered(self, request: InferenceRequest) -> InferenceRequest:
        """Return a request as its own sequence, with an id that no client uses."""
        number = next(number for number in self._next_id if number not in self._open)
        return dataclasses.replace(request, correlation_id=number, flags=RequestFlags.SEQUENCE_START)

    def _joined(self, request: InferenceRequest) -> RequestSequence:
        """Return the sequence of a request; a new one if it is not known and the request starts it."""
        sequence = self._open.get(request.correlation_id)
        if sequence is None:
            if RequestFlags.SEQUENCE_START not in request.flags:
                raise _no_start(request)
            sequence = self._open[request.correlation_id] = self._begin(request)
        elif RequestFlags.SEQUENCE_START in request.flags:
            logger.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this "
                "sequence start. Previous sequence will be terminated early.",
                request.correlation_id,
                request.model_name,
            )
        return sequence

    def _begin(self, request: InferenceRequest) -> RequestSequence:
        sequence = RequestSequence(id=request.correlation_id)
        if self._free:
            sequence.slot, sequence.instance = heapq.heappop(self._free)
        else:
            self._backlog[sequence] = None
        return sequence

    def _append(self, sequence: RequestSequence, inference: Inference, *, now_ns: int) -> None:
        sequence.waiting.append(QueuedRequest(inference=inference, added_ns=now_ns))
        self._sequence_of[inference] = sequence
        if RequestFlags.SEQUENCE_END in inference.request.flags:
            self._stop_accepting(sequence)
        if sequence in self._backlog:
            if inference.request.timeout_us:
                due_ns = now_ns + inference.request.timeout_us * 1000
                self._deadlines.set(sequence, min(due_ns, sequence.due_ns or due_ns))
        else:
            sequence.due_ns = None  # not idle
            self._advance(sequence, now_ns=now_ns)

    def _iterate(self, sequence: RequestSequence, inference: Inference, *, now_ns: int) -> list[Rejection]:
        if not inference.reschedule or inference.ended:
            return self._end(sequence, first=0, now_ns=now_ns)
        inference.reschedule = False
        inference.request = dataclasses.replace(inference.request, flags=RequestFlags.NONE)
        if inference.cancelled:
            return [Rejection(inference, None), *self._end(sequence, first=0, now_ns=now_ns)]
        if sequence.is_finished:
            return [Rejection(inference, _no_start(inference.request))]
        self._append(sequence, inference, now_ns=now_ns)
        return []

    def _advance(self, sequence: RequestSequence, *, now_ns: int) -> None:
        """Make the next request of a sequence ready to run, or free the slot of a sequence that has ended."""
        if sequence.running is not None or sequence.instance is None:
            return
        if sequence.waiting:
            self._attach_states(sequence)
            self._slots[sequence.instance].ready(sequence, now_ns=now_ns)
        elif sequence.is_finished:
            if sequence.instance not in self._dead:
                heapq.heappush(self._free, (sequence.slot, sequence.instance))
            sequence.instance = None
            self._fill_slots(now_ns=now_ns)

    def _attach_states(self, sequence: RequestSequence) -> None:
        """Attach the states to the first request; their shapes are part of its batch key."""
        inference = sequence.waiting[0].inference
        if inference.states is not None:
            return
        if sequence.states is None or RequestFlags.SEQUENCE_START in inference.request.flags:
            sequence.states = self._states.start()
        inference.states = sequence.states

    def _fill_slots(self, *, now_ns: int) -> None:
        while self._backlog and self._free:
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            sequence.slot, sequence.instance = heapq.heappop(self._free)
            sequence.due_ns = None
            self._advance(sequence, now_ns=now_ns)

    def _end(self, sequence: RequestSequence, *, first: int, now_ns: int) -> list[Rejection]:
        """Remove the requests of a sequence from index `first` on, after which it ends."""
        self._stop_accepting(sequence)
        self._backlog.pop(sequence, None)
        sequence.due_ns = None
        if first == 0 and sequence.waiting and sequence.instance is not None:
            self._slots[sequence.instance].withdraw(sequence)
        rejected = []
        while len(sequence.waiting) > first:
            inference = sequence.waiting.pop().inference
            del self._sequence_of[inference]
            rejected.append(Rejection(inference, None))
        self._advance(sequence, now_ns=now_ns)
        return rejected[::-1]

    def _stop_accepting(self, sequence: RequestSequence) -> None:
        sequence.is_finished = True
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
        if sequence.instance is not None:
            sequence.due_ns = None


class _Deadlines:
    """The sequences by their `due_ns`. A heap has each sequence once, perhaps earlier than it is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestSequence]] = []
        self._count = itertools.count()

    def set(self, sequence: RequestSequence, due_ns: int | None) -> None:
        """Set when a sequence is due; None: never."""
        sequence.due_ns = due_ns
        if due_ns is not None and (sequence.heap_ns is None or due_ns < sequence.heap_ns):
            sequence.heap_ns = due_ns
            heapq.heappush(self._heap, (due_ns, next(self._count), sequence))

    @property
    def next_ns(self) -> int | None:
        """When the first sequence is due; None: there is none."""
        while self._heap:
            heap_ns, _, sequence = self._heap[0]
            if heap_ns == sequence.due_ns:
                return heap_ns
            heapq.heappop(self._heap)
            sequence.heap_ns = None
            self.set(sequence, sequence.due_ns)
        return None

    def pop(self) -> RequestSequence:
        """Remove the sequence that is due at `next_ns`."""
        sequence = heapq.heappop(self._heap)[2]
        sequence.heap_ns = sequence.due_ns = None
        return sequence


def _num_slots(config: ModelConfig) -> int:
    assert config.sequence_batching is not None
    strategy = config.sequence_batching.strategy
    num_candidates = strategy.max_candidate_sequences if isinstance(strategy, OldestStrategy) else 0
    return num_candidates or max(1, config.max_batch_size)


def _index(sequence: RequestSequence, inference: Inference) -> int:
    return next(i for i, entry in enumerate(sequence.waiting) if entry.inference is inference)


def _no_start(request: InferenceRequest) -> InferenceError:
    return InferenceError(
        f"inference request for sequence {request.correlation_id} to model '{request.model_name}' must "
        "specify the START flag on the first request of the sequence",
        remedy="set sequence_start; a sequence ends by itself when idle for max_sequence_idle_microseconds",
    )


def _late_sequence() -> InferenceError:
    return InferenceError(
        "timeout of the corresponding sequence has been expired",
        status=Status.UNAVAILABLE,
        remedy="no slot became free in time; end sequences, or allow more of them at a time",
    )
