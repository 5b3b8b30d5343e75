"""Dynamic batcher: which of the waiting requests form a batch, by Triton's rules."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from genserve.batching.request_queue import ANY_INSTANCE, NO_BATCH, BatchPlan, Rejection
from genserve.config.model_config import ATTENTION_MASK, DynamicBatching, ModelConfig, QueuePolicy
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceResponse, with_request_id

# Requests with equal keys can share a batch.
BatchKey = Callable[[Inference], Hashable]


class DynamicQueue:
    """A `Queue` that forms batches.

    It is ordered by priority level, and in a level the requests that have timed out come last.
    """

    def __init__(self, config: DynamicBatching, *, max_batch_size: int, batch_key: BatchKey) -> None:
        """Make a queue.

        Args:
            config: the field `dynamic_batching`.
            max_batch_size: the most rows of a batch; 0: each request runs alone.
            batch_key: computes the key that the requests of a batch share.
        """
        self._batch_key = batch_key
        self._rules = _BatchRules.of(
            max_batch_size=max_batch_size,
            preferred_batch_sizes=config.preferred_batch_sizes,
            max_queue_delay_us=config.max_queue_delay_us,
        )
        self._order = _ExecutionOrder() if config.preserve_ordering else None
        self._config = config
        # Without priorities there is one level, 0.
        self._default_level = config.default_priority_level if config.priority_levels else 0
        # The levels in use, in order: there may be 2**64 levels.
        self._levels: dict[int, _Level] = {}
        self._level_of: dict[Inference, _Level] = {}
        self._expiries: list[tuple[int, int, Inference]] = []  # a heap; may contain inferences that have left
        self._count = itertools.count()

    def __len__(self) -> int:
        """Number of waiting inferences."""
        return len(self._level_of)

    @property
    def expires_ns(self) -> int | None:
        """When the next request times out."""
        while self._expiries and not self._is_waiting(self._expiries[0][2]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def add(self, inference: Inference, *, now_ns: int) -> int:
        """Append an inference to the level of its priority.

        Raises:
            InferenceError: the level is full.
        """
        level = self._level(inference)
        if level.is_full:
            raise InferenceError(
                with_request_id("Exceeds maximum queue size", inference.request.id),
                status=Status.UNAVAILABLE,
                remedy=f"{len(level)} requests are waiting, the limit set by max_queue_size; try again later",
            )
        entry = QueuedRequest(inference=inference, added_ns=now_ns, batch_key=self._batch_key(inference))
        timeout_us = level.timeout_us(inference)
        if timeout_us:
            entry.expires_ns = now_ns + timeout_us * 1000
            heapq.heappush(self._expiries, (entry.expires_ns, next(self._count), inference))
        level.in_time[inference] = entry
        self._level_of[inference] = level
        return ANY_INSTANCE

    def plan(self, instance: int, *, now_ns: int) -> BatchPlan:
        """Return the batch at the head of the queue, if it is complete."""
        return _plan_batch(self._entries(), self._rules, now_ns=now_ns)

    def start(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Remove a planned batch."""
        for inference in batch:
            self._remove(inference)
            if self._order is not None:
                self._order.enter(inference)
        return tuple(batch)

    def done(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> list[Rejection]:
        """Do nothing."""
        return []

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Rejection]:
        """Remove an inference if it is still waiting."""
        if inference not in self._level_of:
            return []
        self._remove(inference)
        return [Rejection(inference, None)]

    def expire(self, *, now_ns: int) -> list[Rejection]:
        """Reject the requests that have timed out, or move them to the end of their level, by its policy."""
        rejected: list[Rejection] = []
        while (expires_ns := self.expires_ns) is not None and expires_ns <= now_ns:
            inference = heapq.heappop(self._expiries)[2]
            level = self._level_of[inference]
            if level.policy.delays:
                level.late[inference] = level.in_time.pop(inference)
            else:
                self._remove(inference)
                rejected.append(Rejection(inference, _timeout()))
        return rejected

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Remove everything if the last instance has died: any instance executes any inference."""
        lost = list(self._level_of) if instance == ANY_INSTANCE else []
        for inference in lost:
            self._remove(inference)
        return lost

    def _level(self, inference: Inference) -> _Level:
        priority = inference.request.priority
        number = priority if 0 < priority <= self._config.priority_levels else self._default_level
        level = self._levels.get(number)
        if level is None:
            policy = self._config.priority_queue_policy.get(number, self._config.default_queue_policy)
            self._levels[number] = level = _Level(number, policy)
            self._levels = dict(sorted(self._levels.items()))
        return level

    def _remove(self, inference: Inference) -> None:
        level = self._level_of.pop(inference)
        level.remove(inference)
        if not level and level.number != self._default_level:
            del self._levels[level.number]

    def _entries(self) -> Iterator[QueuedRequest]:
        for level in self._levels.values():
            yield from level.in_time.values()
            yield from level.late.values()

    def _is_waiting(self, inference: Inference) -> bool:
        level = self._level_of.get(inference)
        return level is not None and inference in level.in_time


class _Level:
    """The requests of one priority."""

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.number = number
        self.policy = policy
        self.in_time: OrderedDict[Inference, QueuedRequest] = OrderedDict()
        self.late: OrderedDict[Inference, QueuedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self.in_time) + len(self.late)

    @property
    def is_full(self) -> bool:
        return 0 < self.policy.max_queue_size <= len(self)

    def timeout_us(self, inference: Inference) -> int:
        """Return the timeout of a request, 0: none. A request can only shorten that of its level."""
        default_us, own_us = self.policy.default_timeout_us, inference.request.timeout_us
        if self.policy.allow_timeout_override and 0 < own_us < default_us:
            return own_us
        return default_us

    def remove(self, inference: Inference) -> None:
        """Remove an inference."""
        if self.in_time.pop(inference, None) is None:
            del self.late[inference]


def _timeout() -> InferenceError:
    return InferenceError(
        "Request timeout expired",
        status=Status.UNAVAILABLE,
        remedy="it waited longer than its queue policy allows; add instances or raise the timeout",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchRules:
    """When a batch is complete. Rows are the sum of the batch sizes of the requests."""

    max_rows: int                                       # 1 if the model does not batch
    preferred_rows: frozenset[int] = frozenset()        # sizes that run immediately; empty: any
    max_delay_ns: int = 0                               # how long the oldest request waits for a larger batch

    @classmethod
    def of(
        cls, *, max_batch_size: int, preferred_batch_sizes: Iterable[int], max_queue_delay_us: int
    ) -> _BatchRules:
        """Make the rules of a config; without preferred sizes the largest one is preferred."""
        max_rows = max(1, max_batch_size)
        return cls(
            max_rows=max_rows,
            preferred_rows=frozenset(preferred_batch_sizes) or frozenset({max_rows}),
            max_delay_ns=max_queue_delay_us * 1000,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRequest:
    """A waiting request."""

    inference: Inference
    added_ns: int
    batch_key: Hashable = None
    expires_ns: int | None = None


def batch_key(config: ModelConfig) -> BatchKey:
    """Return the function that computes the batch key of a request.

    The key holds the shapes of the inputs of variable shape that are neither ragged nor padded, the names of
    the inputs if some are optional, and the current shapes of the implicit states of its sequence.
    """
    input_key = _input_key(config)
    if config.sequence_batching is None or not config.sequence_batching.states:
        return input_key
    return lambda sent: (input_key(sent), tuple(state.shape for state in (sent.states or {}).values()))


def _input_key(config: ModelConfig) -> BatchKey:
    enforced = [spec.name for spec in config.inputs if -1 in spec.dims and not spec.allow_ragged_batch]
    if config.is_encoder and config.input(ATTENTION_MASK) is not None:
        enforced = []   # a mask tells the rows from their padding
    first = 1 if config.max_batch_size else 0  # the batch dimension may differ
    if any(spec.optional for spec in config.inputs):
        return lambda sent: (frozenset(sent.request.inputs), _shapes(sent, enforced, first=first))
    if enforced:
        return lambda sent: _shapes(sent, enforced, first=first)
    return lambda sent: None


def _plan_batch(entries: Iterable[QueuedRequest], rules: _BatchRules, *, now_ns: int) -> BatchPlan:
    """Form the batch at the head of the queue, without skipping a request.

    The largest preferred size that was reached runs immediately, and so does a batch that cannot grow. Any
    other batch runs when the delay of its oldest request is over.
    """
    batch: list[QueuedRequest] = []
    rows = num_preferred = 0
    largest = max(rules.preferred_rows, default=0)
    is_full = False
    for entry in entries:
        if batch:
            rows_then = rows + entry.inference.batch_size
            if rows_then > largest and not num_preferred:
                num_preferred = len(batch)
            if rows_then > rules.max_rows or entry.batch_key != batch[0].batch_key:
                is_full = True
                break
        batch.append(entry)
        rows += entry.inference.batch_size
        if rows in rules.preferred_rows:
            num_preferred = len(batch)
    if not batch:
        return NO_BATCH
    due_ns = min(entry.added_ns for entry in batch) + rules.max_delay_ns
    is_late = rules.max_delay_ns > 0 and now_ns >= due_ns
    if num_preferred and not is_late:
        return BatchPlan(_inferences(batch[:num_preferred]))
    if is_full or is_late or rows >= largest or not rules.max_delay_ns:
        return BatchPlan(_inferences(batch))
    return BatchPlan(until_ns=due_ns)


def _inferences(entries: Sequence[QueuedRequest]) -> tuple[Inference, ...]:
    return tuple(entry.inference for entry in entries)


def _shapes(inference: Inference, names: Sequence[str], *, first: int) -> tuple[tuple[int, ...] | None, ...]:
    inputs = inference.request.inputs  # as sent: without the controls, which vary
    return tuple(inputs[name].shape[first:] if name in inputs else None for name in names)


class _ExecutionOrder:
    """The order in which the requests were executed, a `ResponseOrder`. Safe from any thread.

    The responses to the oldest unfinished request are passed on as they arrive, all other responses wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By inference, in the order of execution.
        self._held_back: OrderedDict[Inference, deque[tuple[InferenceResponse | None, bool]]] = OrderedDict()
        self._is_passing_on = False

    def enter(self, inference: Inference) -> None:
        """Append an inference that is about to be executed."""
        with self._lock:
            self._held_back.setdefault(inference, deque())     # a rescheduled one keeps its place
        inference.hold_back(self)

    def put(self, inference: Inference, response: InferenceResponse | None, *, final: bool) -> None:
        """Hold a response back, and pass on all responses whose turn it is."""
        with self._lock:
            self._held_back[inference].append((response, final))
            if self._is_passing_on:
                return  # the thread that passes on finds this response too; callbacks run without the lock
            self._is_passing_on = True
        for next_inference, next_response, is_final in self._due():
            next_inference.pass_on(next_response, final=is_final)

    def _due(self) -> Iterator[tuple[Inference, InferenceResponse | None, bool]]:
        while True:
            with self._lock:
                inference, responses = next(iter(self._held_back.items()), (None, None))
                if inference is None or not responses:
                    self._is_passing_on = False
                    return
                response, final = responses.popleft()
                if final:
                    del self._held_back[inference]
            yield inference, response, final
