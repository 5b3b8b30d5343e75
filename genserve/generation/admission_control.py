"""Admission control: accepts or rejects requests for an engine; a rejection has a time to retry."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from genserve.errors import Overloaded
from genserve.generation_metrics import GenerationMetrics

_MEASUREMENT_LASTS_S = 60.0     # what an engine did counts as known for this time after it was full


class WaitPrediction:
    """Measures when the places of one engine become free.

    A *place* is a row of a forward, for one sequence or beam. Its caller holds a lock; times are those of the
    engine's clock. The engine is measured only while it is *full*: from the moment a request finds no free
    place or blocks until the queue is empty. Under light load, places are free, and the measurement would not
    show how fast the engine can be. Until it is known, it is estimated from how long the last requests held
    their places.

    Attributes:
        full: whether the engine is.
    """

    def __init__(self, *, max_num_seqs: int) -> None:
        self.full = False
        self._max_num_seqs = max_num_seqs
        self._full_s = 0.0                          # total time the engine has been full
        self._last_full_s = 0.0                     # when it was full last
        # `_full_s` at each start. Answers of one length end together, so one round of them is too few.
        self._started_s: deque[float] = deque([0.0], maxlen=4 * max_num_seqs + 1)
        self._times_s: NDArray[np.float64] | None = None    # these and `_full_s`, since the last step
        self._began_s: deque[float] = deque(maxlen=max_num_seqs)    # the last sequences, full or not
        self._held_s: deque[float] = deque(maxlen=max_num_seqs)     # by the places that were freed last
        self._last_end_s = 0.0                      # when the last of them was freed

    def note_end(self, seconds: float, *, now_s: float) -> None:
        """Note how long a sequence that has ended held its place."""
        self._held_s.append(seconds)
        self._last_end_s = now_s

    def note_step(
        self, seconds: float, *, num_started: int, full: bool, num_waiting: int, now_s: float
    ) -> None:
        """Note a step.

        Args:
            seconds: how long it took.
            num_started: places of the sequences that had their first step.
            full: whether the first waiting request found no place, or too few blocks.
            num_waiting: requests in the scheduler's queue.
            now_s: when it ended.
        """
        self._began_s.extend([now_s] * num_started)
        was_full = self.full
        self.full = full or (was_full and num_waiting > 0)
        if self.full or was_full:  # the step that empties the queue is the last of a full engine
            self._forget_if_outdated(now_s - seconds)
            self._full_s += seconds
            self._last_full_s = now_s
            self._started_s.extend([self._full_s] * num_started)
            self._times_s = None

    def seconds_per_place(self, now_s: float) -> float | None:
        """Return how long a full engine takes to free one place, on average; None: not known now."""
        if self._is_measured(now_s):
            return (self._full_s - self._started_s[0]) / (len(self._started_s) - 1)
        # Steps with few sequences are faster, so this promises rather too much: it rejects too few.
        held_s = self._mean_held_s(now_s)
        return None if held_s is None else held_s / self._max_num_seqs

    def longest_wait_s(self, num_places: int, *, now_s: float) -> float:
        """Return how long it may take until this many places are free; 0 if it is not known now.

        Places do not become free evenly: answers of one length that began together end together. Of 36
        requests that wait for 32 places, four then wait for two rounds of answers, although by the average
        they would wait for little more than one. This is therefore the longest time that as many starts have
        taken. Those of several rounds are added up, because few rounds are known.
        """
        rounds, rest = divmod(num_places, self._max_num_seqs)
        if self._is_measured(now_s):
            return rounds * self._longest_s(self._max_num_seqs) + self._longest_s(rest)
        return self._estimated_wait_s(num_places, now_s=now_s)

    def shortest_wait_s(self, *, now_s: float) -> float:
        """Return how long it takes until one place is free if all answers are as short as one of the last."""
        if not self._began_s or self._mean_held_s(now_s) is None:
            return 0.0
        return max(0.0, self._began_s[0] + min(self._held_s) - now_s)

    def _estimated_wait_s(self, num_places: int, *, now_s: float) -> float:
        """Return what `longest_wait_s` is if all answers take as long as the last ones on average."""
        held_s = self._mean_held_s(now_s)
        if held_s is None:
            return 0.0
        rounds, place = divmod(num_places - 1, self._max_num_seqs)
        began_s = self._began_s[place] if place < len(self._began_s) else now_s
        return max(0.0, began_s + held_s - now_s) + rounds * held_s

    def _longest_s(self, num_starts: int) -> float:
        """Return the longest time between a start and the `num_starts`-th one after it, or now."""
        if self._times_s is None:   # many requests may ask between two steps
            self._times_s = np.array([*self._started_s, self._full_s])
        times_s = self._times_s
        return float((times_s[num_starts:] - times_s[: len(times_s) - num_starts]).max())

    def _is_measured(self, now_s: float) -> bool:
        # More than one round: the first pause began before the engine was full.
        num_started = len(self._started_s) - 1
        return num_started > self._max_num_seqs and now_s - self._last_full_s <= _MEASUREMENT_LASTS_S

    def _mean_held_s(self, now_s: float) -> float | None:
        if self._held_s and now_s - self._last_end_s <= _MEASUREMENT_LASTS_S:
            return sum(self._held_s) / len(self._held_s)
        return None

    def _forget_if_outdated(self, now_s: float) -> None:
        if now_s - self._last_full_s > _MEASUREMENT_LASTS_S:
            self._started_s.clear()
            self._started_s.append(self._full_s)


_MAX_RETRY_AFTER_S = 60.0       # the official clients do not wait longer
_MIN_RETRY_AFTER_S = 0.1
_UNKNOWN_RETRY_AFTER_S = 1.0    # as long as the throughput is not known
# The share of the longest wait that a request may be predicted to wait. An engine that shares its cores with
# a flood of requests becomes a quarter slower, and to time out in the queue is worse than to be rejected.
_PREDICTED_SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How many requests may wait for an engine, and how long."""

    max_requests: int                   # in addition to the running ones
    max_tokens: int | None = None       # of the prompts that wait for their first step; None: no limit
    max_wait_s: float | None = None     # for the first step; None: no limit


class RejectionReason(StrEnum):
    """Why a request was rejected; the label of `genserve_admission_rejections_total`."""

    MAX_QUEUE = "max_queue"
    MAX_QUEUE_TOKENS = "max_queue_tokens"
    PREDICTED_WAIT = "predicted_wait"   # on arrival, because it would wait too long
    QUEUE_TIMEOUT = "queue_timeout"     # later, because it has waited too long


class AdmissionControl:
    """Counts the requests that wait for one engine, has their wait predicted, and applies the limits.

    Its caller holds a lock; times are those of the engine's clock. Requests are counted by the *places* that
    they need in a forward, one for each sequence or beam.

    Attributes:
        limits: of the queue.
        num_accepted: places of all requests that have not ended.
        num_tokens: of the prompts that wait for their first step.
    """

    def __init__(self, *, max_num_seqs: int, limits: QueueLimits, metrics: GenerationMetrics) -> None:
        self.limits = limits
        self.num_accepted = 0
        self.num_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics
        for reason in RejectionReason:      # or a rate would miss the first rejection
            metrics.rejected(reason.value, count=0)
        # Places, by priority.
        self._preparing: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()
        self._prediction = WaitPrediction(max_num_seqs=max_num_seqs)
        self._retry_at_s = 0.0                      # when the last rejected request should be retried

    @property
    def capacity(self) -> int:
        """How many may run, wait and be prepared together."""
        return self._max_num_seqs + self.limits.max_requests

    @property
    def num_preparing(self) -> int:
        """Places of requests whose prompts are being prepared."""
        return self._preparing.total()

    def check(self, count: int, *, num_tokens: int, priority: int, now_s: float) -> None:
        """Raise Overloaded if a request for `count` places may not wait now.

        A prompt that is longer than the limit is accepted while no other prompt waits. Only requests in front
        of `priority` count for the predicted wait. One that would wait alone is rejected only if each of the
        last answers took too long: its wait shows how fast the engine is now.
        """
        self.check_count(count, now_s=now_s)
        limit = self.limits.max_tokens
        if limit is not None and self.num_tokens and self.num_tokens + num_tokens > limit:
            raise self._rejection(
                RejectionReason.MAX_QUEUE_TOKENS,
                f"prompts of {self.num_tokens} tokens are waiting; {num_tokens} more would exceed the limit, "
                f"{limit}",
                remedy="try again later, or raise --max-queue-tokens",
                now_s=now_s,
            )
        wait_s = self._predicted_wait_s(priority, now_s=now_s)
        max_wait_s = self.limits.max_wait_s
        if max_wait_s is not None and wait_s > max_wait_s * _PREDICTED_SHARE:
            raise self._rejection(
                RejectionReason.PREDICTED_WAIT,
                f"a request would wait about {wait_s:.0f} s now; the limit is {max_wait_s:g} s",
                remedy="try again later, or raise --max-queue-wait-s",
                now_s=now_s,
            )

    def check_count(self, count: int, *, now_s: float) -> None:
        """Raise Overloaded if `count` more places exceed the capacity."""
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
        """Return the error of a rejected request, and count it.

        Rejected requests get increasing retry times half as far apart as places become free, and no later
        than the longest wait in the queue. So the queue does not run empty even if the estimate is wrong.
        """
        self._metrics.rejected(reason.value)
        seconds = self._prediction.seconds_per_place(now_s) or _UNKNOWN_RETRY_AFTER_S
        max_s = min(self.limits.max_wait_s or _MAX_RETRY_AFTER_S, _MAX_RETRY_AFTER_S)
        self._retry_at_s = min(max(now_s, self._retry_at_s) + seconds / 2, now_s + max_s)
        retry_after_s = max(_MIN_RETRY_AFTER_S, self._retry_at_s - now_s)
        return Overloaded(message, retry_after_s=retry_after_s, remedy=remedy)

    def reserve(self, count: int, *, priority: int) -> None:
        """Count places of a request whose prompts are still to be prepared."""
        self._preparing[priority] += count

    def release(self, count: int, *, priority: int) -> None:
        """Undo `reserve`."""
        _subtract(self._preparing, priority, count)

    def accept(self, num_seqs: int) -> None:
        """Count an accepted request."""
        self.num_accepted += num_seqs

    def leave(self, num_seqs: int) -> None:
        """Undo `accept`: the request has ended."""
        self.num_accepted -= num_seqs

    def note_end(self, seconds: float, *, now_s: float) -> None:
        """Note how long a sequence that has ended held its place."""
        self._prediction.note_end(seconds, now_s=now_s)

    def wait(self, num_seqs: int, *, num_tokens: int, priority: int) -> None:
        """Count an accepted sequence that waits for its first step."""
        self.num_tokens += num_tokens
        self._waiting[priority] += num_seqs

    def start(self, num_seqs: int, *, num_tokens: int, priority: int) -> None:
        """Undo `wait`: the sequence had its first step, or ended before."""
        self.num_tokens -= num_tokens
        _subtract(self._waiting, priority, num_seqs)
        if not self._waiting:
            self._prediction.full = False   # if all requests have left, no step will note it

    def note_step(
        self, seconds: float, *, num_started: int, full: bool, num_waiting: int, now_s: float
    ) -> None:
        """See `WaitPrediction.note_step`; `num_started` counts places as `wait` counted them."""
        self._prediction.note_step(
            seconds, num_started=num_started, full=full, num_waiting=num_waiting, now_s=now_s
        )

    def _predicted_wait_s(self, priority: int, *, now_s: float) -> float:
        num_waiting = self._waiting.total()
        # Where blocks are short, free places do not help.
        num_free = 0 if self._prediction.full else self._max_num_seqs - (self.num_accepted - num_waiting)
        num_ahead = num_waiting + self.num_preparing
        if num_ahead < num_free:
            return 0.0
        if num_ahead == num_free:
            return self._prediction.shortest_wait_s(now_s=now_s)
        queue = [*self._waiting.items(), *self._preparing.items()]
        num_places = sum(count for other, count in queue if other <= priority) + 1 - num_free
        return self._prediction.longest_wait_s(num_places, now_s=now_s) if num_places > 0 else 0.0


def _subtract(counter: Counter[int], priority: int, count: int) -> None:
    counter[priority] -= count
    if not counter[priority]:
        del counter[priority]
