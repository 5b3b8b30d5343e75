"""Wait prediction: how long a request would wait for a slot of an engine."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_MEASUREMENT_LASTS_S = 60.0  # what an engine did counts as known for this time after it was full


class WaitPrediction:
    """Measures when the slots of one engine become free.

    A *slot* is a row of a forward, for one sequence or beam. Its caller holds a lock; times are by the
    engine's clock. The engine is measured only while it is *full*: from the moment a request finds no free
    slot or blocks until the queue is empty. Under light load, slots are free, and the measurement would not
    show how fast the engine can be. Until it is known, it is estimated from how long the last requests held
    their slots.

    Attributes:
        full: whether the engine is full.
    """

    def __init__(self, *, max_num_seqs: int) -> None:
        self.full = False
        self._max_num_seqs = max_num_seqs
        self._full_s = 0.0  # total time the engine has been full
        self._last_full_s = 0.0  # when it was full last
        # `_full_s` at each start. Answers of one length end together, so one round of them is too few.
        self._started_s: deque[float] = deque([0.0], maxlen=4 * max_num_seqs + 1)
        self._times_s: NDArray[np.float64] | None = None  # `_started_s` and `_full_s`, since the last step
        self._began_s: deque[float] = deque(maxlen=max_num_seqs)  # the last sequences, full or not
        self._held_s: deque[float] = deque(maxlen=max_num_seqs)  # by the last sequences to end
        self._last_end_s = 0.0  # when the last of them was freed

    def record_end(self, seconds: float, *, now_s: float) -> None:
        """Record how long a sequence that has ended held its slot."""
        self._held_s.append(seconds)
        self._last_end_s = now_s

    def record_step(
        self, seconds: float, *, num_started: int, full: bool, num_waiting: int, now_s: float
    ) -> None:
        """Record a step.

        Args:
            seconds: the duration of the step.
            num_started: slots of the sequences that had their first step.
            full: whether the first waiting request found no slot, or too few blocks.
            num_waiting: requests that wait for blocks and a slot.
            now_s: when the step ended.
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

    def seconds_per_slot(self, now_s: float) -> float | None:
        """Return how long a full engine takes to free one slot, on average; None: not known now."""
        if self._is_measured(now_s):
            return (self._full_s - self._started_s[0]) / (len(self._started_s) - 1)
        # Steps with few sequences are faster, so this promises rather too much: it rejects too few.
        held_s = self._mean_held_s(now_s)
        return None if held_s is None else held_s / self._max_num_seqs

    def longest_wait_s(self, num_slots: int, *, now_s: float) -> float:
        """Return how long it may take until this many slots are free; 0 if it is not known now.

        Slots do not become free evenly: answers of one length that began together end together. If 36
        requests wait for 32 slots, four of them wait for two rounds of answers, although by the average
        they would wait for little more than one. The result is therefore the longest time that as many
        starts have taken. The times of several rounds are added up, because few rounds are known.
        """
        rounds, rest = divmod(num_slots, self._max_num_seqs)
        if self._is_measured(now_s):
            return rounds * self._longest_s(self._max_num_seqs) + self._longest_s(rest)
        return self._estimated_wait_s(num_slots, now_s=now_s)

    def shortest_wait_s(self, *, now_s: float) -> float:
        """Return how long it takes until one slot is free if all answers are as short as a recent one."""
        if not self._began_s or self._mean_held_s(now_s) is None:
            return 0.0
        return max(0.0, self._began_s[0] + min(self._held_s) - now_s)

    def _estimated_wait_s(self, num_slots: int, *, now_s: float) -> float:
        """Return what `longest_wait_s` is if all answers take as long as the last ones on average."""
        held_s = self._mean_held_s(now_s)
        if held_s is None:
            return 0.0
        rounds, slot = divmod(num_slots - 1, self._max_num_seqs)
        began_s = self._began_s[slot] if slot < len(self._began_s) else now_s
        return max(0.0, began_s + held_s - now_s) + rounds * held_s

    def _longest_s(self, num_starts: int) -> float:
        """Return the longest time between a start and the `num_starts`-th one after it, or now."""
        if self._times_s is None:  # many requests may ask between two steps
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
