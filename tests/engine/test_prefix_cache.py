"""The prefix cache by itself, and in an engine by the forwards that it runs."""

from __future__ import annotations

import pytest

from genserve.engine.engine import Engine
from genserve.engine.prefix_cache import PrefixCache, block_key, block_keys, root_key
from genserve.engine.token_sequence import TokenSequence
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import logits_request, sample_loop, sequence_of

ROOT = root_key(None)
FIRST = block_key(ROOT, [1, 2, 3, 4])

STEM = [(7 * i) % 60 for i in range(40)]


def insert_first(cache: PrefixCache, block: int) -> None:
    cache.insert(block, FIRST, parent=ROOT, token_ids=[1, 2, 3, 4], owner="")


def test_a_block_is_found_by_its_key_until_it_is_evicted():
    cache = PrefixCache()
    insert_first(cache, 7)
    assert (cache.find(FIRST), 7 in cache) == (7, True)
    cache.evict(7)
    cache.check_integrity()
    assert (cache.find(FIRST), 7 in cache) == (None, False)
    cache.evict(7)


def test_of_two_blocks_with_one_key_the_first_stays_cached():
    cache = PrefixCache()
    insert_first(cache, 7)
    insert_first(cache, 8)
    cache.check_integrity()
    assert cache.find(FIRST) == 7
    assert 8 not in cache


def test_keys_depend_on_the_tokens_all_blocks_before_and_the_salt():
    tokens = [1, 2, 3, 4]
    parents = [ROOT, root_key("a"), root_key("b"), FIRST, block_key(FIRST, tokens)]
    keys = {block_key(parent, ids) for parent in parents for ids in (tokens, [1, 2, 3, 5])}
    assert len(keys) == 2 * len(parents)
    assert block_key(ROOT, tokens) == FIRST


@pytest.mark.parametrize(
    ("cached", "token_ids", "found"),
    [
        ([], [1, 2], None),
        ([[1, 2]], [1, 2, 3], (2, 0)),
        ([[1, 2]], [1, 2], (2, 0)),
        ([[1, 2]], [1], None),                          # no prefix of it
        ([[1, 2]], [1, 3], None),
        ([[1], [1, 2], [1, 2, 3]], [1, 2, 9], (2, 1)),  # the longest one
        ([[1], [1, 2, 3]], [1, 2, 9], (1, 0)),          # the nearest in order is no prefix
        ([[1], [1, 2, 3], [1, 2, 4]], [1, 2, 9], (1, 0)),
        ([[2], [1]], [2, 5], (1, 0)),
        ([[5, 6], [5, 6]], [5, 6, 7], (2, 0)),          # the same tokens again are not cached again
    ],
)
def test_the_longest_partly_filled_block_is_found(cached, token_ids, found):
    cache = PrefixCache()
    for block, ids in enumerate(cached):
        cache.insert_partial(block, FIRST, ids, owner="")
    cache.check_integrity()
    assert cache.find_partial(FIRST, token_ids) == found
    assert cache.find_partial(ROOT, token_ids) is None
    for block in range(len(cached)):
        cache.evict(block)
        cache.check_integrity()
    assert cache.find_partial(FIRST, token_ids) is None


def run(engine: Engine, *sequences: TokenSequence) -> None:
    for sequence in sequences:
        engine.add(sequence)
    while engine.step() is not None:
        engine.check_integrity()
    for sequence in sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.token_ids[sequence.num_prompt_tokens :] == greedy_answer(
            prompt, num_tokens=sequence.params.max_tokens
        )


def one(prompt: list[int], *, max_tokens: int = 1, cache_salt: str | None = None) -> TokenSequence:
    return sequence_of(prompt, max_length=200, max_tokens=max_tokens, cache_salt=cache_salt)


def test_a_chat_continues_behind_its_last_computed_token():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    first = one(STEM, max_tokens=3)
    run(engine, first)
    second = one([*first.token_ids, 1, 2, 3])
    run(engine, second)
    assert model.forwards == [(40,), (1,), (1,), (4,)]
    assert second.num_cached_tokens == 42
    assert model.copies == []


def test_branches_share_whole_blocks_and_stay_cached():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    run(engine, one([*STEM, 1, 2]))
    run(engine, one([*STEM, 3, 4]))
    run(engine, one([*STEM, 1, 2, 5]), one([*STEM, 3, 4, 5]))
    assert model.forwards == [(42,), (2,), (1, 1)]


def test_a_prompt_shares_computed_blocks_of_a_running_request():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    engine.add(one([*STEM, 1], max_tokens=20))
    engine.step()
    run(engine, one([*STEM, 2, 3], max_tokens=2))
    assert model.forwards[:2] == [(41,), (1, 2)]


def test_prompts_that_arrive_together_wait_for_the_first_to_compute_their_prefix():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    strangers = [one([50 + i] * 40) for i in range(2)]
    run(engine, one([*STEM, 1]), *strangers, one([*STEM, 2, 3]))
    assert model.forwards == [(40, 40, 41), (2,)]


def test_prompts_that_share_no_block_do_not_wait():
    for salts, prefix_cache in ((("a", "b"), True), ((None, None), False)):
        model = PagedLogits(max_length=200)
        engine = Engine(model, decode=sample_loop, prefix_cache=prefix_cache)
        sequences = [one([*STEM, i], cache_salt=salt) for i, salt in enumerate(salts)]
        run(engine, *sequences)
        run(engine, one([*STEM, 9], cache_salt="c"))
        assert model.forwards == [(41, 41), (41,)]
        assert [s.num_cached_tokens for s in sequences] == [0, 0]


def test_loops_over_logits_share_blocks_though_the_prefix_cache_is_off():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop, prefix_cache=False)
    for length in (40, 41):
        engine.add_logits(logits_request([*STEM, 1][:length], max_length=200))
        assert engine.step() is not None
    assert model.forwards == [(40,), (1,)]


def test_short_prompts_do_not_wait_for_the_end_of_a_long_one():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop, max_num_batched_tokens=16)
    long, short = one(list(range(60)) * 2), one([50, 51])
    engine.add(long)
    engine.step()
    engine.add(short)
    engine.step()
    assert short.finished
    run(engine)
    assert model.forwards[:2] == [(16,), (2, 14)]
    assert long.finished


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    model = PagedLogits(max_length=48, block_size=4, num_blocks=20)
    engine = Engine(model, decode=sample_loop)
    old, recent, third = ([n] * 30 for n in (1, 2, 3))      # 8 blocks each
    for prompt in (old, recent, third):
        run(engine, sequence_of(prompt, max_length=48, max_tokens=1))
    assert engine.cache_usage == 0
    cached = []
    for prompt in (recent, old):
        sequence = sequence_of([*prompt, 5], max_length=48, max_tokens=1)
        run(engine, sequence)
        cached.append(sequence.num_cached_tokens)
    assert cached == [30, 16]


def test_the_youngest_is_preempted_and_continues_behind_its_cached_tokens():
    model = PagedLogits(max_num_seqs=2, max_length=48, block_size=4, num_blocks=16)
    engine = Engine(model, decode=sample_loop)
    older = sequence_of([1] * 10, max_length=48, max_tokens=36)
    younger = sequence_of([2] * 10, max_length=48, max_tokens=36)
    engine.add(older)
    engine.step()
    engine.add(younger)
    num_preempted = 0
    while (result := engine.step()) is not None:
        engine.check_integrity()
        num_preempted += result.num_preempted
        assert older.finished or not younger.finished
    assert (older.num_preemptions, younger.num_preemptions) == (0, num_preempted)
    assert num_preempted >= 1
    for sequence in (older, younger):
        expected = greedy_answer(sequence.token_ids[:10], num_tokens=36)
        assert sequence.token_ids[10:] == expected


def test_prompt_logprobs_skip_the_prefix_cache():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    run(engine, one(STEM))
    scored = sequence_of(STEM, max_length=200, max_tokens=1, prompt_logprobs=1)
    run(engine, scored)
    assert scored.num_cached_tokens == 0
    assert model.forwards == [(40,), (40,)]


def test_a_long_prompt_with_prompt_logprobs_needs_few_rows_in_each_step():
    model = PagedLogits(max_length=400)
    engine = Engine(model, decode=sample_loop)
    run(engine, sequence_of([*STEM] * 4, max_length=400, max_tokens=1, prompt_logprobs=1))
    assert model.forwards == [(64,), (64,), (32,)]


def test_the_keys_of_a_prompt_are_those_of_its_full_blocks():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert block_keys(tokens, block_size=4) == [FIRST, block_key(FIRST, [5, 6, 7, 8])]
    assert block_keys(tokens, block_size=4, root=root_key("a"))[0] == block_key(root_key("a"), [1, 2, 3, 4])
    assert block_keys(tokens[:3], block_size=4) == []
