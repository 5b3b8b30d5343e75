"""Bench plans: the loads that the flags of `genserve bench` ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from genserve.bench.arrivals import RampUp

_DEFAULT_CONCURRENCIES = (1, 8, 32)
_WAVES = 4                  # by default, requests for each one at once
_OPEN_LOOP_PROMPTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One load: a closed loop with an infinite rate, or else an open loop."""

    concurrency: int | None     # None: no limit
    rate: float | RampUp        # requests per second
    num_prompts: int | None     # None: as many as fit into the duration

    @property
    def title(self) -> str:
        """Its name, such as "8 at once, 2.5 requests/s"."""
        parts = [f"{self.concurrency} at once"] if self.concurrency else []
        if isinstance(self.rate, RampUp):
            parts.append(f"{self.rate.start_rps:g} to {self.rate.end_rps:g} requests/s")
        elif not self.is_closed_loop:
            parts.append(f"{self.rate:g} requests/s")
        return ", ".join(parts) or "all at once"

    @property
    def is_closed_loop(self) -> bool:
        """Whether requests are sent as soon as places are free."""
        return not isinstance(self.rate, RampUp) and math.isinf(self.rate)

    def as_json(self) -> dict[str, Any]:
        """Return it by the names of vLLM's result files."""
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
) -> list[Plan]:
    """Return a plan for each rate and concurrency."""
    plans = []
    for rate in rates:
        default: Sequence[int | None] = _DEFAULT_CONCURRENCIES if rate == math.inf else [None]
        for concurrency in concurrencies or default:
            count = num_prompts or _default_count(rate, concurrency, duration_s)
            plans.append(Plan(concurrency=concurrency, rate=rate, num_prompts=count))
    return plans


def _default_count(rate: float | RampUp, concurrency: int | None, duration_s: float | None) -> int | None:
    if rate == math.inf:
        return None if duration_s else _WAVES * (concurrency or 1)
    if isinstance(rate, RampUp) or not duration_s:
        return _OPEN_LOOP_PROMPTS
    return math.ceil(rate * duration_s)
