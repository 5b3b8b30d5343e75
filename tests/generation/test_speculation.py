from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from genserve.completion import Delta, FinishReason
from genserve.generation.engine import Engine
from genserve.generation.engine_request import TokenSequence
from genserve.generation.speculation import Speculation
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
    assert model.forwards == [(3,), (6,), (6,)]
    assert [len(delta.token_ids) for delta in deltas] == [1, 6, 6]


def test_the_first_wrong_token_is_replaced_and_ends_the_step():
    right = greedy_answer(PROMPT, num_tokens=3)
    sequence = sequence_of(PROMPT, max_tokens=9)
    engine = speculating(PagedLogits(), Fixed(right[1], (right[2] + 1) % VOCAB_SIZE, 0))
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
    assert max(model.forwards) > (1,)


def test_tokens_that_a_loop_appends_by_itself_are_run_together():
    async def in_threes(sequence):
        while not sequence.finished:
            sequence.append(await sequence.sample())
            for token_id in (1, 2):
                if not sequence.finished:
                    sequence.append(token_id)

    model, sequence = PagedLogits(), sequence_of(PROMPT, max_tokens=20)
    engine = Engine(model, decode=in_threes)
    run(engine, sequence)
    assert model.forwards == [(3,)] * 7


def test_a_request_for_logits_shares_the_step_of_a_draft_and_gets_its_row():
    model = PagedLogits()
    engine = speculating(model, Right())
    engine.add(sequence_of(PROMPT, max_tokens=30))
    engine.step()
    history = [8, 9]
    for _ in range(3):
        engine.add_logits(logits_request(history))
        [(_, row)] = engine.step().answered
        history.append(int(row.argmax()))
    assert history == [8, 9, *greedy_answer([8, 9], num_tokens=3)]
    assert model.forwards[2] in [(5, 1), (6, 1), (1, 6)]


def test_nothing_is_drafted_beside_a_prompt_which_it_would_hold_up():
    model = PagedLogits()
    engine = speculating(model, Right())
    engine.add(sequence_of(PROMPT, max_tokens=30))
    engine.step()
    engine.add(sequence_of([1] * 5, max_tokens=5))
    engine.step()
    assert model.forwards[1] == (1, 5)
    engine.step()
    assert model.forwards[2] == (5, 4)


def test_nothing_is_drafted_behind_the_end_of_the_context():
    model = PagedLogits(max_length=14)
    sequence = sequence_of(PROMPT, max_length=14)
    run(speculating(model, Right()), sequence)
    assert len(sequence.token_ids) == 14
    assert model.forwards == [(3,), (6,), (4,)]


def test_a_sequence_that_leaves_is_forgotten():
    oracle = Oracle()
    engine = speculating(PagedLogits(), oracle)
    sequence = sequence_of(PROMPT)
    engine.add(sequence)
    for _ in range(3):
        engine.step()
    engine.remove([sequence])
    assert oracle.dropped == [sequence]


def propose(speculation: Speculation, sequence: TokenSequence, *, min_chance: float) -> int:
    return len(speculation.draft(sequence, max_tokens=10, min_chance=min_chance))


def test_fewer_tokens_are_drafted_the_more_they_must_be_worth():
    sequence, speculation = sequence_of(PROMPT), Speculation(Fixed(1, 2, 3, 4, 5, 6, 7))
    counts = [propose(speculation, sequence, min_chance=chance) for chance in (0.0, 0.2, 0.5, 0.9)]
    assert counts == [5, 3, 1, 0]


def test_drafts_that_were_wrong_are_not_asked_for_until_some_steps_later():
    draft, sequence = Fixed(1, 2, 3), sequence_of(PROMPT)
    speculation = Speculation(draft)
    assert propose(speculation, sequence, min_chance=0.2)
    for _ in range(15):
        speculation.note_outcome(sequence, num_drafted=3, num_accepted=0)
    counts = [propose(speculation, sequence, min_chance=0.2) for _ in range(300)]
    assert counts[:10] == [0] * 10
    assert any(counts)
    assert draft.num_asked < 300


def test_drafts_that_were_right_are_longer():
    sequence, speculation = sequence_of(PROMPT), Speculation(Fixed(1, 2, 3, 4, 5))
    before = propose(speculation, sequence, min_chance=0.3)
    for _ in range(5):
        speculation.note_outcome(sequence, num_drafted=5, num_accepted=5)
    assert propose(speculation, sequence, min_chance=0.3) > before


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
