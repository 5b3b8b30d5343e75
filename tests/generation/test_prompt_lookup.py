from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from genserve.generation.speculation import PromptLookup
from tests.fakes.sequences import sequence_of


def proposed(token_ids: list[int], count: int) -> list[int]:
    return list(PromptLookup().propose(sequence_of(token_ids, max_length=10_000), count))


def searched(token_ids: list[int], count: int) -> list[int]:
    """The same by looking at every place."""
    for size in (4, 3, 2):
        last = token_ids[-size:]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(last) == size and token_ids[end - size : end] == last:
                copied = list(token_ids)
                for i in range(count):
                    copied.append(copied[end + i])
                return copied[len(token_ids) :]
    return []


def test_what_followed_the_last_tokens_is_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 2, 3], 3) == [4, 5, 6]


def test_a_longer_run_tells_more_than_a_later_one():
    assert proposed([1, 2, 3, 4, 50, 9, 3, 4, 60, 2, 3, 4], 1) == [50]


def test_of_equal_runs_the_latest_counts():
    assert proposed([2, 3, 50, 2, 3, 60, 2, 3], 1) == [60]


def test_new_tokens_have_no_draft():
    assert proposed([1, 2, 3, 4], 5) == []
    assert proposed([1], 5) == []


def test_what_repeats_itself_is_proposed_again():
    assert proposed([7, 8, 9, 7, 8, 9, 7, 8], 5) == [9, 7, 8, 9, 7]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(token_ids, count):
    assert proposed(token_ids, count) == searched(token_ids, count)


def test_a_sequence_that_grows_is_proposed_what_a_new_one_is():
    rng = random.Random(0)
    sequence, lookup = sequence_of([1, 2, 1], max_length=1000), PromptLookup()
    for _ in range(200):
        assert list(lookup.propose(sequence, 4)) == proposed(sequence.token_ids, 4)
        for _ in range(rng.randint(1, 3)):
            sequence.append(rng.randrange(4))


def test_sequences_do_not_see_each_others_tokens():
    lookup = PromptLookup()
    lookup.propose(sequence_of([1, 2, 3, 4, 5]), 3)
    assert list(lookup.propose(sequence_of([9, 1, 2, 3]), 3)) == []
