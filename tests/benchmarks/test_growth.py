"""The judge of memory growth: it must notice a leak, and must not mistake warming up or noise for one."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.growth import is_leak, trend

SECONDS = np.arange(0.0, 600.0)


def noise(seed: int) -> np.ndarray:
    """Return noise like an allocator's, in steps that last for a while."""
    return np.repeat(np.random.default_rng(seed).normal(0, 2.0, len(SECONDS) // 20), 20)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_noticed(seed: int) -> None:
    memory = 500 + 2.0 / 60 * SECONDS + noise(seed)
    found = trend(SECONDS, memory)
    assert found.per_minute == pytest.approx(2.0, abs=1.0)
    assert is_leak(found, limit_mib_per_minute=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_memory_that_fills_up_and_then_stays_is_no_leak(seed: int) -> None:
    memory = 500 * (1 - np.exp(-SECONDS / 30)) + noise(seed)
    assert not is_leak(trend(SECONDS, memory), limit_mib_per_minute=0.5)
