from __future__ import annotations

import bisect
import math

from hypothesis import given
from hypothesis import strategies as st

from genserve.histogram import Histogram


@given(
    st.lists(st.integers(1, 100), unique=True).map(sorted),
    st.lists(st.tuples(st.integers(0, 120), st.integers(1, 5)), max_size=20),
)
def test_a_bucket_counts_all_values_up_to_its_bound(
    bounds: list[int], observed: list[tuple[int, int]]
) -> None:
    histogram = Histogram(bounds)
    for value, count in observed:
        histogram.observe(value, count=count)
    buckets, total = histogram.read()
    values = sorted(value for value, count in observed for _ in range(count))
    assert buckets == [(bound, bisect.bisect_right(values, bound)) for bound in (*bounds, math.inf)]
    assert total == sum(values)
