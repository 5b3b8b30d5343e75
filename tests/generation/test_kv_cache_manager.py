from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genserve.generation.engine_request import TokenSequence
from genserve.generation.kv_cache_manager import KVCacheManager
from tests.fakes.sequences import logits_request, sequence_of

SIZE = 4


def manager(num_blocks: int = 8, *, prefix_cache: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=SIZE, prefix_cache=prefix_cache)


def begin(kv: KVCacheManager, *token_ids: int, **params) -> TokenSequence:
    sequence = sequence_of(token_ids, **params)
    assert kv.allocate(sequence, num_spare=0)
    kv.check_integrity()
    return sequence


def compute(kv: KVCacheManager, sequence: TokenSequence) -> None:
    sequence.num_computed_tokens = len(sequence.token_ids)
    kv.cache_blocks(sequence)
    kv.check_integrity()


def test_a_request_has_blocks_for_all_its_tokens_and_no_more():
    kv = manager()
    sequence = begin(kv, 1, 2, 3, 4, 5)
    assert len(kv.table(sequence).block_ids) == 2
    assert kv.usage == 2 / 8


def test_full_blocks_are_shared_as_soon_as_they_are_computed():
    kv = manager()
    first = begin(kv, 1, 2, 3, 4, 5)
    assert begin(kv, 1, 2, 3, 4, 6).num_computed_tokens == 0
    compute(kv, first)
    second = begin(kv, 1, 2, 3, 4, 7)
    assert second.num_computed_tokens == 4
    assert kv.table(second).block_ids[0] == kv.table(first).block_ids[0]


def test_a_partly_filled_block_is_taken_over_by_a_request_that_continues_it():
    kv = manager()
    first = begin(kv, 1, 2, 3, 4, 5, 6)
    block_ids = list(kv.table(first).block_ids)
    compute(kv, first)
    kv.free(first)
    assert begin(kv, 1, 2, 3, 4, 5, 9).num_computed_tokens == 4, "that has another token"
    second = begin(kv, 1, 2, 3, 4, 5, 6, 7)
    assert second.num_computed_tokens == 6
    assert kv.table(second).block_ids == block_ids
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
        kv.check_integrity()
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
    shared = kv.table(first).block_ids[1]
    for sequence in (first, second, third):
        sequence.token_ids.append(6)
        assert kv.extend(sequence, 1)
        kv.check_integrity()
    own = [kv.table(sequence).block_ids[1] for sequence in (first, second, third)]
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


class Blocks(RuleBasedStateMachine):
    """Short requests arrive, grow, fork and leave; shared blocks must hold the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = manager(12)
        self.running: list[TokenSequence] = []
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}     # for each place, all tokens up to it

    def write(self, sequence: TokenSequence, end: int) -> None:
        for source, target in self.kv.copies:
            for offset in range(SIZE):
                self.contents[target, offset] = self.contents.get((source, offset), ())
        self.kv.copies.clear()
        for position in range(sequence.num_computed_tokens, end):
            block = self.kv.table(sequence).block_ids[position // SIZE]
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

    @invariant()
    def every_request_finds_its_own_tokens(self) -> None:
        self.kv.check_integrity()
        pending = {target: source for source, target in self.kv.copies}
        for sequence in self.running:
            block_ids = self.kv.table(sequence).block_ids
            for position in range(sequence.num_computed_tokens):
                block = block_ids[position // SIZE]
                found = self.contents[pending.get(block, block), position % SIZE]
                assert found == tuple(sequence.token_ids[: position + 1])


TestBlocks = Blocks.TestCase
