"""Arrivals: when an open loop sends its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class RampUp:
    """A request rate that changes from the first request to the last, in requests per second."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float


def arrival_times(
    count: int, *, rate: float | RampUp, burstiness: float, rng: np.random.Generator
) -> Sequence[float]:
    """Return the times at which `count` requests arrive, in seconds since the start.

    The intervals are drawn as in `vllm bench serve`: from a gamma distribution with the shape `burstiness`
    and the mean 1 / rate. 1 is a Poisson process, less is burstier, more is more regular, infinity is a fixed
    interval. With a constant rate the times are scaled so that the last one is count / rate, which keeps the
    noise of the draw out of the rate.

    Args:
        count: the number of requests.
        rate: requests per second; infinity: all arrive at once.
        burstiness: more than 0.
        rng: draws the intervals.
    """
    rates = _ramp(rate, count) if isinstance(rate, RampUp) else np.full(count, rate)
    means = 1 / rates
    intervals = means if np.isinf(burstiness) else rng.gamma(burstiness, means / burstiness)
    times = np.cumsum(intervals)
    if not isinstance(rate, RampUp) and count and times[-1] > 0:
        times *= count / rate / times[-1]
    return [float(time) for time in times]


def _ramp(ramp: RampUp, count: int) -> np.ndarray:
    if ramp.strategy == "linear":
        return np.linspace(ramp.start_rps, ramp.end_rps, count)
    return np.geomspace(ramp.start_rps, ramp.end_rps, count)
