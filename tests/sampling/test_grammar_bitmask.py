"""Grammars of structured outputs in the engine and in the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from genserve.completion import FinishReason
from genserve.engine.engine import Engine
from genserve.engine.speculation import Speculation
from genserve.errors import InvalidRequest, ModelFailed
from genserve.sampling.batch_sampler import sample
from genserve.sampling.grammar_bitmask import grammar_bitmask
from tests.fakes.drafts import Foreseen
from tests.fakes.grammars import Steps
from tests.fakes.logits import VOCAB_SIZE, PagedLogits
from tests.fakes.sequences import Clock, sample_loop, sequence_of

EOS = 5


def run(engine: Engine, *sequences) -> dict:
    """Run to the end; returns the errors of failed ones."""
    failed = {}
    for sequence in sequences:
        engine.add(sequence)
    while result := engine.step():
        failed |= result.failed
        engine.check_integrity()
    return failed


def answer(sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.mark.parametrize("num_tokens", [64, 70, 320])
def test_each_bit_forbids_its_token(num_tokens):
    allowed = [0, 31, 32, 63]
    masks = grammar_bitmask([None, Steps(allowed), Steps([7])], num_tokens=num_tokens)
    assert masks is not None
    assert masks.rows == (1, 2)
    assert masks.forced == {2}
    (_, of_first), (_, of_second) = masks.forbidden(num_tokens)
    assert np.flatnonzero(~of_first).tolist() == allowed
    assert np.flatnonzero(~of_second).tolist() == [7]


def test_rows_without_a_grammar_have_no_bitmask():
    assert grammar_bitmask([None, None], num_tokens=64) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_does_not_affect_the_rows_of_others(temperature):
    def row(**grammar):
        return sequence_of([3, 4], max_tokens=6, temperature=temperature, seed=11, **grammar)

    alone = row()
    run(Engine(PagedLogits(), decode=sample_loop), alone)
    for constrained in ([[8, 9, 10]] * 4, [[VOCAB_SIZE - 1]] * 4):
        plain, held = row(), row(grammar=Steps(*constrained))
        assert run(Engine(PagedLogits(), decode=sample_loop), plain, held) == {}
        assert answer(plain) == answer(alone)
        assert all(token_id in step for token_id, step in zip(answer(held), constrained, strict=True))


def test_an_answer_ends_when_its_grammar_is_complete_even_before_min_tokens():
    for limits in ({"max_tokens": 9, "min_tokens": 5}, {"max_tokens": 2}):
        sequence = sequence_of([3, 4], grammar=Steps([8], [9]), eos_token_ids=[EOS], **limits)
        run(Engine(PagedLogits(), decode=sample_loop), sequence)
        assert answer(sequence) == [8, 9]
        assert sequence.finish_reason is FinishReason.STOP


def test_max_tokens_ends_an_incomplete_answer():
    sequence = sequence_of([3, 4], grammar=Steps([8], [9], [10]), max_tokens=2)
    run(Engine(PagedLogits(), decode=sample_loop), sequence)
    assert (answer(sequence), sequence.finish_reason) == ([8, 9], FinishReason.LENGTH)


def test_a_failing_grammar_fails_only_its_own_request():
    plain, held = sequence_of([3, 4], max_tokens=6), sequence_of([3, 4], grammar=Steps([8], []), max_tokens=6)
    failed = run(Engine(PagedLogits(), decode=sample_loop), plain, held)
    assert list(failed) == [held]
    assert isinstance(failed[held], InvalidRequest)
    assert "too many states" in str(failed[held])
    assert len(answer(plain)) == 6


def test_a_grammar_and_edits_that_leave_no_token_fail_the_request():
    held = sequence_of([3, 4], grammar=Steps([8], [9]), suppress_tokens=(8,), max_tokens=6)
    failed = run(Engine(PagedLogits(), decode=sample_loop), held)
    assert isinstance(failed[held], InvalidRequest)
    assert "leaves no token to sample: suppress_tokens, structured_outputs" in str(failed[held])


def test_edits_act_on_the_tokens_that_the_grammar_allows():
    held = sequence_of([3, 4], grammar=Steps([8, 9], [8, 9]), logit_bias={9: 100.0, 20: 100.0}, max_tokens=2)
    run(Engine(PagedLogits(), decode=sample_loop), held)
    assert answer(held) == [9, 9]


def test_log_probabilities_are_those_before_or_after_the_bitmask():
    for mode, known in (("raw", False), ("processed", True)):
        held = sequence_of([3, 4], grammar=Steps([8]), logprobs=True, logprobs_mode=mode, max_tokens=2)
        run(Engine(PagedLogits(), decode=sample_loop), held)
        delta = held.pop_delta()
        assert delta is not None
        assert (delta.logprobs[0] == 0.0) is known


def test_a_decoding_loop_that_appends_a_forbidden_token_fails():
    async def stubborn(sequence):
        await sequence.sample()
        sequence.append(20)

    held = sequence_of([3, 4], grammar=Steps([8, 9]), max_tokens=6)
    failed = run(Engine(PagedLogits(), decode=stubborn), held)
    assert isinstance(failed[held], ModelFailed)
    assert "token id 20 is not allowed by the request's grammar: it is not allowed" in str(failed[held])


def test_a_decoding_loop_may_append_allowed_tokens():
    async def own(sequence):
        sequence.append(8)
        while not sequence.finished:
            sequence.append(await sequence.sample())

    held = sequence_of([3, 4], grammar=Steps([8, 9], [10]), max_tokens=6)
    assert run(Engine(PagedLogits(), decode=own), held) == {}
    assert answer(held) == [8, 10]


def halves() -> Steps:
    """36 times: one of half the ids, in turns."""
    return Steps(*[range(32), range(32, 64)] * 18)


def held_alone(prompt: Sequence[int]) -> list[int]:
    sequence = sequence_of(prompt, max_length=48, grammar=halves())
    run(Engine(PagedLogits(), decode=sample_loop), sequence)
    return answer(sequence)


def test_a_preempted_answer_keeps_the_state_of_its_grammar():
    model = PagedLogits(max_num_seqs=2, max_length=48, block_size=4, num_blocks=16)
    engine = Engine(model, decode=sample_loop)
    held = [sequence_of([n] * 10, max_length=48, grammar=halves()) for n in (1, 2)]
    engine.add(held[0])
    engine.step()
    assert run(engine, held[1]) == {}
    assert held[1].num_preemptions
    for sequence in held:
        assert answer(sequence) == held_alone(sequence.token_ids[:10])


@pytest.mark.parametrize("error_rate", [0.0, 0.3])
def test_speculation_does_not_change_an_answer_with_a_grammar(error_rate):
    prompt = [5] * 10
    known = sequence_of([*prompt, *held_alone(prompt)])
    known.num_prompt_tokens = len(prompt)
    model = PagedLogits(max_length=64)
    speculation = Speculation(Foreseen([known], error_rate=error_rate))
    engine = Engine(model, decode=sample_loop, speculation=speculation, clock=Clock())
    held = sequence_of(prompt, max_length=48, grammar=halves())
    assert run(engine, held) == {}
    assert answer(held) == answer(known)
    assert max(model.forwards[1:]) > (1,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numpy_and_torch_apply_the_same_bitmask(temperature):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 320), dtype=np.float32)
    steps = [None, range(300, 320), [7], None, rng.choice(320, 200, replace=False).tolist(), [319, 0]]

    def sequences():
        return [
            sequence_of(
                [1],
                vocab_size=320,
                temperature=temperature,
                seed=row,
                logprobs=True,
                grammar=None if step is None else Steps(list(step)),
            )
            for row, step in enumerate(steps)
        ]

    of_numpy = sample(logits.copy(), sequences())
    of_torch = sample(torch.from_numpy(logits.copy()), sequences())
    assert [p.token_id for p in of_torch] == [p.token_id for p in of_numpy]
    for picked, step in zip(of_torch, steps, strict=True):
        assert step is None or picked.token_id in step
