from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.generation.slots import compaction
from tests.fakes.sequences import sequence_of


def running(num: int, *, partial: bool):
    sequences = [sequence_of([1, 2]) for _ in range(num)]
    for sequence in sequences:
        sequence.num_computed = 2
    if partial:
        sequences[-1].num_computed = 1
    return sequences


@given(st.integers(1, 12), st.booleans(), st.data())
def test_compaction_leaves_no_gap_moves_each_once_and_keeps_a_partial_prompt_last(num, partial, data):
    gone = data.draw(st.sets(st.integers(0, num - 1)))
    sequences = running(num, partial=partial)
    slots = list(sequences)
    moves = compaction(sequences, gone)
    for move in moves:
        slots[move.target] = slots[move.source]
    kept = slots[: num - len(gone)]
    assert set(kept) == {s for i, s in enumerate(sequences) if i not in gone}
    assert len(set(kept)) == len(kept)
    assert not any(s.in_prompt for s in kept[:-1])
    assert len(moves) <= len(gone) + 1
    assert len({move.source for move in moves}) == len(moves)


@pytest.mark.parametrize("gone", [{3}, {2, 3}, {0, 1, 2, 3}, set()])
def test_what_leaves_from_the_end_moves_nobody(gone):
    assert compaction(running(4, partial=False), gone) == []
