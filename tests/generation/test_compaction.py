from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.generation.compaction import compaction


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
