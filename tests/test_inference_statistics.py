from __future__ import annotations

import bisect
import math

from hypothesis import given
from hypothesis import strategies as st

from genserve.inference_statistics import LatencyHistogram


@given(st.lists(st.integers(1, 100), unique=True).map(sorted), st.lists(st.integers(0, 120), max_size=20))
def test_a_bucket_counts_all_durations_up_to_its_bound(bounds_ms: list[int], durations_ms: list[int]) -> None:
    histogram = LatencyHistogram(bounds_ms)
    for duration_ms in durations_ms:
        histogram.observe(duration_ms * 1_000_000)
    buckets, sum_ms = histogram.read()
    in_order = sorted(durations_ms)
    assert buckets == [(bound, bisect.bisect_right(in_order, bound)) for bound in (*bounds_ms, math.inf)]
    assert sum_ms == sum(durations_ms)
