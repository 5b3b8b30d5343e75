"""Admission control: whether a request may wait for an engine, and when one that may not should come back."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

from genserve.errors import Overloaded
from genserve.generation_metrics import GenerationMetrics

__all__ = ["AdmissionControl", "QueueLimits", "RejectionReason"]

_LONGEST_RETRY_AFTER_S = 60.0       # more than that the official clients do not wait
_SHORTEST_RETRY_AFTER_S = 0.1
# What a refused client is told before the engine has shown how fast it is.
_UNKNOWN_RETRY_AFTER_S = 1.0
# For so long after the engine was full, its speed is taken for what it still is.
_MEASUREMENT_LASTS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait for an engine, and for how long."""

    max_requests: int                   # beside those that run
    max_tokens: int | None = None       # of the prompts that wait for their first step; None: any number
    max_wait_s: float | None = None     # for the first step; None: for ever


class RejectionReason(StrEnum):
    """Why a request was refused; the label of `genserve_admission_rejections_total`."""

    MAX_QUEUE = "max_queue"
    MAX_QUEUE_TOKENS = "max_queue_tokens"
    PREDICTED_WAIT = "predicted_wait"   # refused at once, since it would wait too long
    QUEUE_TIMEOUT = "queue_timeout"     # has in fact waited too long


class AdmissionControl:
    """Counts what waits for one engine, measures its throughput, and refuses what is too much.

    Its caller holds a lock; times are those of the engine's clock.

    Throughput is measured only while the engine is *full*, that is, from the moment a request finds no free
    place or blocks until the queue is empty: step time divided by the number of places that were taken. Free
    places are about to be taken by what waits, so that nobody is refused for it, and light load does not
    show how fast the engine can be.

    Attributes:
        limits: what is held to.
        num_accepted: places that those need who have not ended, so many beams for a beam search.
        num_tokens: of the prompts that wait for their first step.
    """

    def __init__(self, *, max_num_seqs: int, limits: QueueLimits, metrics: GenerationMetrics) -> None:
        self.limits = limits
        self.num_accepted = 0
        self.num_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics
        # Places, by priority.
        self._preparing: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()
        self._full = False
        self._full_s = 0.0                          # total time the engine has been full
        self._last_full_s = 0.0                     # when it was last
        # `_full_s` at each start. Answers of one length end together, so one round of them is too few.
        self._started_s: deque[float] = deque([0.0], maxlen=4 * max_num_seqs + 1)
        self._promised_s = 0.0                      # when the last one that was refused should be back

    @property
    def capacity(self) -> int:
        """How many may run, wait and be prepared together."""
        return self._max_num_seqs + self.limits.max_requests

    @property
    def num_preparing(self) -> int:
        """Places of those whose prompts are being prepared."""
        return self._preparing.total()

    def check(self, count: int, *, num_tokens: int, priority: int, now_s: float) -> None:
        """Raise Overloaded if so many, with so many prompt tokens together, may not wait now.

        The limits on requests and tokens are for all that wait, the one on time for those in front of a
        request of this priority. A prompt that is longer than all that may wait is taken when none waits,
        and no prediction refuses a request that would be the only one to wait: how long it does shows how
        fast the engine is now.
        """
        self.check_count(count, now_s=now_s)
        limit = self.limits.max_tokens
        if limit is not None and self.num_tokens and self.num_tokens + num_tokens > limit:
            raise self.rejection(
                RejectionReason.MAX_QUEUE_TOKENS,
                f"prompts of {self.num_tokens} tokens are waiting; with {num_tokens} more there would be "
                f"more than the limit, {limit}",
                remedy="try again later, or raise --max-queue-tokens",
                now_s=now_s,
            )
        wait_s = self._predicted_wait_s(priority, now_s=now_s)
        if self.limits.max_wait_s is not None and wait_s > self.limits.max_wait_s:
            raise self.rejection(
                RejectionReason.PREDICTED_WAIT,
                f"a request would wait about {wait_s:.0f} s now; the limit is {self.limits.max_wait_s:g} s",
                remedy="try again later, or raise --max-queue-wait-s",
                now_s=now_s,
            )

    def check_count(self, count: int, *, now_s: float) -> None:
        """Raise Overloaded if so many may not wait now, whatever they are."""
        taken = self.num_accepted + self.num_preparing
        if taken + count > self.capacity:
            requests = "1 request is" if taken == 1 else f"{taken} requests are"
            raise self.rejection(
                RejectionReason.MAX_QUEUE,
                f"{requests} running or waiting; the limit is {self.capacity}",
                remedy="try again later, or raise --max-queue",
                now_s=now_s,
            )

    def rejection(self, reason: RejectionReason, message: str, *, remedy: str, now_s: float) -> Overloaded:
        """Return the error of a request that is refused, and count it.

        Those that are refused are told to come back one after the other, twice as fast as places become free,
        and before all that may wait has been served: however wrong the guess is, the line does not run dry.
        """
        self._metrics.rejected(reason.value)
        seconds = self._seconds_per_place(now_s) or _UNKNOWN_RETRY_AFTER_S
        longest_s = min(self.limits.max_wait_s or _LONGEST_RETRY_AFTER_S, _LONGEST_RETRY_AFTER_S)
        self._promised_s = min(max(now_s, self._promised_s) + seconds / 2, now_s + longest_s)
        retry_after_s = max(_SHORTEST_RETRY_AFTER_S, self._promised_s - now_s)
        return Overloaded(message, retry_after_s=retry_after_s, remedy=remedy)

    def reserve(self, count: int, *, priority: int) -> None:
        """Count places of a request whose prompts are still to be prepared."""
        self._preparing[priority] += count

    def release(self, count: int, *, priority: int) -> None:
        """Take back what `reserve` counted."""
        _subtract(self._preparing, priority, count)

    def accept(self, num_seqs: int) -> None:
        """Count what may run now, or wait."""
        self.num_accepted += num_seqs

    def leave(self, num_seqs: int) -> None:
        """Take back what `accept` counted: it has ended."""
        self.num_accepted -= num_seqs

    def wait(self, num_seqs: int, *, num_tokens: int, priority: int) -> None:
        """Count one that was accepted among those that wait for their first step."""
        self.num_tokens += num_tokens
        self._waiting[priority] += num_seqs

    def start(self, num_seqs: int, *, num_tokens: int, priority: int) -> None:
        """Take back what `wait` counted: it has begun, or it ended before."""
        self.num_tokens -= num_tokens
        _subtract(self._waiting, priority, num_seqs)
        if not self._waiting:
            self._full = False  # all may have left, and then there is no step to say so

    def note_step(
        self, seconds: float, *, num_started: int, full: bool, num_waiting: int, now_s: float
    ) -> None:
        """Note how long a step took, what began with it, and how many waited then.

        Args:
            seconds: that it took.
            num_started: places of those that had their first step, as `wait` counted them.
            full: the first of those that waited found no place, or too few blocks.
            num_waiting: how many waited.
            now_s: when it ended.
        """
        was_full = self._full
        self._full = full or (was_full and num_waiting > 0)
        if self._full or was_full:  # the step that empties the queue is the last of a full engine
            self._forget_if_outdated(now_s - seconds)
            self._full_s += seconds
            self._last_full_s = now_s
            self._started_s.extend([self._full_s] * num_started)

    def _predicted_wait_s(self, priority: int, *, now_s: float) -> float:
        seconds = self._seconds_per_place(now_s)
        num_waiting = self._waiting.total()
        # Where blocks are short, free places are no help.
        num_free = 0 if self._full else self._max_num_seqs - (self.num_accepted - num_waiting)
        if seconds is None or num_waiting + self.num_preparing <= num_free:
            return 0.0
        line = [*self._waiting.items(), *self._preparing.items()]
        ahead = sum(count for other, count in line if other <= priority)
        return max(0, ahead + 1 - num_free) * seconds

    def _seconds_per_place(self, now_s: float) -> float | None:
        """Return how long the line of a full engine takes to get on by one; None: not known now."""
        num_started = len(self._started_s) - 1
        if num_started < self._max_num_seqs or self._is_outdated(now_s):
            return None
        return (self._full_s - self._started_s[0]) / num_started

    def _forget_if_outdated(self, now_s: float) -> None:
        if self._is_outdated(now_s):
            self._started_s.clear()
            self._started_s.append(self._full_s)

    def _is_outdated(self, now_s: float) -> bool:
        return now_s - self._last_full_s > _MEASUREMENT_LASTS_S


def _subtract(counter: Counter[int], priority: int, count: int) -> None:
    counter[priority] -= count
    if not counter[priority]:
        del counter[priority]
