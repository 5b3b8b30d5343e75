"""Load plan: the loads that a benchmark consists of, and when an open loop sends its requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

_DEFAULT_CONCURRENCIES = (1, 8, 32)
_WAVES = 4                  # by default, the number of prompts for each concurrent request
_OPEN_LOOP_PROMPTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RampUp:
    """A request rate that changes from the first request to the last, in requests per second."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One load: a closed loop with an infinite rate, or else an open loop."""

    concurrency: int | None     # None: no limit
    rate: float | RampUp        # requests per second
    num_prompts: int | None     # None: as many as fit into the duration

    @property
    def title(self) -> str:
        """The name of the load, such as "8 at once, 2.5 requests/s"."""
        parts = [f"{self.concurrency} at once"] if self.concurrency else []
        if isinstance(self.rate, RampUp):
            parts.append(f"{self.rate.start_rps:g} to {self.rate.end_rps:g} requests/s")
        elif not self.is_closed_loop:
            parts.append(f"{self.rate:g} requests/s")
        return ", ".join(parts) or "all at once"

    @property
    def is_closed_loop(self) -> bool:
        """Whether each request is sent as soon as a previous one ends."""
        return not isinstance(self.rate, RampUp) and math.isinf(self.rate)

    def arrivals_s(self, *, burstiness: float, seed: Sequence[int]) -> Iterator[float]:
        """Return when each request is due, in seconds since the start; in a closed loop, at once."""
        if self.is_closed_loop:
            return itertools.repeat(0.0, self.num_prompts) if self.num_prompts else itertools.repeat(0.0)
        assert self.num_prompts is not None
        rng = np.random.default_rng(seed)
        return iter(arrival_times(self.num_prompts, rate=self.rate, burstiness=burstiness, rng=rng))

    def as_json(self) -> dict[str, Any]:
        """Return the plan with the names of vLLM's result files."""
        if isinstance(self.rate, RampUp):
            rate: dict[str, Any] = {
                "ramp_up_strategy": self.rate.strategy,
                "ramp_up_start_rps": self.rate.start_rps,
                "ramp_up_end_rps": self.rate.end_rps,
            }
        else:
            rate = {"request_rate": "inf" if self.is_closed_loop else self.rate}
        return {"max_concurrency": self.concurrency, **rate}


def make_plans(
    *,
    rates: Sequence[float | RampUp],
    concurrencies: Sequence[int] | None,
    num_prompts: int | None,
    duration_s: float | None,
) -> list[LoadPlan]:
    """Return a plan for each rate and concurrency."""
    plans = []
    for rate in rates:
        default: Sequence[int | None] = _DEFAULT_CONCURRENCIES if rate == math.inf else [None]
        for concurrency in concurrencies or default:
            count = num_prompts or _default_count(rate, concurrency, duration_s)
            plans.append(LoadPlan(concurrency=concurrency, rate=rate, num_prompts=count))
    return plans


def _default_count(rate: float | RampUp, concurrency: int | None, duration_s: float | None) -> int | None:
    if rate == math.inf:
        return None if duration_s else _WAVES * (concurrency or 1)
    if isinstance(rate, RampUp) or not duration_s:
        return _OPEN_LOOP_PROMPTS
    return math.ceil(rate * duration_s)


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
