from __future__ import annotations

import math
import random

import numpy as np
import pytest

from genserve.completion import Delta, FinishReason
from genserve.engine.engine import Engine
from genserve.engine.engine_request import LogitsRequest
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import ModelFailed
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer, logits_after
from tests.fakes.sequences import Clock, logits_request, sample_loop, sequence_of
from tests.support.representatives import with_extended

POISON = next(i for i in range(VOCAB_SIZE) if i not in [1, *greedy_answer([1], num_tokens=10)])


def run(engine: Engine) -> dict[TokenSequence, ModelFailed]:
    failed = {}
    while (result := engine.step()) is not None:
        engine.check_integrity()
        failed.update(result.failed)
    return failed


def answer(sequence: TokenSequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def test_a_prompt_is_answered_as_by_a_loop_without_cache():
    engine = Engine(PagedLogits(), decode=sample_loop)
    sequence = sequence_of([5, 6, 7], max_tokens=10)
    engine.add(sequence)
    run(engine)
    assert answer(sequence) == greedy_answer([5, 6, 7], num_tokens=10)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert engine.num_running == 0


@pytest.mark.parametrize("seed", with_extended(range(20), always=range(10)))
def test_other_requests_never_change_an_answer(seed):
    """Random prompts, lengths, arrival steps and cancellations, over few slots and small chunks."""
    rng = random.Random(seed)
    model = PagedLogits(max_num_seqs=rng.choice([1, 2, 4]))
    engine = Engine(model, decode=sample_loop, max_num_batched_tokens=8)
    arrivals = sorted(
        (
            (rng.randrange(40), [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))])
            for _ in range(12)
        ),
        key=lambda arrival: arrival[0],
    )
    sequences: list[TokenSequence] = []
    cancelled: set[TokenSequence] = set()
    step = 0
    while arrivals or engine.num_running or engine.num_waiting:
        while arrivals and arrivals[0][0] <= step:
            sequences.append(sequence_of(arrivals.pop(0)[1], max_tokens=rng.randint(1, 15)))
            engine.add(sequences[-1])
        if sequences and rng.random() < 0.05:
            victim = rng.choice(sequences)
            if not victim.finished:
                cancelled.add(victim)
            engine.remove([victim])
        result = engine.step()
        assert result is None or not result.failed
        engine.check_integrity()
        step += 1
    for sequence in set(sequences) - cancelled:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert answer(sequence) == greedy_answer(prompt, num_tokens=sequence.params.max_tokens)


def test_a_prompt_shares_the_forward_with_decodes():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    engine.add(sequence_of([1, 2, 3], max_tokens=20))
    for _ in range(5):
        engine.step()
    engine.add(sequence_of([4, 5], max_tokens=20))
    run(engine)
    assert model.forwards[4:7] == [(1,), (1, 2), (1, 1)]


def test_prompts_that_arrive_together_are_computed_in_one_forward():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    for prompt in ([1, 2, 3], [4], [5, 6]):
        engine.add(sequence_of(prompt, max_tokens=2))
    engine.step()
    assert sorted(model.forwards[0]) == [1, 2, 3]


def test_a_long_prompt_is_computed_in_chunks_while_others_decode():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop, max_num_batched_tokens=8)
    engine.add(sequence_of([1, 2], max_tokens=30))
    engine.step()
    engine.add(sequence_of(list(range(16)), max_tokens=2))
    for _ in range(4):
        engine.step()
    assert model.forwards == [(2,), (1, 7), (1, 7), (1, 2), (1, 1)]


def test_requests_beyond_max_num_seqs_wait_and_are_served():
    engine = Engine(PagedLogits(max_num_seqs=2), decode=sample_loop)
    sequences = [sequence_of([i], max_tokens=3) for i in range(5)]
    for sequence in sequences:
        engine.add(sequence)
    run(engine)
    assert [answer(s) for s in sequences] == [greedy_answer([i], num_tokens=3) for i in range(5)]


def test_requests_run_by_priority_and_then_by_arrival():
    engine = Engine(PagedLogits(max_num_seqs=1), decode=sample_loop)
    priorities = [1, 0, 2, -1, 0, 1]
    sequences = [sequence_of([i], max_tokens=2, priority=p) for i, p in enumerate(priorities)]
    for sequence in sequences:
        engine.add(sequence)
    ended: list[TokenSequence] = []
    while result := engine.step():
        ended += [s for s in result.advanced if s.finished]
    assert [sequences.index(s) for s in ended] == [3, 1, 4, 0, 5, 2]


def test_a_preempted_request_goes_before_others_of_its_priority():
    """Two fit into the cache while they are short; then the younger is preempted, before a third one."""
    engine = Engine(PagedLogits(max_num_seqs=2, max_length=16, num_blocks=4), decode=sample_loop)
    sequences = [sequence_of([i], max_length=16, max_tokens=n) for i, n in enumerate([12, 12, 4])]
    for sequence in sequences:
        engine.add(sequence)
    ended: list[TokenSequence] = []
    while result := engine.step():
        engine.check_integrity()
        ended += [s for s in result.advanced if s.finished]
    assert sequences[1].num_preemptions
    assert ended == sequences


def test_a_cancelled_sequence_frees_its_slot():
    engine = Engine(PagedLogits(max_num_seqs=1), decode=sample_loop)
    first, second = sequence_of([1], max_tokens=50), sequence_of([2], max_tokens=3)
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.remove([first])
    assert engine.num_running == 0
    run(engine)
    assert second.finished
    assert not first.finished


def test_a_row_of_nan_fails_that_sequence_alone():
    model = PagedLogits()
    model.poison[POISON] = "nan"
    engine = Engine(model, decode=sample_loop)
    good, bad = sequence_of([1], max_tokens=4), sequence_of([POISON], max_tokens=4)
    engine.add(good)
    engine.add(bad)
    failed = run(engine)
    assert list(failed) == [bad]
    assert "not finite" in failed[bad].message
    assert answer(good) == greedy_answer([1], num_tokens=4)


def test_a_failing_forward_fails_its_sequences_and_the_engine_continues():
    model = PagedLogits()
    model.poison[POISON] = "raise"
    engine = Engine(model, decode=sample_loop)
    bad, later = sequence_of([POISON], max_tokens=4), sequence_of([1], max_tokens=4)
    engine.add(bad)
    assert list(run(engine)) == [bad]
    engine.add(later)
    assert run(engine) == {}
    assert answer(later) == greedy_answer([1], num_tokens=4)


def test_a_custom_loop_gets_a_view_of_the_logits_and_shares_the_forward():
    """Appends the second best token each time."""
    views = []

    async def second_best(sequence: TokenSequence) -> None:
        while not sequence.finished:
            logits = await sequence.logits()
            views.append(logits)
            sequence.append(int(np.argsort(logits)[-2]))

    async def either(sequence: TokenSequence) -> None:
        await (second_best(sequence) if sequence.token_ids[0] == 9 else sample_loop(sequence))

    model = PagedLogits()
    engine = Engine(model, decode=either)
    own, plain = sequence_of([9], max_tokens=3), sequence_of([1], max_tokens=3)
    engine.add(own)
    engine.add(plain)
    run(engine)
    expected = [9]
    for _ in range(3):
        expected.append(int(np.argsort(logits_after(expected))[-2]))
    assert answer(own) == expected[1:]
    assert answer(plain) == greedy_answer([1], num_tokens=3)
    assert [view.base is not None for view in views] == [True] * 3
    assert (1, 1) in model.forwards


def test_a_loop_may_append_several_tokens_at_a_time():
    async def forced(sequence: TokenSequence) -> None:
        sequence.append(await sequence.sample())
        sequence.append(11)
        sequence.append(12)
        await sample_loop(sequence)

    engine = Engine(PagedLogits(), decode=forced)
    sequence = sequence_of([3], max_tokens=6)
    engine.add(sequence)
    run(engine)
    first = greedy_answer([3], num_tokens=1)
    assert answer(sequence) == [*first, 11, 12, *greedy_answer([3, *first, 11, 12], num_tokens=3)]


def test_a_loop_that_returns_early_ends_the_answer():
    async def two_tokens(sequence: TokenSequence) -> None:
        sequence.append(await sequence.sample())
        sequence.append(await sequence.sample())

    engine = Engine(PagedLogits(), decode=two_tokens)
    sequence = sequence_of([3], max_tokens=6)
    engine.add(sequence)
    run(engine)
    assert sequence.finish_reason is FinishReason.STOP
    assert len(answer(sequence)) == 2


async def _raises(sequence: TokenSequence) -> None:
    await sequence.sample()
    raise KeyError("oops")


async def _never_appends(sequence: TokenSequence) -> None:
    while True:
        await sequence.sample()


async def _outside_the_vocabulary(sequence: TokenSequence) -> None:
    await sequence.sample()
    sequence.append(VOCAB_SIZE)


async def _sleeps(sequence: TokenSequence) -> None:
    class Sleep:
        def __await__(self):
            yield "zzz"

    await Sleep()


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (_raises, "the decoding loop failed: KeyError: 'oops'"),
        (_never_appends, "without appending"),
        (_outside_the_vocabulary, "outside the vocabulary"),
        (_sleeps, "awaited neither"),
    ],
)
def test_a_broken_loop_fails_its_own_sequence_with_the_reason(decode, words):
    async def either(sequence: TokenSequence) -> None:
        await (decode(sequence) if sequence.token_ids[0] == 9 else sample_loop(sequence))

    engine = Engine(PagedLogits(), decode=either)
    bad, good = sequence_of([9], max_tokens=4), sequence_of([1], max_tokens=4)
    engine.add(bad)
    engine.add(good)
    failed = run(engine)
    assert list(failed) == [bad]
    assert words in failed[bad].message
    assert answer(good) == greedy_answer([1], num_tokens=4)


def test_logprobs_are_those_of_the_sampled_tokens():
    engine = Engine(PagedLogits(), decode=sample_loop)
    sequence = sequence_of([5], max_tokens=3, logprobs=True)
    engine.add(sequence)
    run(engine)
    delta = sequence.pop_delta()
    history = [5]
    for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
        row = logits_after(history).astype(np.float64)
        assert logprob == pytest.approx(row[token_id] - np.log(np.exp(row).sum()), abs=1e-5)
        history.append(token_id)


def test_a_token_in_place_of_the_sampled_one_has_its_own_logprob_or_none():
    async def replacing(sequence: TokenSequence) -> None:
        sampled = await sequence.sample()
        sequence.append(sampled ^ 1)
        sequence.append(sampled)  # at a place for which nothing was sampled
        sequence.append(await sequence.sample())

    def scores(**params: object) -> Delta:
        engine = Engine(PagedLogits(), decode=replacing)
        sequence = sequence_of([5], max_tokens=3, logprobs=True, **params)
        engine.add(sequence)
        run(engine)
        return sequence.pop_delta()

    unknown = scores(top_logprobs=0)
    assert [math.isnan(logprob) for logprob in unknown.logprobs] == [True, True, False]
    known = scores(logprob_token_ids=(unknown.token_ids[0],))
    row = logits_after([5]).astype(np.float64)
    expected = row[known.token_ids[0]] - np.log(np.exp(row).sum())
    assert known.logprobs[0] == pytest.approx(expected, abs=1e-5)
    assert known.top_logprobs[0] == ((known.token_ids[0], pytest.approx(expected, abs=1e-5)),)
    assert known.top_logprobs[1] == ()


def test_a_seed_gives_the_same_answer_alone_and_with_other_requests():
    def one(company: int) -> list[int]:
        engine = Engine(PagedLogits(max_num_seqs=8), decode=sample_loop)
        for i in range(company):
            engine.add(sequence_of([i], max_tokens=7 + i, temperature=1.0, seed=100 + i))
        engine.step()
        sequence = sequence_of([50], max_tokens=12, temperature=1.0, top_k=20, seed=7)
        engine.add(sequence)
        run(engine)
        return answer(sequence)

    assert one(0) == one(5)


def test_a_loop_may_append_tokens_before_it_samples():
    async def forced(sequence: TokenSequence) -> None:
        sequence.append(11)
        await sample_loop(sequence)

    engine = Engine(PagedLogits(), decode=forced)
    sequence = sequence_of([3], max_tokens=5)
    engine.add(sequence)
    run(engine)
    assert answer(sequence) == [11, *greedy_answer([3, 11], num_tokens=4)]


def test_ids_of_numpy_become_plain_integers():
    async def best(sequence: TokenSequence) -> None:
        while not sequence.finished:
            sequence.append((await sequence.logits()).argmax())

    engine = Engine(PagedLogits(), decode=best)
    sequence = sequence_of([3], max_tokens=3)
    engine.add(sequence)
    run(engine)
    assert {type(token_id) for token_id in sequence.pop_delta().token_ids} == {int}


@pytest.mark.parametrize("temperature", [1e-46, 1e-300, 1e-6])
def test_a_temperature_that_float32_cannot_hold_is_greedy(temperature):
    engine = Engine(PagedLogits(), decode=sample_loop)
    sequence = sequence_of([5], max_tokens=4, temperature=temperature)
    engine.add(sequence)
    assert run(engine) == {}
    assert answer(sequence) == greedy_answer([5], num_tokens=4)


async def _exits(sequence: TokenSequence) -> None:
    await sequence.sample()
    raise SystemExit


async def _ends_with_a_word_of_its_own(sequence: TokenSequence) -> None:
    await sequence.sample()
    sequence.finish("enough")


async def _appends_a_fraction(sequence: TokenSequence) -> None:
    await sequence.sample()
    sequence.append(0.5)


@pytest.mark.parametrize("decode", [_exits, _ends_with_a_word_of_its_own, _appends_a_fraction])
def test_nothing_that_a_loop_does_ends_the_engine(decode):
    engine = Engine(PagedLogits(), decode=decode)
    bad = sequence_of([9], max_tokens=4)
    engine.add(bad)
    assert list(run(engine)) == [bad]


def test_a_loop_that_raises_while_it_is_closed_is_dropped():
    async def stubborn(sequence: TokenSequence) -> None:
        try:
            await sample_loop(sequence)
        finally:
            raise RuntimeError("I will not go")

    engine = Engine(PagedLogits(max_num_seqs=1), decode=stubborn)
    first, second = sequence_of([1], max_tokens=50), sequence_of([2], max_tokens=50)
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.remove([first])
    engine.step()
    assert second.num_new_tokens == 1
    engine.remove([second])
    assert engine.num_running == 0


def ask(engine: Engine, *histories: list[int]) -> list[np.ndarray]:
    """Submit a logits request for each history, and run until there is nothing to do."""
    requests = [logits_request(history) for history in histories]
    for request in requests:
        request.submitted_s = engine.clock()
        engine.add_logits(request)
    rows = {}
    while (result := engine.step()) is not None:
        engine.check_integrity()
        assert not result.failed
        rows.update(result.logits)
    return [rows[request] for request in requests]


def assert_logits(rows: list[np.ndarray], *histories: list[int]) -> None:
    for row, history in zip(rows, histories, strict=True):
        np.testing.assert_array_equal(row, logits_after(history))


def test_a_growing_logits_request_is_computed_one_token_at_a_time():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    history = [5, 6, 7]
    for token_id in (8, 9, 10):
        assert_logits(ask(engine, history), history)
        history = [*history, token_id]
    assert model.forwards == [(3,), (1,), (1,)]
    assert model.copies == []


def test_loops_over_the_logits_share_their_steps_with_each_other_and_with_sequences_that_sample():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    sequence = sequence_of([4], max_tokens=20)
    engine.add(sequence)
    histories = [[1, 2, 3], [9, 8]]
    for token_id in range(30, 40):
        for history in histories:
            engine.add_logits(logits_request(history))
            history.append(token_id)
        result = engine.step()
        engine.check_integrity()
        assert sorted(r.token_ids for r, _ in result.logits) == sorted(h[:-1] for h in histories)
        for request, row in result.logits:
            assert_logits([row], request.token_ids)
    assert [sorted(forward) for forward in model.forwards] == [[1, 2, 3], *[[1, 1, 1]] * 9]
    run(engine)
    assert answer(sequence) == greedy_answer([4], num_tokens=20)


def test_a_row_of_logits_belongs_to_its_receiver():
    model = PagedLogits()
    [row] = ask(Engine(model, decode=sample_loop), [1, 2])
    assert not np.shares_memory(row, model.buffer)


def test_logits_requests_with_a_common_prefix_share_its_blocks():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    first, second = list(range(20)), [*range(18), 60, 61, 62]
    assert_logits(ask(engine, first), first)
    assert_logits(ask(engine, second), second)
    assert_logits(ask(engine, [*first, 1], [*second, 2]), [*first, 1], [*second, 2])
    assert model.forwards == [(20,), (5,), (1, 1)]


def test_logits_requests_without_a_common_block_are_computed_whole():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    ask(engine, [1, 2, 3, 4, 5])
    ask(engine, [1, 2, 3, 40, 50])
    assert model.forwards == [(5,), (5,)]


def test_a_repeated_logits_request_computes_one_token():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    for length in (3, 4):
        for _ in range(2):
            assert_logits(ask(engine, list(range(length))), list(range(length)))
    assert model.forwards == [(3,), (1,), (1,), (1,)]


def test_the_least_recently_used_blocks_are_evicted():
    model = PagedLogits(max_num_seqs=2, max_length=8, num_blocks=3)
    engine = Engine(model, decode=sample_loop, clock=Clock())
    for history in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        ask(engine, history)
    model.forwards.clear()
    ask(engine, [10])
    assert_logits(ask(engine, [4, 5, 6, 7]), [4, 5, 6, 7])
    assert_logits(ask(engine, [1, 2, 3, 4]), [1, 2, 3, 4])
    assert model.forwards == [(1,), (1,), (4,)]


def test_a_loop_that_resumes_quickly_keeps_its_place_until_it_pauses_long():
    model, clock = PagedLogits(max_num_seqs=1), Clock()
    engine = Engine(model, decode=sample_loop, clock=clock)
    ask(engine, [1, 2])
    ask(engine, [1, 2, 3])
    sequence = sequence_of([4], max_tokens=3)
    engine.add(sequence)
    assert engine.step() is None
    ask(engine, [1, 2, 3, 4])
    assert model.forwards == [(2,), (1,), (1,)]
    clock.now_s += 1
    run(engine)
    assert answer(sequence) == greedy_answer([4], num_tokens=3)


def test_a_resumed_loop_goes_before_later_arrivals():
    engine = Engine(PagedLogits(max_num_seqs=1), decode=sample_loop, clock=Clock())
    ask(engine, [1, 2])
    engine.add(sequence_of([4], max_tokens=3))
    again = logits_request([1, 2, 3])
    again.submitted_s = engine.clock()
    engine.add_logits(again)
    assert [request for request, _ in engine.step().logits] == [again]


def test_a_logits_request_of_the_context_length_is_answered():
    model = PagedLogits(max_length=8)
    full = list(range(8))
    engine = Engine(model, decode=sample_loop)
    requests = [logits_request(full, max_length=8), logits_request([9, 9], max_length=8)]
    for request in requests:
        engine.add_logits(request)
    rows = dict(engine.step().logits)
    engine.check_integrity()
    assert_logits([rows[request] for request in requests], full, [9, 9])


def test_logits_requests_get_logits_that_are_not_finite_unchanged():
    model = PagedLogits()
    model.poison[POISON] = "nan"
    [row] = ask(Engine(model, decode=sample_loop), [POISON])
    assert np.isnan(row).all()


def test_a_failing_forward_fails_its_logits_requests_and_caches_nothing():
    model = PagedLogits()
    engine = Engine(model, decode=sample_loop)
    ask(engine, [1, 2])
    model.poison[POISON] = "raise"
    bad = logits_request([1, 2, POISON])
    engine.add_logits(bad)
    assert list(engine.step().failed) == [bad]
    model.poison.clear()
    assert_logits(ask(engine, [1, 2, POISON, 3]), [1, 2, POISON, 3])
    assert model.forwards[-1] == (2,), "what was computed before is still there"


def test_a_cancelled_request_is_never_answered():
    engine = Engine(PagedLogits(max_num_seqs=1), decode=sample_loop)
    ask(engine, [1, 2])
    running, waiting = logits_request([1, 2, 3]), logits_request([7])
    engine.add_logits(running)
    engine.add_logits(waiting)
    engine.remove([running, waiting])
    assert engine.num_running == engine.num_waiting == 0
    assert engine.step() is None


@pytest.mark.parametrize("seed", with_extended(range(30), always=range(5)))
def test_other_loops_and_evictions_never_change_an_answer(seed):
    """Random loops over few slots: each continues with one or more tokens, or starts again."""
    rng = random.Random(seed)
    clock = Clock()
    model = PagedLogits(max_num_seqs=rng.choice([1, 2, 3, 6]), max_length=48)
    engine = Engine(model, decode=sample_loop, max_num_batched_tokens=16, clock=clock)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(3)]
    histories = [rng.choice(stems)[: rng.randint(1, 30)] for _ in range(5)]
    pending: dict[int, LogitsRequest] = {}
    sequences: list[TokenSequence] = []
    cancelled: set[TokenSequence] = set()
    num_answers = 0
    for _ in range(150):
        clock.now_s += rng.choice([0.0, 0.001, 0.05])
        for caller in range(5):
            if caller in pending and rng.random() < 0.02:
                engine.remove([pending.pop(caller)])
            elif caller not in pending and rng.random() < 0.6:
                request = logits_request(histories[caller], max_length=48)
                request.submitted_s = clock()
                engine.add_logits(request)
                pending[caller] = request
        if rng.random() < 0.1:
            prompt = rng.choice(stems)[: rng.randint(1, 30)]
            sequences.append(sequence_of(prompt, max_tokens=rng.randint(1, 9)))
            engine.add(sequences[-1])
        if sequences and rng.random() < 0.02:
            cancelled.update(s for s in sequences[-1:] if not s.finished)
            engine.remove(sequences[-1:])
        result = engine.step()
        engine.check_integrity()
        if result is None:
            continue
        assert not result.failed
        for request, row in result.logits:
            assert_logits([row], request.token_ids)
            caller = next(c for c, r in pending.items() if r is request)
            del pending[caller]
            num_answers += 1
            num_more = rng.choice([1, 1, 1, 1, 1, 1, 3])
            history = [*request.token_ids, *(rng.randrange(VOCAB_SIZE) for _ in range(num_more))]
            if len(history) > 48 or rng.random() < 0.1:
                history = rng.choice(stems)[: rng.randint(1, 30)]
            histories[caller] = history
    assert num_answers > 20
    engine.remove(pending.values())
    clock.now_s += 10
    run(engine)
    for sequence in set(sequences) - cancelled:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert answer(sequence) == greedy_answer(prompt, num_tokens=sequence.params.max_tokens)


def test_a_running_sequence_ends_with_the_step_in_which_its_deadline_passes():
    clock = Clock()
    engine = Engine(PagedLogits(), decode=sample_loop, clock=clock)
    sequence, other = sequence_of([5, 6], deadline_s=2.5, max_tokens=9), sequence_of([7], max_tokens=9)
    engine.add(sequence)
    engine.add(other)
    while not sequence.finished:
        clock.now_s += 1
        result = engine.step()
        engine.check_integrity()
    assert sequence in result.advanced
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.LENGTH, "deadline")
    assert answer(sequence) == greedy_answer([5, 6], num_tokens=3)[: len(answer(sequence))]
    run(engine)
    assert answer(other) == greedy_answer([7], num_tokens=9)


def test_a_waiting_sequence_ends_when_its_deadline_passes():
    clock = Clock()
    engine = Engine(PagedLogits(max_num_seqs=1), decode=sample_loop, clock=clock)
    first, waiting = sequence_of([5, 6], max_tokens=5), sequence_of([7], deadline_s=1.5)
    engine.add(first)
    engine.add(waiting)
    engine.step()
    assert not waiting.finished
    clock.now_s = 1.5
    result = engine.step()
    assert waiting in result.advanced
    delta = waiting.pop_delta()
    assert (delta.token_ids, delta.text, delta.stop_reason) == ((), "", "deadline")
    assert engine.num_waiting == 0
    run(engine)
    assert answer(first) == greedy_answer([5, 6], num_tokens=5)


def test_a_sequence_ends_in_the_middle_of_its_prompt_when_its_deadline_passes():
    clock = Clock()
    engine = Engine(PagedLogits(), decode=sample_loop, clock=clock, max_num_batched_tokens=4)
    sequence = sequence_of(list(range(5, 25)), deadline_s=1.0)
    engine.add(sequence)
    engine.step()
    clock.now_s = 1.0
    assert engine.step().advanced == (sequence,)
    assert answer(sequence) == []
    assert engine.num_running == 0
    engine.check_integrity()


def test_a_failing_forward_also_fails_expired_sequences():
    clock = Clock()
    engine = Engine(PagedLogits(), decode=failing_loop, clock=clock)
    sequence = sequence_of([5], deadline_s=0.0)
    engine.add(sequence)
    result = engine.step()
    assert list(result.failed) == [sequence]
    assert result.advanced == ()


async def failing_loop(sequence: TokenSequence) -> None:
    raise ValueError("no")
