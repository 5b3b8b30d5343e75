"""Sequence batcher: the requests of a sequence run in order, those of different sequences in one batch."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
from collections.abc import Sequence as Ordered
from pathlib import Path

from genserve.config.model_config import ModelConfig, OldestStrategy, SequenceBatching
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest, RequestFlags
from genserve.schedulers.dynamic_batcher import Entry, alike
from genserve.schedulers.request_queue import ANY_INSTANCE, Plan, Refusal
from genserve.schedulers.sequence_slots import DirectSlots, OldestSlots, Sequence, Slots
from genserve.schedulers.sequence_tensors import SequenceControls, SequenceStates

__all__ = ["SequenceQueue"]


logger = logging.getLogger(__name__)


class SequenceQueue:
    """The `Queue` of a model of sequences.

    A sequence gets a slot of an instance and keeps it until its END has run, or until nothing of it has
    waited for `max_sequence_idle_us`. Without a free slot it waits, with all its requests, for the next one.
    An iterative request is a sequence of its own: it is queued again until the model lets it go.
    """

    def __init__(self, config: ModelConfig, *, num_instances: int, path: Path) -> None:
        """Make a queue.

        Args:
            config: of the model, with `sequence_batching`.
            num_instances: each has slots of its own.
            path: of the model, for the files of initial states.

        Raises:
            RepositoryError: a file of an initial state cannot be read, or is too short.
        """
        assert config.sequence_batching is not None
        self._config: SequenceBatching = config.sequence_batching
        self._alike = alike(config)
        self._controls = SequenceControls(self._config, max_batch_size=config.max_batch_size)
        self._states = SequenceStates(self._config.states, max_batch_size=config.max_batch_size, path=path)
        self._max_idle_ns = self._config.max_sequence_idle_us * 1000
        num_slots = _num_slots(config)
        self._slots = [self._make_slots(config, num_slots=num_slots) for _ in range(num_instances)]
        self._free = [(slot, instance) for slot in range(num_slots) for instance in range(num_instances)]
        self._backlog: dict[Sequence, None] = {}            # sequences without a slot, in order
        self._open: dict[int | str, Sequence] = {}          # those that take more requests, by a client's id
        self._sequence_of: dict[Inference, Sequence] = {}   # of all that wait
        self._running: dict[Inference, Sequence] = {}
        self._watched: list[tuple[int, int, Sequence]] = []  # a heap, with each sequence once
        self._count = itertools.count()
        self._next_id = itertools.count(1)
        self._gone: set[int] = set()                        # instances that died

    def __len__(self) -> int:
        """Inferences that wait."""
        return len(self._sequence_of)

    @property
    def expires_ns(self) -> int | None:
        """When the next sequence is idle for too long, or has waited too long for a slot."""
        while self._watched:
            watched_ns, _, sequence = self._watched[0]
            if watched_ns == sequence.due_ns:
                return watched_ns
            heapq.heappop(self._watched)
            sequence.watched_ns = None
            self._watch(sequence, due_ns=sequence.due_ns)
        return None

    def add(self, inference: Inference, *, now_ns: int) -> int | None:
        """Queue an inference behind those of its sequence.

        Raises:
            InferenceError: it has no correlation id, more than one row, or neither starts a sequence nor
                belongs to one.
        """
        is_alone = self._config.iterative and not inference.request.correlation_id
        if is_alone:
            inference.request = self._numbered(inference.request)
        self._check(inference)
        sequence = self._begin(inference.request) if is_alone else self._joined(inference.request)
        self._append(sequence, inference, now_ns=now_ns)
        return sequence.instance

    def plan(self, instance: int, *, now_ns: int) -> Plan:
        """Return what may run together on an instance."""
        return self._slots[instance].plan(now_ns=now_ns)

    def start(self, instance: int, batch: Ordered[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Take the batch out, and give it its controls and states."""
        sequences = [self._sequence_of.pop(inference) for inference in batch]
        for inference, sequence in zip(batch, sequences, strict=True):
            sequence.waiting.popleft()
            sequence.running = inference
            self._running[inference] = sequence
            inference.inputs.update(self._controls.of(inference.request), **(inference.states or {}))
            if not sequence.waiting and not sequence.is_over:
                self._watch(sequence, due_ns=now_ns + self._max_idle_ns)
        return self._slots[instance].start(batch, sequences)

    def done(self, instance: int, batch: Ordered[Inference], *, now_ns: int) -> list[Refusal]:
        """Let the sequences go on, and the iterative requests that ask for it be queued again."""
        refused: list[Refusal] = []
        for inference in batch:
            sequence = self._running.pop(inference, None)
            if sequence is None:
                continue  # it has filled an empty slot
            sequence.running = None
            if self._config.iterative:
                refused += self._iterate(sequence, inference, now_ns=now_ns)
            self._go_on(sequence, now_ns=now_ns)
        return refused

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Refusal]:
        """Take it out with all that follow it in its sequence, which is over; without a slot, all of it."""
        sequence = self._sequence_of.get(inference)
        if sequence is None:
            return []
        first = 0 if sequence in self._backlog else _index(sequence, inference)
        return self._end(sequence, first=first, now_ns=now_ns)

    def expire(self, *, now_ns: int) -> list[Refusal]:
        """Let go of idle sequences, and take out those that have waited too long for a slot."""
        refused: list[Refusal] = []
        while (due_ns := self.expires_ns) is not None and due_ns <= now_ns:
            sequence = heapq.heappop(self._watched)[2]
            sequence.watched_ns = sequence.due_ns = None
            late = self._end(sequence, first=0, now_ns=now_ns)  # nothing, if it was idle
            refused += (Refusal(inference, _late_sequence()) for inference, _ in late)
        return refused

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Take out the sequences that have a slot of this instance."""
        self._gone.update(range(len(self._slots)) if instance == ANY_INSTANCE else (instance,))
        self._free = [(slot, owner) for slot, owner in self._free if owner not in self._gone]
        heapq.heapify(self._free)
        sequences = {*self._open.values(), *self._sequence_of.values(), *self._running.values()}
        lost: list[Refusal] = []
        for sequence in sequences:
            if instance in (ANY_INSTANCE, sequence.instance):
                lost += self._end(sequence, first=0, now_ns=now_ns)
        return [inference for inference, _ in lost]

    def _make_slots(self, config: ModelConfig, *, num_slots: int) -> Slots:
        strategy = self._config.strategy
        if isinstance(strategy, OldestStrategy):
            return OldestSlots(strategy, max_batch_size=config.max_batch_size, alike=self._alike)
        return DirectSlots(strategy, num_slots=num_slots, controls=self._controls, alike=self._alike)

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
        """Return a request as a sequence of its own; the model must not take it for one that a client has."""
        number = next(number for number in self._next_id if number not in self._open)
        return dataclasses.replace(request, correlation_id=number, flags=RequestFlags.SEQUENCE_START)

    def _joined(self, request: InferenceRequest) -> Sequence:
        """Return the sequence that a client means; a new one, if there is none and the request starts it."""
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

    def _begin(self, request: InferenceRequest) -> Sequence:
        sequence = Sequence(id=request.correlation_id)
        if self._free:
            sequence.slot, sequence.instance = heapq.heappop(self._free)
        else:
            self._backlog[sequence] = None
        return sequence

    def _append(self, sequence: Sequence, inference: Inference, *, now_ns: int) -> None:
        sequence.waiting.append(Entry(inference=inference, added_ns=now_ns))
        self._sequence_of[inference] = sequence
        if RequestFlags.SEQUENCE_END in inference.request.flags:
            self._take_no_more(sequence)
        if sequence in self._backlog:
            if inference.request.timeout_us:
                due_ns = now_ns + inference.request.timeout_us * 1000
                self._watch(sequence, due_ns=min(due_ns, sequence.due_ns or due_ns))
        else:
            sequence.due_ns = None  # it is not idle
            self._go_on(sequence, now_ns=now_ns)

    def _iterate(self, sequence: Sequence, inference: Inference, *, now_ns: int) -> list[Refusal]:
        if not inference.reschedule or inference.ended:
            return self._end(sequence, first=0, now_ns=now_ns)
        inference.reschedule = False
        inference.request = dataclasses.replace(inference.request, flags=RequestFlags.NONE)
        if inference.cancelled:
            return [Refusal(inference, None), *self._end(sequence, first=0, now_ns=now_ns)]
        if sequence.is_over:
            return [Refusal(inference, _no_start(inference.request))]
        self._append(sequence, inference, now_ns=now_ns)
        return []

    def _go_on(self, sequence: Sequence, *, now_ns: int) -> None:
        """Let the next request of a sequence run, or free its slot if there will be none."""
        if sequence.running is not None or sequence.instance is None:
            return
        if sequence.waiting:
            self._give_states(sequence)
            self._slots[sequence.instance].ready(sequence, now_ns=now_ns)
        elif sequence.is_over:
            if sequence.instance not in self._gone:
                heapq.heappush(self._free, (sequence.slot, sequence.instance))
            sequence.instance = None
            self._fill_slots(now_ns=now_ns)

    def _give_states(self, sequence: Sequence) -> None:
        """Give the first request its states, which say with whom it can share a batch."""
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
            self._go_on(sequence, now_ns=now_ns)

    def _end(self, sequence: Sequence, *, first: int, now_ns: int) -> list[Refusal]:
        """Take out the requests of a sequence from one on; it is over after those before."""
        self._take_no_more(sequence)
        self._backlog.pop(sequence, None)
        sequence.due_ns = None
        if first == 0 and sequence.waiting and sequence.instance is not None:
            self._slots[sequence.instance].withdraw(sequence)
        refused = []
        while len(sequence.waiting) > first:
            inference = sequence.waiting.pop().inference
            del self._sequence_of[inference]
            refused.append(Refusal(inference, None))
        self._go_on(sequence, now_ns=now_ns)
        return refused[::-1]

    def _take_no_more(self, sequence: Sequence) -> None:
        sequence.is_over = True
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
        if sequence.instance is not None:
            sequence.due_ns = None

    def _watch(self, sequence: Sequence, *, due_ns: int | None) -> None:
        sequence.due_ns = due_ns
        if due_ns is not None and (sequence.watched_ns is None or due_ns < sequence.watched_ns):
            sequence.watched_ns = due_ns
            heapq.heappush(self._watched, (due_ns, next(self._count), sequence))


def _num_slots(config: ModelConfig) -> int:
    assert config.sequence_batching is not None
    strategy = config.sequence_batching.strategy
    num_candidates = strategy.max_candidate_sequences if isinstance(strategy, OldestStrategy) else 0
    return num_candidates or max(1, config.max_batch_size)


def _index(sequence: Sequence, inference: Inference) -> int:
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
