from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from genserve.generation.engine import Engine
from genserve.generation.speculation import Speculation
from genserve.generation.token_sequence import TokenSequence
from genserve.request import Delta, FinishReason
from tests.fakes.drafts import Foreseen, Oracle
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer
from tests.fakes.sequences import Clock, logits_request, sample_loop, sequence_of

PROMPT = [5, 6, 7]


class Fixed:
    """A draft that says the same each time; counts how often it was asked."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids
        self.num_asked = 0

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        self.num_asked += 1
        return self.token_ids[:count]

    def drop(self, sequence: TokenSequence) -> None:
        pass


def speculating(model: PagedLogits, draft=None, *, decode=sample_loop) -> Engine:
    speculation = Speculation(draft or Oracle())
    return Engine(model, decode=decode, speculation=speculation, clock=Clock())


def run(engine: Engine, *sequences: TokenSequence) -> list[Delta]:
    for sequence in sequences:
        engine.add(sequence)
    deltas = []
    while (result := engine.step()) is not None:
        engine.check_integrity()
        assert not result.failed
        deltas += [delta for s in result.advanced if (delta := s.take_delta())]
    return deltas


def answer(sequence: TokenSequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


class Right(Oracle):
    """Always all of what was asked for."""

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        return greedy_answer(sequence.token_ids, num_tokens=count)


def test_an_answer_that_was_foreseen_takes_a_step_for_so_many_tokens():
    model = PagedLogits()
    sequence = sequence_of(PROMPT, max_tokens=13)
    deltas = run(speculating(model, Right()), sequence)
    assert answer(sequence) == greedy_answer(PROMPT, num_tokens=13)
    assert model.forwards == ["prefill 1x3", *["verify 1"] * 3]     # 1 and 3 times 4
    assert [len(delta.token_ids) for delta in deltas] == [1, 4, 4, 4]


def test_the_first_wrong_token_is_replaced_and_ends_the_step():
    model = PagedLogits()
    right = greedy_answer(PROMPT, num_tokens=3)
    sequence = sequence_of(PROMPT, max_tokens=3)
    engine = speculating(model, Fixed(right[1], (right[2] + 1) % VOCAB_SIZE, 0))
    engine.add(sequence)
    engine.step()
    result = engine.step()
    assert (result.num_drafted, result.num_accepted) == (3, 1)
    assert answer(sequence) == right


def test_what_ends_an_answer_ends_it_in_the_middle_of_what_was_accepted():
    right = greedy_answer(PROMPT, num_tokens=8)
    position = next(i for i in range(2, 8) if right[i] not in right[:i] and i % 4 != 0)
    for how, reason in (
        ({"stop_at": right[position]}, FinishReason.STOP_STRING),
        ({"eos_token_ids": [right[position]]}, FinishReason.END_OF_SEQUENCE),
        ({"stop_token_ids": (right[position],)}, FinishReason.END_OF_SEQUENCE),
        ({"max_tokens": position + 1}, FinishReason.LENGTH),
    ):
        sequence = sequence_of(PROMPT, **how)
        deltas = run(speculating(PagedLogits(), Right()), sequence)
        assert answer(sequence) == right[: position + 1]
        assert sequence.finish_reason is reason
        assert deltas[-1].usage.completion_tokens == position + 1


@pytest.mark.parametrize("seed", range(10))
def test_with_every_rule_of_sampling_the_answer_is_the_one_without(seed):
    params = {
        "temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2,
        "min_tokens": 20, "logit_bias": {3: 2.0}, "seed": seed, "logprobs": True, "top_logprobs": 2,
        "max_tokens": 40, "prompt_logprobs": 1,
    }  # fmt: skip
    plain = sequence_of(PROMPT, eos_token_ids=[3], **params)
    expected = run(Engine(PagedLogits(), decode=sample_loop), plain)
    model = PagedLogits()
    sequence = sequence_of(PROMPT, eos_token_ids=[3], **params)
    found = run(speculating(model, Foreseen([plain], error_rate=0.1)), sequence)
    assert sequence.token_ids == plain.token_ids
    for part in ("logprobs", "top_logprobs", "prompt_logprobs"):
        assert [x for d in found for x in getattr(d, part)] == [
            x for d in expected for x in getattr(d, part)
        ]
    assert len(model.forwards) < 30


def test_a_loop_of_ones_own_is_given_the_same_rows():
    async def second_best(sequence):
        while not sequence.finished:
            row = await sequence.logits()
            sequence.append(int(np.argsort(row)[-2]))

    plain = sequence_of(PROMPT, max_tokens=12)
    run(Engine(PagedLogits(), decode=second_best), plain)
    model = PagedLogits()
    sequence = sequence_of(PROMPT, max_tokens=12)
    run(speculating(model, Foreseen([plain], error_rate=0.1), decode=second_best), sequence)
    assert sequence.token_ids == plain.token_ids
    assert "verify 1" in model.forwards


def test_tokens_that_a_loop_appends_by_itself_are_run_together():
    async def in_threes(sequence):
        while not sequence.finished:
            sequence.append(await sequence.sample())
            for token_id in (1, 2):
                if not sequence.finished:
                    sequence.append(token_id)

    plain, model = sequence_of(PROMPT, max_tokens=20), PagedLogits()
    run(Engine(PagedLogits(), decode=in_threes), plain)
    sequence = sequence_of(PROMPT, max_tokens=20)
    run(speculating(model, Fixed(), decode=in_threes), sequence)
    assert sequence.token_ids == plain.token_ids
    assert model.forwards.count("verify 1") == 6


def test_a_request_for_logits_shares_a_verification_and_gets_its_row():
    rows: list[np.ndarray] = []
    model = PagedLogits()
    speculation = Speculation(Right())
    speculation.note_step(num_rows=2, seconds=1.0, verified=False)
    speculation.note_step(num_rows=2, seconds=1.2, verified=True)
    engine = Engine(model, decode=sample_loop, speculation=speculation, clock=Clock())
    engine.add(sequence_of(PROMPT, max_tokens=20))
    engine.step()
    history = [8, 9]
    for _ in range(3):
        engine.add(logits_request(history, on_logits=rows.append))
        while not (result := engine.step()).answered:
            pass
        history.append(int(result.answered[0][1].argmax()))
    assert history == [8, 9, *greedy_answer([8, 9], num_tokens=3)]
    assert "verify 2" in model.forwards


def test_a_sequence_at_the_end_of_its_slot_is_decoded_token_by_token():
    model = PagedLogits(max_length=14)
    sequence = sequence_of(PROMPT, max_length=14)
    run(speculating(model, Right()), sequence)
    assert len(sequence.token_ids) == 14
    assert model.forwards[-1] == "decode 1"


def test_a_sequence_that_leaves_is_forgotten():
    oracle = Oracle()
    engine = speculating(PagedLogits(), oracle)
    sequence = sequence_of(PROMPT)
    engine.add(sequence)
    for _ in range(3):
        engine.step()
    engine.remove([sequence])
    assert oracle.dropped == [sequence]


def decoding(*prompts: list[int]) -> list[TokenSequence]:
    sequences = [sequence_of(prompt) for prompt in prompts]
    for sequence in sequences:
        sequence.num_computed = sequence.num_prompt_tokens - 1
    return sequences


def measured(draft, *, cost: float) -> Speculation:
    """A speculation that has seen what a verification takes, in decodes."""
    speculation = Speculation(PagedLogits(), draft)
    for num_rows in (1, 2, 3):
        for _ in range(20):
            speculation.note_step(num_rows=num_rows, seconds=1.0, verified=False)
            speculation.note_step(num_rows=num_rows, seconds=cost, verified=True)
    return speculation


def test_a_verification_that_takes_as_long_as_its_tokens_is_not_planned():
    sequences = decoding(PROMPT)
    assert isinstance(measured(Fixed(1, 2, 3), cost=1.5).plan(sequences, num_rows=1), Verify)
    assert measured(Fixed(1, 2, 3), cost=4.0).plan(sequences, num_rows=1) is None


def test_drafts_that_were_wrong_are_not_asked_for_until_some_steps_later():
    draft, sequences = Fixed(1, 2, 3), decoding(PROMPT)
    speculation = measured(draft, cost=1.5)
    for _ in range(10):
        speculation.note_outcome(sequences[0], accepted=0)
    plans = [speculation.plan(sequences, num_rows=1) for _ in range(300)]
    assert plans[:10] == [None] * 10
    assert draft.num_asked < 300
    assert any(plans)


def test_one_row_too_many_is_decoded():
    sequences = decoding(*[PROMPT] * 2)
    speculation = measured(Fixed(1, 2, 3), cost=1.5)
    assert speculation.plan(sequences, num_rows=speculation.verifier.max_rows) is not None
    assert speculation.plan(sequences, num_rows=speculation.verifier.max_rows + 1) is None


def test_one_that_has_a_draft_does_not_slow_down_those_that_have_none():
    class OfFirst(Fixed):
        def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
            return super().propose(sequence, count) if sequence.token_ids[0] == 1 else ()

    sequences = decoding([1, 2], [3, 4], [5, 6])
    assert measured(OfFirst(7, 8, 9), cost=1.9).plan(sequences[:1], num_rows=1) is not None
    assert measured(OfFirst(7, 8, 9), cost=1.9).plan(sequences, num_rows=3) is None


def test_a_draft_that_fails_is_asked_no_more_and_the_answer_goes_on(caplog):
    class Broken(Fixed):
        def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
            self.num_asked += 1
            raise RuntimeError("out of memory")

    draft, sequence = Broken(), sequence_of(PROMPT, max_tokens=10)
    run(speculating(PagedLogits(), draft), sequence)
    assert answer(sequence) == greedy_answer(PROMPT, num_tokens=10)
    assert draft.num_asked == 1
    assert "drafting failed" in caplog.text


def test_one_long_wait_in_a_verification_does_not_turn_it_off():
    sequences, speculation = decoding(PROMPT), measured(Fixed(1, 2, 3), cost=2.0)
    speculation.note_step(num_rows=1, seconds=100.0, verified=True)
    assert speculation.plan(sequences, num_rows=1) is not None
