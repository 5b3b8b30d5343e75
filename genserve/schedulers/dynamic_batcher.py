"""Dynamic batcher: which of the waiting requests form a batch, by Triton's rules."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from genserve.config.model_config import DynamicBatching, ModelConfig, QueuePolicy
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceResponse, OnResponse, with_request_id
from genserve.schedulers.request_queue import ANY_INSTANCE, NOTHING_TO_DO, Plan, Refusal

__all__ = ["BatchRules", "DynamicQueue", "Entry", "ResponseOrder", "alike", "plan_batch"]


# Requests of one batch have the same.
Alike = Callable[[Inference], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """When a batch is complete."""

    max_rows: int                                       # 1 where the model does not batch
    preferred_rows: frozenset[int] = frozenset()        # sizes that run at once; empty: any
    max_delay_ns: int = 0                               # how long the oldest waits for a better batch

    @classmethod
    def of(
        cls, *, max_batch_size: int, preferred_batch_sizes: Iterable[int], max_queue_delay_us: int
    ) -> BatchRules:
        """Read them from a config; without preferred sizes the largest is preferred."""
        max_rows = max(1, max_batch_size)
        return cls(
            max_rows=max_rows,
            preferred_rows=frozenset(preferred_batch_sizes) or frozenset({max_rows}),
            max_delay_ns=max_queue_delay_us * 1000,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One request that waits."""

    inference: Inference
    added_ns: int
    alike: Hashable = None
    expires_ns: int | None = None


def alike(config: ModelConfig) -> Alike:
    """Return what requests must have in common to share a batch.

    The shapes of the inputs that may vary and are not ragged; if some are optional, which there are; and the
    shapes of the states that their sequences have come to.
    """
    of_inputs = _alike_inputs(config)
    if config.sequence_batching is None or not config.sequence_batching.states:
        return of_inputs
    return lambda sent: (of_inputs(sent), tuple(state.shape for state in (sent.states or {}).values()))


def _alike_inputs(config: ModelConfig) -> Alike:
    enforced = [spec.name for spec in config.inputs if -1 in spec.dims and not spec.allow_ragged_batch]
    first = 1 if config.max_batch_size else 0  # the batch dimension may differ
    if any(spec.optional for spec in config.inputs):
        return lambda sent: (frozenset(sent.request.inputs), _shapes(sent, enforced, first=first))
    if enforced:
        return lambda sent: _shapes(sent, enforced, first=first)
    return lambda sent: None


def plan_batch(entries: Iterable[Entry], rules: BatchRules, *, now_ns: int) -> Plan:
    """Walk the queue from its head until a request does not fit; nobody is passed over.

    A preferred size that was reached runs at once, the largest of them; so does what cannot grow. Anything
    else waits until the delay of its oldest request is over, and then all of it runs.
    """
    batch: list[Entry] = []
    rows = num_preferred = 0
    largest = max(rules.preferred_rows, default=0)
    is_full = False
    for entry in entries:
        if batch:
            rows_then = rows + entry.inference.batch_size
            if rows_then > largest and not num_preferred:
                num_preferred = len(batch)
            if rows_then > rules.max_rows or entry.alike != batch[0].alike:
                is_full = True
                break
        batch.append(entry)
        rows += entry.inference.batch_size
        if rows in rules.preferred_rows:
            num_preferred = len(batch)
    if not batch:
        return NOTHING_TO_DO
    due_ns = min(entry.added_ns for entry in batch) + rules.max_delay_ns
    is_late = rules.max_delay_ns > 0 and now_ns >= due_ns
    if num_preferred and not is_late:
        return Plan(_inferences(batch[:num_preferred]))
    if is_full or is_late or rows >= largest or not rules.max_delay_ns:
        return Plan(_inferences(batch))
    return Plan(until_ns=due_ns)


def _inferences(entries: Sequence[Entry]) -> tuple[Inference, ...]:
    return tuple(entry.inference for entry in entries)


def _shapes(inference: Inference, names: Sequence[str], *, first: int) -> tuple[tuple[int, ...] | None, ...]:
    inputs = inference.request.inputs  # as sent: controls come and go
    return tuple(inputs[name].shape[first:] if name in inputs else None for name in names)


class _Turn:
    """The responses of one request that have not left yet."""

    def __init__(self, on_response: OnResponse) -> None:
        self.on_response = on_response
        self.responses: deque[tuple[InferenceResponse | None, bool]] = deque()


class ResponseOrder:
    """Holds responses back until those of all earlier requests have left; safe from any thread.

    The responses of one request are passed on as they come, once it is first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: deque[_Turn] = deque()
        self._is_passing_on = False

    def enter(self, inference: Inference) -> None:
        """Give an inference the last place; from now on its responses go through here."""
        turn = _Turn(inference.on_response)
        with self._lock:
            self._turns.append(turn)
        inference.on_response = partial(self._respond, turn)

    def _respond(self, turn: _Turn, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        with self._lock:
            turn.responses.append((response, final))
            if self._is_passing_on:
                return  # whoever does it now finds this one too; so there is no lock around the callbacks
            self._is_passing_on = True
        for on_response, passed, is_final in self._due():
            on_response(passed, is_final)

    def _due(self) -> Iterator[tuple[OnResponse, InferenceResponse | None, bool]]:
        while True:
            with self._lock:
                if not self._turns or not self._turns[0].responses:
                    self._is_passing_on = False
                    return
                turn = self._turns[0]
                response, final = turn.responses.popleft()
                if final:
                    self._turns.popleft()
            yield turn.on_response, response, final


class DynamicQueue:
    """A queue that forms batches; the `Queue` protocol.

    In it stand the levels of priority in order, and in each level those in time before those that are late.
    """

    def __init__(self, config: DynamicBatching, *, max_batch_size: int, alike: Alike) -> None:
        """Make a queue.

        Args:
            config: how to batch.
            max_batch_size: of the model; 0: each request runs alone.
            alike: what the requests of one batch must have in common.
        """
        self._alike = alike
        self._rules = BatchRules.of(
            max_batch_size=max_batch_size,
            preferred_batch_sizes=config.preferred_batch_sizes,
            max_queue_delay_us=config.max_queue_delay_us,
        )
        self._order = ResponseOrder() if config.preserve_ordering else None
        policies = config.priority_queue_policy
        # Without levels there is one, which all are in.
        self._default_level = config.default_priority_level if config.priority_levels else 0
        numbers = range(1, config.priority_levels + 1) if config.priority_levels else range(1)
        self._levels = {
            number: _Level(policies.get(number, config.default_queue_policy)) for number in numbers
        }
        self._level_of: dict[Inference, _Level] = {}
        self._expiries: list[tuple[int, int, Inference]] = []  # a heap; some do not wait any more
        self._count = itertools.count()

    def __len__(self) -> int:
        """Inferences that wait."""
        return len(self._level_of)

    @property
    def expires_ns(self) -> int | None:
        """When the next request is late."""
        while self._expiries and not self._is_waiting(self._expiries[0][2]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def add(self, inference: Inference, *, now_ns: int) -> int:
        """Queue an inference at its priority.

        Raises:
            InferenceError: the level is full.
        """
        level = self._level(inference)
        if level.is_full:
            raise InferenceError(
                with_request_id("Exceeds maximum queue size", inference.request.id),
                status=Status.UNAVAILABLE,
                remedy=f"{len(level)} requests wait, as many as max_queue_size allows; try again later",
            )
        entry = Entry(inference=inference, added_ns=now_ns, alike=self._alike(inference))
        timeout_us = level.timeout_us(inference)
        if timeout_us:
            entry.expires_ns = now_ns + timeout_us * 1000
            heapq.heappush(self._expiries, (entry.expires_ns, next(self._count), inference))
        level.in_time[inference] = entry
        self._level_of[inference] = level
        return ANY_INSTANCE

    def plan(self, instance: int, *, now_ns: int) -> Plan:
        """Return the batch at the head of the queue, if it is complete."""
        return plan_batch(self._entries(), self._rules, now_ns=now_ns)

    def start(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> tuple[Inference, ...]:
        """Take a batch out."""
        for inference in batch:
            self._level_of.pop(inference).remove(inference)
            if self._order is not None:
                self._order.enter(inference)
        return tuple(batch)

    def done(self, instance: int, batch: Sequence[Inference], *, now_ns: int) -> list[Refusal]:
        """Nothing follows an execution."""
        return []

    def cancel(self, inference: Inference, *, now_ns: int) -> list[Refusal]:
        """Take it out, if it waits."""
        level = self._level_of.pop(inference, None)
        if level is None:
            return []
        level.remove(inference)
        return [Refusal(inference, None)]

    def expire(self, *, now_ns: int) -> list[Refusal]:
        """Take out what is late, or move it behind its level, as the policy says."""
        refused: list[Refusal] = []
        while (expires_ns := self.expires_ns) is not None and expires_ns <= now_ns:
            inference = heapq.heappop(self._expiries)[2]
            level = self._level_of[inference]
            if level.policy.delays:
                level.late[inference] = level.in_time.pop(inference)
            else:
                self._level_of.pop(inference).remove(inference)
                refused.append(Refusal(inference, _timeout()))
        return refused

    def abandon(self, instance: int, *, now_ns: int) -> list[Inference]:
        """Any instance executes anything."""
        lost = list(self._level_of) if instance == ANY_INSTANCE else []
        for inference in lost:
            self._level_of.pop(inference).remove(inference)
        return lost

    def _level(self, inference: Inference) -> _Level:
        priority = inference.request.priority
        return self._levels[priority if priority in self._levels else self._default_level]

    def _entries(self) -> Iterator[Entry]:
        for level in self._levels.values():
            yield from level.in_time.values()
            yield from level.late.values()

    def _is_waiting(self, inference: Inference) -> bool:
        level = self._level_of.get(inference)
        return level is not None and inference in level.in_time


class _Level:
    """The requests of one priority."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.in_time: OrderedDict[Inference, Entry] = OrderedDict()
        self.late: OrderedDict[Inference, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self.in_time) + len(self.late)

    @property
    def is_full(self) -> bool:
        return 0 < self.policy.max_queue_size <= len(self)

    def timeout_us(self, inference: Inference) -> int:
        """Return how long a request may wait; 0: for ever. A request can only shorten it."""
        default_us, own_us = self.policy.default_timeout_us, inference.request.timeout_us
        if self.policy.allow_timeout_override and 0 < own_us < default_us:
            return own_us
        return default_us

    def remove(self, inference: Inference) -> None:
        """Take it out."""
        if self.in_time.pop(inference, None) is None:
            del self.late[inference]


def _timeout() -> InferenceError:
    return InferenceError(
        "Request timeout expired",
        status=Status.UNAVAILABLE,
        remedy="it waited for longer than its queue policy allows; add instances, or allow more time",
    )
