"""What the engine computes, and what it finds in the cache: by the forwards that it runs."""

from __future__ import annotations

from genserve.generation.engine import Engine
from genserve.generation.token_sequence import TokenSequence
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import Clock, sample_loop, sequence_of

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


def test_a_chat_goes_on_in_its_slot():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    first = one(STEM, max_tokens=3)
    run(engine, first)
    second = one([*first.token_ids, 1, 2, 3])
    run(engine, second)
    # The answer is part of a prompt now: a prefill differs in the last bits from the decodes it came from.
    assert model.forwards == ["prefill 1x40", "decode 1", "decode 1", "prefill 1x6"]
    assert second.num_cached_tokens == 40
    assert model.moves == []


def test_what_branches_off_begins_with_a_copy_and_the_first_branch_is_still_there():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    run(engine, one([*STEM, 1, 2]))
    run(engine, one([*STEM, 3, 4]))
    run(engine, one([*STEM, 1, 2, 5]), one([*STEM, 3, 4, 5]))
    assert model.forwards == ["prefill 1x42", "prefill 1x2", "prefill 1x1", "prefill 1x1"]


def test_a_prompt_begins_with_what_another_one_that_still_runs_has_computed():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    engine.add(one([*STEM, 1], max_tokens=20))
    engine.step()
    run(engine, one([*STEM, 2, 3], max_tokens=2))
    assert model.forwards[:3] == ["prefill 1x41", "prefill 1x2", "decode 2"]


def test_those_that_arrive_together_wait_for_the_first_that_computes_what_they_share():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop)
    strangers = [one([50 + i] * 40) for i in range(2)]
    run(engine, one([*STEM, 1]), *strangers, one([*STEM, 2, 3]))
    assert model.forwards == ["prefill 3x41", "prefill 1x2"]


def test_they_do_not_wait_where_nothing_is_shared():
    for salts, prefix_cache in ((("a", "b"), True), ((None, None), False)):
        model = PagedLogits(max_length=200)
        engine = Engine(model, decode=sample_loop, prefix_cache=prefix_cache)
        sequences = [one([*STEM, i], cache_salt=salt) for i, salt in enumerate(salts)]
        run(engine, *sequences)
        run(engine, one([*STEM, 9], cache_salt="c"))
        assert model.forwards == ["prefill 2x41", "prefill 1x41"]
        assert [s.num_cached_tokens for s in sequences] == [0, 0]


def test_a_burst_behind_a_prefix_is_prefilled_without_decodes_between_as_far_as_the_budget_goes():
    model = PagedLogits(max_num_seqs=8, max_length=200)
    engine = Engine(model, decode=sample_loop, max_num_batched_tokens=64)
    run(engine, one(STEM))
    model.forwards.clear()
    run(engine, *(one([*STEM, i, i], max_tokens=3) for i in range(5)))
    assert model.forwards[:6] == [*["prefill 1x2"] * 3, "decode 3", *["prefill 1x2"] * 2]


def test_short_prompts_do_not_wait_for_the_end_of_a_long_one():
    model = PagedLogits(max_length=200)
    engine = Engine(model, decode=sample_loop, max_num_batched_tokens=16)
    long, short = one(list(range(60)) * 2), one([50, 51])
    engine.add(long)
    engine.step()
    engine.add(short)
    engine.step()
    engine.step()
    assert short.finished
    assert long.in_prompt
    run(engine)
    assert model.forwards[:3] == ["prefill 1x16", "prefill 1x2", "prefill 1x16"]
    assert long.finished


def test_when_memory_is_short_the_oldest_prefix_goes_first_and_only_as_much_of_it_as_must():
    model, clock = PagedLogits(max_length=48, block_size=4, max_cached_tokens=80), Clock()
    engine = Engine(model, decode=sample_loop, clock=clock)
    old, recent, third = ([n] * 30 for n in (1, 2, 3))  # each is parked with 30 tokens, 8 pages of 20
    for prompt in (old, recent, third):
        clock.now_s += 1
        run(engine, sequence_of(prompt, max_length=48, max_tokens=1))
    cached = []
    for prompt in (old, recent):
        sequence = sequence_of([*prompt, 5], max_length=48, max_tokens=1)
        run(engine, sequence)
        cached.append(sequence.num_cached_tokens)
    assert 0 < cached[0] < 30
    assert cached[0] % 4 == 0


def test_the_youngest_gives_way_and_goes_on_behind_what_is_left_of_it():
    model = PagedLogits(max_num_seqs=2, max_length=48, block_size=4, max_cached_tokens=64)
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
        assert not older.preempted
        assert older.finished or not younger.finished
    assert num_preempted >= 1
    assert younger.preempted
    for sequence in (older, younger):
        expected = greedy_answer(sequence.token_ids[:10], num_tokens=36)
        assert sequence.token_ids[10:] == expected
    assert model.forwards.count("prefill 1x10") == 2, "nobody began from the first token again"
