from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.generation.prefixes import OWN_STEP_TOKENS, awaited, common_prefix, worth_reusing
from tests.fakes.sequences import sequence_of

LONG = [i % 60 for i in range(4 * OWN_STEP_TOKENS)]


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.data())
def test_a_common_prefix_is_as_long_as_a_plain_loop_says(first, second, data):
    second = first[: data.draw(st.integers(0, len(first)))] + second
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert common_prefix(first, second) == expected


@pytest.mark.parametrize(
    ("num_common", "num_tokens", "worth"),
    [(OWN_STEP_TOKENS, 500, True), (OWN_STEP_TOKENS - 1, 500, False), (4, 7, True), (3, 7, False)],
)
def test_a_prefix_is_reused_where_that_saves_more_than_the_step_it_costs(num_common, num_tokens, worth):
    assert worth_reusing(num_common, num_tokens=num_tokens) is worth


def test_one_waits_for_what_another_is_about_to_compute():
    computing, candidate = sequence_of([*LONG, 1], max_length=500), sequence_of([*LONG, 2], max_length=500)
    assert awaited(candidate, [computing])
    computing.num_computed = len(LONG) - OWN_STEP_TOKENS + 1
    assert not awaited(candidate, [computing]), "most of it is there"


def test_nobody_waits_for_another_tenant_or_for_other_tokens_or_for_little():
    candidate = sequence_of([*LONG, 2], max_length=500)
    others = [
        sequence_of([*LONG, 1], max_length=500, cache_salt="another"),
        sequence_of([1, *LONG], max_length=500),
        sequence_of([*LONG[: OWN_STEP_TOKENS - 1], 61, 62], max_length=500),
    ]
    assert not awaited(candidate, others)
