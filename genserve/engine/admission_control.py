"""Admission control: accepts or rejects requests for an engine; a rejection has a time to retry."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from genserve.engine.wait_prediction import WaitPrediction
from genserve.errors import Overloaded
from genserve.generation_metrics import GenerationMetrics
from genserve.request_context import NO_KEY, KeyShare

T = TypeVar("T")

_MAX_RETRY_AFTER_S = 60.0  # the official clients do not wait longer
_MIN_RETRY_AFTER_S = 0.1
_UNKNOWN_RETRY_AFTER_S = 1.0  # while the throughput is not known
# The share of the longest wait that a request may be predicted to wait. An engine that shares its cores with
# a flood of requests becomes a quarter slower, and to time out in the queue is worse than to be rejected.
_PREDICTED_SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How many requests may wait for an engine, and how long."""

    max_requests: int  # may wait, besides the running ones
    max_tokens: int | None = None  # prompt tokens that may wait for their first step; None: no limit
    max_wait_s: float | None = None  # the longest wait for the first step; None: no limit


class RetryTimes:
    """When rejected requests should be retried, so that they neither come together nor leave slots idle."""

    def __init__(self) -> None:
        self._last_s = 0.0  # the retry time of the last one

    def after_s(self, seconds_per_slot: float | None, *, max_s: float | None, now_s: float) -> float:
        """Return after which time the next rejected request should be retried.

        Retry times increase by half of the time in which a slot becomes free, so the queue does not run
        empty even if the estimate is wrong, and none is longer than the longest wait in the queue.

        Args:
            seconds_per_slot: the time in which a slot becomes free; None or 0: unknown.
            max_s: the longest wait in the queue; None: no limit.
            now_s: the time.
        """
        seconds = seconds_per_slot or _UNKNOWN_RETRY_AFTER_S
        latest_s = now_s + min(max_s or _MAX_RETRY_AFTER_S, _MAX_RETRY_AFTER_S)
        self._last_s = min(max(now_s, self._last_s) + seconds / 2, latest_s)
        return max(_MIN_RETRY_AFTER_S, self._last_s - now_s)


class RejectionReason(StrEnum):
    """Why a request was rejected; the label of `genserve_admission_rejections_total`."""

    MAX_QUEUE = "max_queue"
    MAX_QUEUE_TOKENS = "max_queue_tokens"
    PREDICTED_WAIT = "predicted_wait"  # on arrival, because it would wait too long
    QUEUE_TIMEOUT = "queue_timeout"  # later, because it has waited too long


# The reason of an ingress, whose replicas are all known to be full.
REPLICAS_FULL = "replicas_full"


class AdmissionControl:
    """Counts the requests that wait for one engine, has their wait predicted, and applies the limits.

    Requests are counted by the *slots* that they need in a forward, one for each sequence or beam. Its caller
    holds a lock, but not to read a count; times are by the engine's clock.

    Attributes:
        limits: how many requests may wait, and how long.
        prediction: predicts waits from the steps and the ends of sequences that are recorded there.
        num_accepted: slots of all requests that have not ended, waiting ones included.
        num_waiting_tokens: tokens of the prompts that wait for their first step.
        without_adapters: slots of the accepted requests that wait for adapters, and take no slot before, by
            priority.
    """

    def __init__(self, *, max_num_seqs: int, limits: QueueLimits, metrics: GenerationMetrics) -> None:
        self.limits = limits
        self.num_accepted = 0
        self.num_waiting_tokens = 0
        self.without_adapters: Counter[int] = Counter()
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics
        for reason in RejectionReason:  # or a rate would miss the first rejection
            metrics.rejected(reason.value, count=0)
        # Slots of all requests that have not ended or are prepared, by key.
        self._taken: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        # Slots, by priority.
        self._preparing: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()
        self.prediction = WaitPrediction(max_num_seqs=max_num_seqs)
        self._retry_times = RetryTimes()

    @property
    def capacity(self) -> int:
        """How many may run, wait and be prepared together."""
        return self._max_num_seqs + self.limits.max_requests

    @property
    def num_waiting(self) -> int:
        """Slots of accepted requests that wait for their first step."""
        return sum(self._waiting.values())

    @property
    def num_preparing(self) -> int:
        """Slots of requests whose prompts are being prepared."""
        return sum(self._preparing.values())

    def check(
        self, count: int, *, num_tokens: int, priority: int, now_s: float, share: KeyShare = NO_KEY
    ) -> None:
        """Raise Overloaded if a request for `count` slots may not wait now.

        While requests of other keys fill the queue, a key may nevertheless use its share of it.
        A prompt that is longer than the limit is accepted while no other prompt waits. Only requests in front
        of `priority` count for the predicted wait. One that would wait alone is rejected only if each of the
        last answers took too long: its wait shows how fast the engine is now.
        """
        if self._is_within_share(count, share):
            return
        self.check_count(count, now_s=now_s)
        limit = self.limits.max_tokens
        waiting = self.num_waiting_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise self._rejection(
                RejectionReason.MAX_QUEUE_TOKENS,
                f"prompts of {waiting} tokens are waiting; {num_tokens} more would exceed the limit, {limit}",
                remedy="try again later, or raise --max-queue-tokens",
                now_s=now_s,
            )
        max_wait_s = self.limits.max_wait_s
        if max_wait_s is None:
            return
        wait_s = self._predicted_wait_s(priority, now_s=now_s)
        if self._is_too_long(wait_s):
            raise self._rejection(
                RejectionReason.PREDICTED_WAIT,
                f"a request would wait about {wait_s:.0f} s now; the limit is {max_wait_s:g} s",
                remedy="try again later, or raise --max-queue-wait-s",
                now_s=now_s,
            )

    def _is_within_share(self, count: int, share: KeyShare) -> bool:
        """Whether other keys compete, and a key would hold at most its share of the capacity."""
        if self._weights.keys() <= {share.name}:
            return False
        others = sum(weight for name, weight in self._weights.items() if name != share.name)
        part = share.weight / (share.weight + others)
        return self._taken[share.name] + count <= part * self.capacity

    def num_free(self, *, now_s: float) -> int:
        """Return how many slots short prompts of the default priority get now; 0: `check` rejects one."""
        limit = self.limits.max_tokens
        if limit is not None and self.num_waiting_tokens >= limit:
            return 0
        if self._is_too_long(self._predicted_wait_s(0, now_s=now_s)):
            return 0
        return max(0, self.capacity - self.num_accepted - self.num_preparing)

    def seconds_per_slot(self, *, now_s: float) -> float | None:
        """Return the time in which a slot becomes free while requests wait; None: it is not known."""
        return self.prediction.seconds_per_slot(now_s)

    def check_count(self, count: int, *, now_s: float) -> None:
        """Raise Overloaded if `count` more slots exceed the capacity."""
        taken = self.num_accepted + self.num_preparing
        if taken + count > self.capacity:
            requests = "1 request is" if taken == 1 else f"{taken} requests are"
            raise self._rejection(
                RejectionReason.MAX_QUEUE,
                f"{requests} running or waiting; the limit is {self.capacity}",
                remedy="try again later, or raise --max-queue",
                now_s=now_s,
            )

    def timeout(self, *, now_s: float) -> Overloaded:
        """Return the error of a request that has waited for `max_wait_s`, and count it."""
        return self._rejection(
            RejectionReason.QUEUE_TIMEOUT,
            f"the request has waited for {self.limits.max_wait_s:g} s, which is the limit",
            remedy="try again later, or raise --max-queue-wait-s",
            now_s=now_s,
        )

    def _rejection(self, reason: RejectionReason, message: str, *, remedy: str, now_s: float) -> Overloaded:
        """Return the error of a rejected request, and count it."""
        name = reason.value
        self._metrics.rejected(name)
        seconds = self.seconds_per_slot(now_s=now_s)
        retry_after_s = self._retry_times.after_s(seconds, max_s=self.limits.max_wait_s, now_s=now_s)
        return Overloaded(message, retry_after_s=retry_after_s, remedy=remedy, reason=name)

    def _is_too_long(self, wait_s: float) -> bool:
        limit_s = self.limits.max_wait_s
        return limit_s is not None and wait_s > limit_s * _PREDICTED_SHARE

    def reserve(self, count: int, *, priority: int, share: KeyShare = NO_KEY) -> None:
        """Count slots of a request whose prompts are still to be prepared."""
        self._preparing[priority] += count
        self._take(count, share)

    def release(self, count: int, *, priority: int, share: KeyShare = NO_KEY) -> None:
        """Undo `reserve`."""
        _subtract(self._preparing, priority, count)
        self._give_back(count, share)

    def accept(self, num_seqs: int, *, share: KeyShare = NO_KEY) -> None:
        """Count an accepted request."""
        self.num_accepted += num_seqs
        self._take(num_seqs, share)

    def leave(self, num_seqs: int, *, share: KeyShare = NO_KEY) -> None:
        """Undo `accept`: the request has ended."""
        self.num_accepted -= num_seqs
        self._give_back(num_seqs, share)

    def _take(self, count: int, share: KeyShare) -> None:
        self._taken[share.name] += count
        self._weights[share.name] = share.weight

    def _give_back(self, count: int, share: KeyShare) -> None:
        _subtract(self._taken, share.name, count)
        if share.name not in self._taken:
            self._weights.pop(share.name, None)

    def wait(self, num_seqs: int, *, num_tokens: int, priority: int) -> None:
        """Count an accepted sequence that waits for its first step."""
        self.num_waiting_tokens += num_tokens
        self._waiting[priority] += num_seqs

    def start(self, num_seqs: int, *, num_tokens: int, priority: int) -> None:
        """Undo `wait`: the sequence had its first step, or ended before."""
        self.num_waiting_tokens -= num_tokens
        _subtract(self._waiting, priority, num_seqs)
        if not self._waiting - self.without_adapters:
            self.prediction.full = False  # if all requests have left, no step will record it

    def _predicted_wait_s(self, priority: int, *, now_s: float) -> float:
        waiting = self._waiting - self.without_adapters
        # Where blocks are short, free slots do not help.
        num_free = 0 if self.prediction.full else self._max_num_seqs - (self.num_accepted - self.num_waiting)
        num_ahead = waiting.total() + self.num_preparing
        if num_ahead < num_free:
            return 0.0
        if num_ahead == num_free:
            return self.prediction.shortest_wait_s(now_s=now_s)
        queue = [*waiting.items(), *self._preparing.items()]
        num_slots = sum(count for other, count in queue if other <= priority) + 1 - num_free
        return self.prediction.longest_wait_s(num_slots, now_s=now_s) if num_slots > 0 else 0.0


def _subtract(counter: Counter[T], key: T, count: int) -> None:
    counter[key] -= count
    if not counter[key]:
        del counter[key]
