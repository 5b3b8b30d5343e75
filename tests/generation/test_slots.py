from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.generation.slots import common_prefix, compaction


@given(st.lists(st.booleans(), max_size=12))
def test_compaction_leaves_no_gap_and_moves_no_more_than_it_must(front):
    slots = list(range(len(front)))
    moves = compaction(front)
    for move in moves:
        slots[move.target] = slots[move.source]
    num_front = sum(front)
    assert sorted(slots[:num_front]) == [slot for slot, is_front in enumerate(front) if is_front]
    assert len(moves) == front[:num_front].count(False)


@pytest.mark.parametrize("gone", [{3}, {2, 3}, {0, 1, 2, 3}, set()])
def test_what_leaves_from_the_end_moves_nobody(gone):
    assert compaction([slot not in gone for slot in range(4)]) == []


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.data())
def test_a_common_prefix_is_as_long_as_a_plain_loop_says(first, second, data):
    second = first[: data.draw(st.integers(0, len(first)))] + second
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert common_prefix(first, second) == expected
