"""Growth: samples the memory, descriptors and threads of a server, and judges whether they grow.

Only the second half of a run counts: caches fill up and the allocator settles in the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MIB = 2**20
INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of a process at one time."""

    at_s: float
    memory_mib: float       # resident anonymous memory, without pages of files
    fds: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a quantity changes over the second half of a run."""

    per_minute: float       # the median slope between all pairs of samples (Theil and Sen)
    low: float              # lower end of the 95 % confidence interval
    high: float
    minutes: float


def sample(pid: int) -> Sample:
    """Sample a process; Linux only."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return Sample(
        at_s=time.monotonic(),
        memory_mib=int(status["RssAnon"].split()[0]) * 1024 / _MIB,
        fds=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        threads=int(status["Threads"]),
    )


async def watch(pid: int, samples: list[Sample]) -> None:
    """Append a sample each second, until the task is cancelled."""
    while True:
        samples.append(sample(pid))
        await asyncio.sleep(INTERVAL_S)


def trend(times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """Fit the second half of a run.

    The samples are averaged in 30 groups, as neighbouring samples are not independent. The interval follows
    Sen (1968), from the variance of Kendall's S.
    """
    times, heights = np.asarray(times_s) / 60, np.asarray(values, dtype=float)
    later = times >= (times[0] + times[-1]) / 2
    groups = min(30, int(later.sum()))
    x = np.array([part.mean() for part in np.array_split(times[later], groups)])
    y = np.array([part.mean() for part in np.array_split(heights[later], groups)])
    first, second = np.triu_indices(groups, k=1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    spread = 1.96 * np.sqrt(groups * (groups - 1) * (2 * groups + 5) / 18)
    low = int(max(0, np.floor((len(slopes) - spread) / 2)))
    high = int(min(len(slopes) - 1, np.ceil((len(slopes) + spread) / 2)))
    return Trend(
        per_minute=float(np.median(slopes)),
        low=float(slopes[low]),
        high=float(slopes[high]),
        minutes=float(x[-1] - x[0]),
    )


def memory_trend(samples: Sequence[Sample]) -> Trend:
    """Return the trend of the memory, MiB."""
    return trend([one.at_s for one in samples], [one.memory_mib for one in samples])


def is_leak(memory: Trend, *, limit_mib_per_minute: float) -> bool:
    """Whether memory certainly grows, and by more than the limit."""
    return memory.low > 0 and memory.per_minute > limit_mib_per_minute
