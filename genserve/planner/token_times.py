"""Token times: when the tokens of simulated answers came, as counts by time."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

_BINS = 200     # per factor of e: a bin is half a percent wide


class TokenTimes:
    """Times to first tokens, each one, and times between tokens, in bins of half a percent."""

    def __init__(self) -> None:
        self._first_s = array("d")
        self._gaps: Counter[int] = Counter()

    def add_first(self, seconds: float) -> None:
        """Add the time from the arrival of a request to its first token."""
        self._first_s.append(seconds)

    def add_gap(self, seconds: float, count: int) -> None:
        """Add `count` equal times between two tokens of an answer."""
        self._gaps[_bin(seconds)] += count

    def add_gaps(self, first_s: float, last_s: float, count: int) -> None:
        """Add `count` times between two tokens, spread evenly from the first to the last."""
        if count == 1 or _bin(first_s) == _bin(last_s):
            self._gaps[_bin(first_s)] += count
            return
        middle_s, num_lower = (first_s + last_s) / 2, count // 2
        self.add_gaps(first_s, middle_s, num_lower)
        self.add_gaps(middle_s, last_s, count - num_lower)

    def merge(self, others: Iterable[TokenTimes]) -> None:
        """Add the times of others."""
        for other in others:
            self._first_s.extend(other._first_s)
            self._gaps.update(other._gaps)

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return len(self._first_s) + self._gaps.total()

    def first_s(self, rank: float) -> float:
        """Return a percentile of the times to the first token; NaN: there is none."""
        return float(np.percentile(self._first_s, rank)) if self._first_s else math.nan

    def gap_s(self, rank: float) -> float:
        """Return a percentile of the times between tokens; NaN: there is none."""
        if not self._gaps:
            return math.nan
        bins = sorted(self._gaps)
        reached = np.cumsum([self._gaps[index] for index in bins])
        index = int(np.searchsorted(reached, rank / 100 * reached[-1]))
        return math.exp((bins[min(index, len(bins) - 1)] + 0.5) / _BINS)


def _bin(seconds: float) -> int:
    return math.floor(math.log(seconds) * _BINS)
