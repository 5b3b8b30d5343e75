"""What the engine computes, and what it finds in the cache: by the forwards that it runs."""

from __future__ import annotations

from genserve.generation.engine import Engine
from genserve.generation.engine_request import TokenSequence
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import logits_request, sample_loop, sequence_of

STEM = [(7 * i) % 60 for i in range(40)]


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


def test_a_chat_goes_on_behind_its_last_computed_token():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    first = one(STEM, max_tokens=3)
    run(engine, first)
    second = one([*first.token_ids, 1, 2, 3])
    run(engine, second)
    assert model.forwards == [(40,), (1,), (1,), (4,)]
    assert second.num_cached_tokens == 42
    assert model.copies == []


def test_what_branches_off_shares_whole_blocks_and_the_first_branch_is_still_there():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    run(engine, one([*STEM, 1, 2]))
    run(engine, one([*STEM, 3, 4]))
    run(engine, one([*STEM, 1, 2, 5]), one([*STEM, 3, 4, 5]))
    assert model.forwards == [(42,), (2,), (1, 1)]


def test_a_prompt_begins_with_what_another_one_that_still_runs_has_computed():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    engine.add(one([*STEM, 1], max_tokens=20))
    engine.step()
    run(engine, one([*STEM, 2, 3], max_tokens=2))
    assert model.forwards[:2] == [(41,), (1, 2)]


def test_those_that_arrive_together_wait_for_the_first_that_computes_what_they_share():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    strangers = [one([50 + i] * 40) for i in range(2)]
    run(engine, one([*STEM, 1]), *strangers, one([*STEM, 2, 3]))
    assert model.forwards == [(40, 40, 41), (2,)]


def test_they_do_not_wait_where_nothing_is_shared():
    for salts, prefix_cache in ((("a", "b"), True), ((None, None), False)):
        model = PagedLogits(max_length=200)
        engine = Engine(model, decode=sample_loop, prefix_cache=prefix_cache)
        sequences = [one([*STEM, i], cache_salt=salt) for i, salt in enumerate(salts)]
        run(engine, *sequences)
        run(engine, one([*STEM, 9], cache_salt="c"))
        assert model.forwards == [(41, 41), (41,)]
        assert [s.num_cached_tokens for s in sequences] == [0, 0]


def test_loops_over_the_logits_keep_what_they_have_computed_though_the_prefix_cache_is_off():
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


def test_what_was_used_last_is_kept_longest_and_the_beginning_longer_than_the_end():
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


def test_the_youngest_gives_way_and_goes_on_behind_what_is_left_of_it():
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


def test_who_wants_logits_behind_every_token_of_its_prompt_takes_none_from_the_cache():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    run(engine, one(STEM))
    scored = sequence_of(STEM, max_length=200, max_tokens=1, prompt_logprobs=1)
    run(engine, scored)
    assert scored.num_cached_tokens == 0
    assert model.forwards == [(40,), (40,)]


def test_a_long_scored_prompt_asks_for_a_bounded_number_of_rows_at_a_time():
    model = PagedLogits(max_length=400)
    engine = Engine(model, decode=sample_loop)
    run(engine, sequence_of([*STEM] * 4, max_length=400, max_tokens=1, prompt_logprobs=1))
    assert model.forwards == [(64,), (64,), (32,)]
