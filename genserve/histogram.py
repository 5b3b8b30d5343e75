"""Histogram: counts values by bucket, many equal values at once."""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """A cumulative histogram; safe from any thread.

    Attributes:
        bounds: the upper bounds of the buckets, without infinity.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        """Make an empty histogram; `bounds` has the upper bounds of the buckets, ascending."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, *, count: int = 1) -> None:
        """Count a value `count` times."""
        bucket = bisect_left(self.bounds, value)
        with self._lock:
            self._counts[bucket] += count
            self._sum += value * count

    def __getstate__(self) -> tuple[tuple[float, ...], list[int], float]:
        """Return a copy of the counts, for another process."""
        with self._lock:
            return self.bounds, self._counts.copy(), self._sum

    def __setstate__(self, state: tuple[tuple[float, ...], list[int], float]) -> None:
        self.bounds, self._counts, self._sum = state
        self._lock = threading.Lock()

    def add(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same bounds."""
        with self._lock:
            self._counts = [ours + theirs for ours, theirs in zip(self._counts, other._counts, strict=True)]
            self._sum += other._sum

    def read(self) -> tuple[list[tuple[float, int]], float]:
        """Return (bound, number of values up to it) for each bound and infinity, and the sum of values."""
        with self._lock:
            counts, total = itertools.accumulate(self._counts), self._sum
            return list(zip((*self.bounds, math.inf), counts, strict=True)), total
