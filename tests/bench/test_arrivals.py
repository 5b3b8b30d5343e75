"""When an open loop sends its requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.bench.load_plan import RampUp, arrival_times


def times(count: int, **options) -> np.ndarray:
    return np.array(arrival_times(count, **{"burstiness": 1.0, "rng": np.random.default_rng(0)} | options))


@given(
    count=st.integers(1, 50), rate=st.floats(0.1, 1e4), burstiness=st.sampled_from([0.1, 1.0, 5.0, np.inf])
)
def test_the_last_of_n_requests_arrives_after_n_intervals(count, rate, burstiness):
    arrivals = times(count, rate=rate, burstiness=burstiness)
    assert len(arrivals) == count
    assert (np.diff(arrivals) >= 0).all()
    assert arrivals[-1] == pytest.approx(count / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_intervals_have_the_moments_of_a_gamma_distribution(burstiness):
    intervals = np.diff(times(100_000, rate=20.0, burstiness=burstiness))
    assert intervals.mean() == pytest.approx(1 / 20, rel=0.01)
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.02)


def test_infinite_burstiness_is_a_fixed_interval():
    assert times(4, rate=2.0, burstiness=np.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_an_infinite_rate_sends_all_at_once():
    assert times(3, rate=np.inf).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 0.5 * (2 + 8)), ("exponential", (2 * 8) ** 0.5)])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy, middle):
    ramp = RampUp(strategy=strategy, start_rps=2.0, end_rps=8.0)
    arrivals = times(101, rate=ramp, burstiness=np.inf)
    intervals = np.diff(arrivals, prepend=0)
    assert 1 / intervals[[0, 50, 100]] == pytest.approx([2, middle, 8])
