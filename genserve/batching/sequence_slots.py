"""Sequence slots: the batch rows of one instance, the sequences in them, their control inputs and states."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from genserve.batching.dynamic_batcher import BatchKey, DynamicQueue, QueuedRequest
from genserve.batching.request_queue import NO_BATCH, BatchPlan
from genserve.config.model_config import (
    Control,
    DirectStrategy,
    DynamicBatching,
    OldestStrategy,
    SequenceBatching,
    StateSpec,
)
from genserve.errors import InferenceError
from genserve.inference import Inference, InferenceRequest, InferenceResponse, RequestFlags, with_request_id
from genserve.tensor import DataType, Tensor, read_tensor


class SequenceStates:
    """Makes the initial states of sequences; the backend replaces them after each execution."""

    def __init__(self, specs: Sequence[StateSpec], *, max_batch_size: int, path: Path) -> None:
        """Read the initial states.

        Args:
            specs: the declared states.
            max_batch_size: the model's largest batch; unless it is 0, states have a batch dimension of 1.
            path: the model's folder, whose `initial_state` holds the data files.

        Raises:
            RepositoryError: a data file cannot be read, or is too short.
        """
        rows = (1,) if max_batch_size else ()
        self._initial = [_initial_state(spec, rows=rows, path=path) for spec in specs]

    def start(self) -> dict[str, Tensor] | None:
        """Return new, writable initial states by input name; None: the model has no states."""
        if not self._initial:
            return None
        return {
            tensor.name: Tensor(tensor.name, tensor.array.copy(), data_type=tensor.data_type)
            for tensor in self._initial
        }


def _initial_state(spec: StateSpec, *, rows: tuple[int, ...], path: Path) -> Tensor:
    initial = spec.initial_state
    data_type = DataType.from_config_name(spec.data_type)
    if initial is not None and initial.data_file:
        data = read_tensor(
            path / "initial_state" / initial.data_file,
            spec.input_name,
            data_type=data_type,
            shape=initial.dims,
            too_short=lambda expected, actual: (
                f"initial_state setting expects {expected} bytes, but the data provided from "
                f"{initial.data_file}only has {actual} bytes."
            ),
        )
        return data.reshaped(rows + initial.dims)
    dims = spec.dims if initial is None else initial.dims
    shape = rows + tuple(max(dim, 1) for dim in dims)  # -1 becomes 1
    return _zeros(spec.input_name, shape, data_type=data_type)


class SequenceControls:
    """Makes the control tensors of a model: of shape [1, 1] if it batches, else [1].

    They are passed as inputs and are read-only for the model.
    """

    def __init__(self, config: SequenceBatching, *, max_batch_size: int) -> None:
        self._shape = (1, 1) if max_batch_size else (1,)
        by_kind = {control.kind.removeprefix("CONTROL_SEQUENCE_"): control for control in config.controls}
        self._corrid = by_kind.pop("CORRID", None)
        self._tensors = {
            (kind, is_true): self._flag(control, is_true=is_true)
            for kind, control in by_kind.items()
            for is_true in (False, True)
        }
        self._kinds = tuple(by_kind)

    def check(self, request: InferenceRequest) -> None:
        """Check that a correlation id has the type that the model expects.

        Raises:
            InferenceError: the id is a number and the model expects a string, or vice versa.
        """
        if self._corrid is None:
            return
        actual = DataType.BYTES if isinstance(request.correlation_id, str) else DataType.UINT64
        expected = DataType.from_config_name(self._corrid.data_type)
        if (actual is DataType.BYTES) != (expected is DataType.BYTES):
            raise InferenceError(
                with_request_id(
                    f"sequence batching control '{self._corrid.name}' data-type is '{actual.name}', "
                    f"but model '{request.model_name}' expects '{expected.name}'",
                    request.id,
                )
            )

    def of(self, request: InferenceRequest) -> dict[str, Tensor]:
        """Return the controls of a request that is about to run."""
        return self._make(
            start=RequestFlags.SEQUENCE_START in request.flags,
            end=RequestFlags.SEQUENCE_END in request.flags,
            ready=True,
            correlation_id=request.correlation_id,
        )

    @property
    def of_null(self) -> dict[str, Tensor]:
        """The controls of a null request: everything false, no correlation id."""
        return self._make(start=False, end=False, ready=False, correlation_id=0)

    def _make(self, *, start: bool, end: bool, ready: bool, correlation_id: int | str) -> dict[str, Tensor]:
        values = {"START": start, "END": end, "READY": ready}
        tensors = [self._tensors[kind, values[kind]] for kind in self._kinds]
        if self._corrid is not None:
            tensors.append(self._correlation_id(self._corrid, correlation_id))
        return {tensor.name: tensor for tensor in tensors}

    def _flag(self, control: Control, *, is_true: bool) -> Tensor:
        data_type = DataType.from_config_name(control.data_type)
        array = np.full(self._shape, control.false_true[is_true], data_type.numpy)
        return Tensor(control.name, array, data_type=data_type)

    def _correlation_id(self, control: Control, correlation_id: int | str) -> Tensor:
        data_type = DataType.from_config_name(control.data_type)
        if data_type is DataType.BYTES:
            array = np.empty(self._shape, object)
            array.fill(correlation_id.encode() if isinstance(correlation_id, str) else b"")
        else:  # a narrower type keeps the low bits
            array = np.full(self._shape, correlation_id, np.uint64).astype(data_type.numpy)
        return Tensor(control.name, array, data_type=data_type)


def null_inference(like: Inference, *, controls: SequenceControls) -> Inference:
    """Return a null request for an empty slot: it has the inputs of `like`, filled with zeros."""
    request = like.request
    null = Inference(
        request=InferenceRequest(
            model_name=request.model_name,
            model_version=request.model_version,
            inputs={name: _zeros_like(tensor) for name, tensor in like.inputs.items()},
        ),
        on_response=_discard,
        batch_size=like.batch_size,
        model_version=like.model_version,
    )
    null.inputs.update(controls.of_null)
    if like.states is not None:
        null.states = {name: _zeros_like(tensor) for name, tensor in like.states.items()}
    return null


def _discard(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
    """Discard the responses to a null request."""


def _zeros_like(tensor: Tensor) -> Tensor:
    return _zeros(tensor.name, tensor.shape, data_type=tensor.data_type)


def _zeros(name: str, shape: Sequence[int], *, data_type: DataType) -> Tensor:
    array = np.zeros(tuple(shape), data_type.numpy)
    if data_type is DataType.BYTES:
        array.fill(b"")
    return Tensor(name, array, data_type=data_type)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestSequence:
    """The requests with one correlation id, from START to END.

    Attributes:
        id: the correlation id.
        instance: the instance of its slot; None: the sequence waits for a slot.
        slot: its slot at the instance.
        waiting: its requests that have not started.
        running: its request that is being executed.
        is_finished: whether the sequence accepts no more requests.
        states: its implicit states.
        due_ns: when the sequence will have been idle, or have waited for a slot, for too long; None: never.
        heap_ns: the time of its entry in the heap of deadlines; None: it has no entry.
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
        """Record that the first request of a sequence may run. Idempotent."""

    def withdraw(self, sequence: RequestSequence) -> None:
        """Record that the first request of a sequence will not run."""

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
        """Record that the first request of a sequence may run. Idempotent."""
        if self._ready[sequence.slot] is None:
            head = sequence.waiting[0]
            head.batch_key = self._batch_key(head.inference)
            self._ready[sequence.slot] = sequence

    def withdraw(self, sequence: RequestSequence) -> None:
        """Record that the first request of a sequence will not run."""
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
