"""Dynamic batcher: requests that wait at the same time share an execution, by priority."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from genserve.config.model_config import DynamicBatching, QueuePolicy
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, with_request_id
from genserve.schedulers.batch_rules import Alike, BatchRules, Entry, plan_batch
from genserve.schedulers.queue import ANY_INSTANCE, Plan, Refusal
from genserve.schedulers.response_order import ResponseOrder

__all__ = ["DynamicQueue"]


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
