from __future__ import annotations

from itertools import takewhile
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genserve.completion import CacheMatch
from genserve.engine.engine_request import Request
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.prefix_cache import StoredBlocks, block_keys
from genserve.engine.state_slots import NO_SLOT
from genserve.engine.token_sequence import TokenSequence
from genserve.request_context import KeyShare
from tests.fakes.sequences import logits_request, sequence_of

SIZE = 4


class CheckedManager(KVCacheManager):
    """Records the requests with blocks, and checks them."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.requests: set[Request] = set()

    def allocate(self, request: Request, *, num_spare: int) -> bool:
        allocated = super().allocate(request, num_spare=num_spare)
        if allocated:
            self.requests.add(request)
        return allocated

    def fork(self, source: Request, target: Request) -> None:
        super().fork(source, target)
        self.requests.add(target)

    def free(self, request: Request) -> None:
        super().free(request)
        self.requests.discard(request)

    def check(self) -> None:
        self.check_integrity(self.requests)


def manager(
    num_blocks: int = 8, *, prefix_cache: bool = True, stores_blocks: bool = False
) -> CheckedManager:
    return CheckedManager(
        num_blocks=num_blocks, block_size=SIZE, prefix_cache=prefix_cache, stores_blocks=stores_blocks
    )


def begin(kv: CheckedManager, *token_ids: int, **params) -> TokenSequence:
    sequence = sequence_of(token_ids, **params)
    assert kv.allocate(sequence, num_spare=0)
    kv.check()
    return sequence


def compute(kv: CheckedManager, sequence: TokenSequence) -> None:
    sequence.num_computed_tokens = len(sequence.token_ids)
    kv.cache_blocks(sequence)
    kv.check()


def test_a_request_has_blocks_for_all_its_tokens_and_no_more():
    kv = manager()
    sequence = begin(kv, 1, 2, 3, 4, 5)
    assert len(sequence.block_table.block_ids) == 2
    assert kv.usage == 2 / 8


def test_full_blocks_are_shared_as_soon_as_they_are_computed():
    kv = manager()
    first = begin(kv, 1, 2, 3, 4, 5)
    assert begin(kv, 1, 2, 3, 4, 6).num_computed_tokens == 0
    compute(kv, first)
    second = begin(kv, 1, 2, 3, 4, 7)
    assert second.num_computed_tokens == 4
    assert second.block_table.block_ids[0] == first.block_table.block_ids[0]


def test_a_partly_filled_block_is_taken_over_by_a_request_that_continues_it():
    kv = manager()
    first = begin(kv, 1, 2, 3, 4, 5, 6)
    block_ids = list(first.block_table.block_ids)
    compute(kv, first)
    kv.free(first)
    assert begin(kv, 1, 2, 3, 4, 5, 9).num_computed_tokens == 4, "that has another token"
    second = begin(kv, 1, 2, 3, 4, 5, 6, 7)
    assert second.num_computed_tokens == 6
    assert second.block_table.block_ids == block_ids
    assert begin(kv, 1, 2, 3, 4, 5, 6, 7).num_computed_tokens == 4, "it is taken"


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=3), max_size=8), st.data())
def test_the_partly_filled_block_with_the_longest_prefix_is_found(
    before: list[list[int]], data: st.DataObject
):
    kv = manager(40)
    sequences = [begin(kv, *[7] * SIZE, *token_ids) for token_ids in before]    # none continues another
    for sequence in sequences:
        compute(kv, sequence)
    for sequence in sequences:
        kv.free(sequence)
        kv.check()
    wanted = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=3))
    known = [n for n in range(len(wanted) + 1) if wanted[:n] in before]
    found = min(max(known, default=0), len(wanted) - 1)
    assert kv.num_cached_tokens(sequence_of([*[7] * SIZE, *wanted])) == (SIZE if before else 0) + found


def test_of_repeated_tokens_the_last_one_is_computed():
    for token_ids in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]):
        kv = manager()
        first = begin(kv, *token_ids)
        compute(kv, first)
        kv.free(first)
        assert begin(kv, *token_ids).num_computed_tokens == len(token_ids) - 1


def test_requests_with_other_salts_or_prefixes_share_nothing():
    kv = manager()
    compute(kv, begin(kv, 1, 2, 3, 4, 5, cache_salt="a"))
    assert begin(kv, 1, 2, 3, 4, 5).num_computed_tokens == 0
    assert begin(kv, 1, 2, 3, 4, 5, cache_salt="b").num_computed_tokens == 0
    assert begin(kv, 1, 2, 3, 4, 5, cache_salt="a").num_computed_tokens == 4
    kv = manager()
    compute(kv, begin(kv, 9, 9, 9, 9, 1, 2, 3, 4))
    assert begin(kv, 1, 2, 3, 4, 5).num_computed_tokens == 0


def test_without_prefix_cache_only_logits_requests_share_blocks():
    kv = manager(prefix_cache=False)
    compute(kv, begin(kv, 1, 2, 3, 4, 5))
    assert begin(kv, 1, 2, 3, 4, 5).num_computed_tokens == 0
    request = logits_request([1, 2, 3, 4, 5])
    assert kv.allocate(request, num_spare=0)
    assert request.num_computed_tokens == 0
    request.num_computed_tokens = 5
    kv.cache_blocks(request)
    again = logits_request([1, 2, 3, 4, 6])
    kv.allocate(again, num_spare=0)
    assert again.num_computed_tokens == 4


def test_a_shared_block_is_copied_before_it_is_written():
    kv = manager()
    first = begin(kv, 1, 2, 3, 4, 5)
    compute(kv, first)
    second, third = sequence_of([1, 2, 3, 4, 5]), sequence_of([1, 2, 3, 4, 5])
    kv.fork(first, second)
    kv.fork(first, third)
    shared = first.block_table.block_ids[1]
    for sequence in (first, second, third):
        sequence.token_ids.append(6)
        assert kv.extend(sequence, 1)
        kv.check()
    own = [sequence.block_table.block_ids[1] for sequence in (first, second, third)]
    assert kv.copies == [(shared, own[0]), (shared, own[1])]
    assert own[2] == shared
    assert len(set(own)) == 3


def test_too_few_blocks_allocate_nothing():
    kv = manager(2)
    assert not kv.allocate(sequence_of(range(9)), num_spare=0)
    assert not kv.allocate(sequence_of(range(8)), num_spare=1)
    assert kv.num_free_blocks == 2
    sequence = begin(kv, *range(8))
    compute(kv, sequence)
    assert not kv.extend(sequence, 1)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([1, 2, 3, 4, 5, 9, 8], (5, "different", (9, 8), (6, 7, 8, 9))),
        ([1, 2, 3, 4, 5, 6, 7, 8, 7], (8, "different", (7,), (9,))),        # the partly filled block
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 5], (9, "unknown", (5,), ())),         # it has no more
        ([7], (0, "different", (7,), (1, 2, 3, 4, 5, 6, 7, 8, 9))),
        ([1, 2, 3, 4, 5], (5, "complete", (), ())),
        ([1, 2, 3, 4, 5, 6, 7, 8], (8, "complete", (), ())),
    ],
)
def test_a_request_learns_where_it_left_the_cached_prompts(prompt, match):
    kv = manager()
    first = begin(kv, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    compute(kv, first)
    kv.free(first)
    found = begin(kv, *prompt, return_cache_match=True).cache_match
    assert found == CacheMatch(
        matched_tokens=match[0], end=match[1], prompt_token_ids=match[2], cached_token_ids=match[3]
    )


def test_a_request_without_any_cached_prompt_learns_how_its_own_begins():
    found = begin(manager(), 7, 8, return_cache_match=True).cache_match
    assert found == CacheMatch(matched_tokens=0, end="unknown", prompt_token_ids=(7, 8))


def test_the_tokens_of_another_key_stay_hidden():
    kv = manager(16)
    first = sequence_of([1, 2, 3, 4, 5, 6])
    first.share = KeyShare("alice")
    assert kv.allocate(first, num_spare=0)
    compute(kv, first)
    kv.free(first)
    for name, shown in (("bob", ()), ("alice", (6,))):
        other = sequence_of([1, 2, 3, 4, 5, 9], return_cache_match=True)
        other.share = KeyShare(name)
        assert kv.allocate(other, num_spare=0)
        assert (other.cache_match.matched_tokens, other.cache_match.end) == (5, "different")
        assert other.cache_match.cached_token_ids == shown


def test_a_request_that_reads_no_cache_learns_so():
    kv = manager(prefix_cache=False)
    assert begin(kv, 1, 2, return_cache_match=True).cache_match.end == "off"
    assert begin(manager(), 1, 2, return_cache_match=True).cache_match.end == "unknown"
    assert begin(manager(), 1, 2).cache_match is None


def stored(sequence: TokenSequence, *indices: int) -> StoredBlocks:
    """Blocks of a prompt; their only byte is their index."""
    keys = block_keys(sequence.token_ids, block_size=SIZE, root=sequence.cache_root)
    return StoredBlocks(
        token_ids=sequence.token_ids,
        parents=[sequence.cache_root, *keys],
        keys=keys,
        owner="",
        indices=indices,
        rows=np.array(indices, np.uint8).reshape(-1, 1),
    )


def leave_behind(kv: CheckedManager, *token_ids: int) -> None:
    """Have the blocks of some tokens cached and free."""
    sequence = begin(kv, *token_ids)
    compute(kv, sequence)
    kv.free(sequence)


def test_restored_blocks_take_the_place_of_those_used_least_recently():
    kv, prompt = manager(4), sequence_of([5, 5, 5, 5, 6, 6, 6, 6, 7])
    leave_behind(kv, 1, 1, 1, 1, 2, 2, 2, 2)
    leave_behind(kv, 3, 3, 3, 3, 4, 4, 4, 4)
    rows, block_ids, _ = kv.restore(stored(prompt, 0, 1))
    kv.check()
    assert (rows, len({*block_ids})) == ([0, 1], 2)
    assert kv.num_cached_tokens(prompt) == 8
    assert kv.num_cached_tokens(sequence_of([1, 1, 1, 1, 2])) == 0
    assert kv.num_cached_tokens(sequence_of([3, 3, 3, 3, 4, 4, 4, 4, 5])) == 8


def test_the_cached_blocks_of_a_prompt_stay_while_others_are_restored():
    kv, prompt = manager(4), sequence_of([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4])
    leave_behind(kv, 1, 1, 1, 1)
    leave_behind(kv, 9, 9, 9, 9, 8, 8, 8, 8)
    kv.restore(stored(prompt, 1, 2))
    kv.check()
    assert kv.num_cached_tokens(prompt) == 12


def test_no_more_blocks_are_restored_than_have_room_beside_the_cached_ones():
    kv, prompt = manager(3), sequence_of([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5])
    leave_behind(kv, 1, 1, 1, 1, 2, 2, 2, 2)
    assert kv.restore(stored(prompt, 2, 3))[0] == [0]
    kv.check()
    assert kv.num_cached_tokens(prompt) == 12
    held = begin(kv, *[7] * 12)
    assert kv.restore(stored(sequence_of([8] * 9), 0, 1)) == ([], [], NO_SLOT)
    kv.free(held)


def test_of_a_restored_prompt_the_last_blocks_are_evicted_first():
    kv, prompt = manager(4), sequence_of([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5])
    kv.restore(stored(prompt, 0, 1))
    kv.restore(stored(prompt, 2, 3))
    begin(kv, 9)
    assert kv.num_cached_tokens(prompt) == 12


def test_blocks_that_another_request_has_computed_meanwhile_are_not_restored():
    kv, prompt = manager(4), sequence_of([1, 1, 1, 1, 2, 2, 2, 2, 3])
    leave_behind(kv, 1, 1, 1, 1)
    assert kv.restore(stored(prompt, 0, 1))[0] == [1]
    kv.check()


class Blocks(RuleBasedStateMachine):
    """Short requests arrive, grow, fork and leave; shared blocks must hold the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = manager(12, stores_blocks=True)
        self.files: dict[bytes, list[tuple[int, ...]]] = {}
        self.running: list[TokenSequence] = []
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}     # for each place, all tokens up to it

    def store(self) -> None:
        assert self.kv.filled is not None
        for key, block in self.kv.filled:
            self.files[key] = [self.contents[block, offset] for offset in range(SIZE)]
        self.kv.filled.clear()

    def write(self, sequence: TokenSequence, end: int) -> None:
        if self.kv.has_evicted_filled():
            self.store()
        for source, target in self.kv.copies:
            for offset in range(SIZE):
                self.contents[target, offset] = self.contents.get((source, offset), ())
        self.kv.copies.clear()
        for position in range(sequence.num_computed_tokens, end):
            block = sequence.block_table.block_ids[position // SIZE]
            self.contents[block, position % SIZE] = tuple(sequence.token_ids[: position + 1])
        sequence.num_computed_tokens = end
        self.kv.cache_blocks(sequence)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from([None, "a"]))
    def arrive(self, token_ids: list[int], salt: str | None) -> None:
        sequence = sequence_of(token_ids, cache_salt=salt)
        if self.kv.allocate(sequence, num_spare=0):
            self.running.append(sequence)
        else:
            self.kv.free(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if self.kv.extend(sequence, sequence.num_pending):
            first, last = sequence.num_computed_tokens, len(sequence.token_ids)
            self.write(sequence, data.draw(st.integers(first, last)))
            if not sequence.num_pending and last < 40:
                sequence.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def branch_off(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.running))
        target = sequence_of(source.token_ids, cache_salt=source.cache_salt)
        self.kv.fork(source, target)
        self.running.append(target)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.kv.free(sequence)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=SIZE, max_size=16))
    def restore(self, token_ids: list[int]) -> None:
        sequence = sequence_of(token_ids)
        blocks = stored(sequence)
        missing = [index for index, key in enumerate(blocks.keys) if not self.kv.is_cached(key)]
        found = list(takewhile(lambda index: blocks.keys[index] in self.files, missing))
        rows, block_ids, _ = self.kv.restore(stored(sequence, *found))
        if self.kv.has_evicted_filled():
            self.store()
        for row, block in zip(rows, block_ids, strict=True):
            for offset, content in enumerate(self.files[blocks.keys[found[row]]]):
                self.contents[block, offset] = content

    @invariant()
    def every_request_finds_its_own_tokens(self) -> None:
        self.kv.check()
        pending = {target: source for source, target in self.kv.copies}
        for sequence in self.running:
            block_ids = sequence.block_table.block_ids
            for position in range(sequence.num_computed_tokens):
                block = block_ids[position // SIZE]
                found = self.contents[pending.get(block, block), position % SIZE]
                assert found == tuple(sequence.token_ids[: position + 1])


TestBlocks = Blocks.TestCase
