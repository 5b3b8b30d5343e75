"""Detection of repetitions against a search that looks at every pattern."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genserve.sampling.repetition_detection import RepetitionDetection

sizes = st.integers(1, 5)


def is_met_by_trying_all(token_ids: list[int], detection: RepetitionDetection) -> bool:
    """vLLM's algorithm: compare the end of the tokens with each pattern, repeated."""
    patterns = (
        token_ids[-size:] * detection.min_count
        for size in range(detection.min_pattern_size, detection.max_pattern_size + 1)
        if size * detection.min_count <= len(token_ids)
    )
    return any(token_ids[-len(pattern) :] == pattern for pattern in patterns)


@given(
    prompt=st.lists(st.integers(0, 1), max_size=4),
    answer=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    some_sizes=st.tuples(sizes, sizes),
    min_count=st.integers(2, 4),
)
def test_patterns_are_found_as_by_an_exhaustive_search(
    prompt: list[int], answer: list[int], some_sizes: tuple[int, int], min_count: int
) -> None:
    detection = RepetitionDetection(
        min_pattern_size=min(some_sizes), max_pattern_size=max(some_sizes), min_count=min_count
    )
    found = detection.is_met([*prompt, *answer], start=len(prompt))
    assert found == is_met_by_trying_all(answer, detection)
