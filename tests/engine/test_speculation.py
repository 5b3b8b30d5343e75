from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.completion import Delta, FinishReason
from genserve.engine.engine import Engine
from genserve.engine.speculation import DraftModel, PromptLookup, Proposer, Speculation
from genserve.engine.token_sequence import TokenSequence
from tests.fakes.drafts import Foreseen, Oracle
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer
from tests.fakes.sequences import Clock, logits_request, sample_loop, sequence_of
from tests.support.representatives import with_extended

PROMPT = [5, 6, 7]


class Fixed(Proposer):
    """Proposes the same tokens every time; counts the calls."""

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
        deltas += [delta for s in result.advanced if (delta := s.pop_delta())]
    return deltas


def answer(sequence: TokenSequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


class Right(Oracle):
    """Always proposes as many tokens as it may."""

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        return greedy_answer(sequence.token_ids, num_tokens=count)


def test_a_correctly_drafted_answer_takes_one_step_per_draft():
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


def test_an_answer_may_end_in_the_middle_of_the_accepted_tokens():
    right = greedy_answer(PROMPT, num_tokens=8)
    position = next(i for i in range(2, 8) if right[i] not in right[:i] and i % 4 != 0)
    for how, reason in (
        ({"stop_at": right[position]}, FinishReason.STOP),
        ({"eos_token_ids": [right[position]]}, FinishReason.STOP),
        ({"stop_token_ids": (right[position],)}, FinishReason.STOP),
        ({"max_tokens": position + 1}, FinishReason.LENGTH),
    ):
        sequence = sequence_of(PROMPT, **how)
        deltas = run(speculating(PagedLogits(), Right()), sequence)
        assert answer(sequence) == right[: position + 1]
        assert sequence.finish_reason is reason
        assert deltas[-1].usage.completion_tokens == position + 1


@pytest.mark.parametrize("seed", with_extended(range(10), always=range(5)))
def test_speculation_changes_no_answer_whatever_the_sampling_parameters(seed):
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
        assert [x for d in found for x in getattr(d, part)] == [x for d in expected for x in getattr(d, part)]
    assert len(model.forwards) < 30


def test_a_custom_loop_gets_the_same_rows_with_speculation():
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


def test_tokens_that_a_loop_appends_together_are_computed_in_one_step():
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


def test_a_logits_request_shares_a_step_with_a_draft_and_gets_its_row():
    model = PagedLogits()
    engine = speculating(model, Right())
    engine.add(sequence_of(PROMPT, max_tokens=30))
    engine.step()
    history = [8, 9]
    for _ in range(3):
        engine.add_logits(logits_request(history))
        [(_, row)] = engine.step().logits
        history.append(int(row.argmax()))
    assert history == [8, 9, *greedy_answer([8, 9], num_tokens=3)]
    assert model.forwards[2] in [(5, 1), (6, 1), (1, 6)]


def test_nothing_is_drafted_in_a_step_with_a_prompt():
    model = PagedLogits()
    engine = speculating(model, Right())
    engine.add(sequence_of(PROMPT, max_tokens=30))
    engine.step()
    engine.add(sequence_of([1] * 5, max_tokens=5))
    engine.step()
    assert model.forwards[1] == (1, 5)
    engine.step()
    assert model.forwards[2] == (5, 4)


def test_nothing_is_drafted_beyond_the_context():
    model = PagedLogits(max_length=14)
    sequence = sequence_of(PROMPT, max_length=14)
    run(speculating(model, Right()), sequence)
    assert len(sequence.token_ids) == 14
    assert model.forwards == [(3,), (6,), (4,)]


def test_a_sequence_that_leaves_is_dropped_from_the_proposer():
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


def test_fewer_tokens_are_drafted_if_they_must_be_more_likely():
    sequence, speculation = sequence_of(PROMPT), Speculation(Fixed(1, 2, 3, 4, 5, 6, 7))
    counts = [propose(speculation, sequence, min_chance=chance) for chance in (0.0, 0.2, 0.5, 0.9)]
    assert counts == [5, 3, 1, 0]


def test_after_wrong_drafts_drafting_pauses_for_some_steps():
    draft, sequence = Fixed(1, 2, 3), sequence_of(PROMPT)
    speculation = Speculation(draft)
    assert propose(speculation, sequence, min_chance=0.2)
    for _ in range(15):
        speculation.record_outcome(sequence, num_drafted=3, num_accepted=0)
    counts = [propose(speculation, sequence, min_chance=0.2) for _ in range(300)]
    assert counts[:10] == [0] * 10
    assert any(counts)
    assert draft.num_asked < 300


def test_drafts_grow_after_right_ones():
    sequence, speculation = sequence_of(PROMPT), Speculation(Fixed(1, 2, 3, 4, 5))
    before = propose(speculation, sequence, min_chance=0.3)
    for _ in range(5):
        speculation.record_outcome(sequence, num_drafted=5, num_accepted=5)
    assert propose(speculation, sequence, min_chance=0.3) > before


class Kinds(Fixed):
    """Makes guesses of given kinds, one after the other."""

    def __init__(self, *kinds: int | None) -> None:
        super().__init__(1, 2, 3)
        self.kinds = list(kinds)

    def kind(self, sequence: TokenSequence) -> int | None:
        return self.kinds.pop(0)


def test_a_new_sequence_starts_with_what_others_have_shown():
    speculation = Speculation(Fixed(1, 2, 3))
    for _ in range(30):
        other = sequence_of(PROMPT)
        propose(speculation, other, min_chance=0.0)
        speculation.record_outcome(other, num_drafted=3, num_accepted=0)
        speculation.drop(other)
    assert propose(speculation, sequence_of(PROMPT), min_chance=0.5) == 0


def test_after_wrong_drafts_of_all_new_sequences_try_again_some_steps_later():
    speculation, sequence = Speculation(Fixed(1, 2, 3)), sequence_of(PROMPT)
    propose(speculation, sequence, min_chance=0.0)
    for _ in range(200):
        speculation.record_outcome(sequence, num_drafted=3, num_accepted=0)
    counts = [propose(speculation, sequence_of(PROMPT), min_chance=0.5) for _ in range(3000)]
    assert not any(counts[:1000])
    assert any(counts)


def test_each_kind_of_guess_has_a_rate_of_its_own():
    sequence, speculation = sequence_of(PROMPT), Speculation(Kinds(*[2] * 10, 2, 4, None))
    for _ in range(10):
        propose(speculation, sequence, min_chance=0.0)
        speculation.record_outcome(sequence, num_drafted=3, num_accepted=0)
    assert [propose(speculation, sequence, min_chance=0.5) for _ in range(3)] == [0, 1, 0]


def test_a_failing_proposer_is_not_asked_again_and_the_answer_continues(caplog):
    class Broken(Fixed):
        def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
            self.num_asked += 1
            raise RuntimeError("out of memory")

    draft, sequence = Broken(), sequence_of(PROMPT, max_tokens=10)
    run(speculating(PagedLogits(), draft), sequence)
    assert answer(sequence) == greedy_answer(PROMPT, num_tokens=10)
    assert draft.num_asked == 1
    assert "drafting failed" in caplog.text


def proposed(token_ids: list[int], count: int) -> list[int]:
    return list(PromptLookup().propose(sequence_of(token_ids, max_length=10_000), count))


def searched(token_ids: list[int], count: int) -> list[int]:
    """Return the result of a linear search."""
    for size in (4, 3, 2):
        last = token_ids[-size:]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(last) == size and token_ids[end - size : end] == last:
                copied = list(token_ids)
                for i in range(count):
                    copied.append(copied[end + i])
                return copied[len(token_ids) :]
    return []


def test_tokens_behind_the_last_ngram_are_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 2, 3], 3) == [4, 5, 6]


def test_a_longer_ngram_comes_before_a_later_one():
    assert proposed([1, 2, 3, 4, 50, 9, 3, 4, 60, 2, 3, 4], 1) == [50]


def test_of_equal_ngrams_the_latest_counts():
    assert proposed([2, 3, 50, 2, 3, 60, 2, 3], 1) == [60]


def test_new_tokens_have_no_draft():
    assert proposed([1, 2, 3, 4], 5) == []
    assert proposed([1], 5) == []


def test_a_periodic_text_is_continued_with_its_period():
    assert proposed([7, 8, 9, 7, 8, 9, 7, 8], 5) == [9, 7, 8, 9, 7]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6))
def test_the_index_agrees_with_a_linear_search(token_ids, count):
    assert proposed(token_ids, count) == searched(token_ids, count)


def test_a_growing_sequence_gets_the_same_proposals_as_a_new_one():
    rng = random.Random(0)
    sequence, lookup = sequence_of([1, 2, 1], max_length=1000), PromptLookup()
    for _ in range(200):
        assert list(lookup.propose(sequence, 4)) == proposed(sequence.token_ids, 4)
        for _ in range(rng.randint(1, 3)):
            sequence.append(rng.randrange(4))


def test_the_kind_of_a_guess_is_the_length_of_its_ngram():
    def kind(*token_ids: int) -> int | None:
        return PromptLookup().kind(sequence_of(token_ids, max_length=100))

    assert kind(1, 2, 3, 4, 5, 1, 2, 3, 4) == 4
    assert kind(1, 2, 3, 9, 5, 1, 2, 3) == 3
    assert kind(1, 2, 9, 5, 1, 2) == 2
    assert kind(1, 2, 3, 1) is None


def test_sequences_do_not_share_ngrams():
    lookup = PromptLookup()
    lookup.propose(sequence_of([1, 2, 3, 4, 5]), 3)
    assert list(lookup.propose(sequence_of([9, 1, 2, 3]), 3)) == []


def drafting(model: PagedLogits) -> DraftModel:
    return DraftModel(model, vocab_size=VOCAB_SIZE)


def grow(sequence: TokenSequence, *token_ids: int) -> None:
    for token_id in token_ids:
        sequence.append(token_id)


def test_the_draft_model_proposes_its_most_likely_tokens():
    sequence = sequence_of([5, 6, 7])
    assert drafting(PagedLogits()).propose(sequence, 4) == greedy_answer([5, 6, 7], num_tokens=4)


@pytest.mark.parametrize("seed", with_extended(range(10), always=range(5)))
@pytest.mark.parametrize("num_blocks", [16, 24, 48])
def test_drafts_do_not_depend_on_which_earlier_ones_were_accepted(seed, num_blocks):
    """Sequences take turns in too few blocks, and accept all, some or none of each draft."""
    rng = random.Random(seed)
    draft = drafting(PagedLogits(num_blocks=num_blocks))
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    sequences = [sequence_of(prompt) for prompt in prompts]
    for _ in range(40):
        sequence = rng.choice(sequences)
        if rng.random() < 0.1:
            draft.drop(sequence)
        proposed = draft.propose(sequence, 4)
        if len(sequence.token_ids) + 4 > 64:
            assert proposed == ()
            continue
        assert proposed == greedy_answer(sequence.token_ids, num_tokens=4)
        grow(sequence, *proposed[: rng.randint(0, 4)])
        if rng.random() < 0.5 and not sequence.finished:
            grow(sequence, rng.randrange(VOCAB_SIZE))


def test_a_draft_model_computes_only_new_tokens():
    model = PagedLogits()
    draft, sequence = drafting(model), sequence_of([5, 6, 7])
    proposed = draft.propose(sequence, 3)
    grow(sequence, *proposed, 9)
    model.forwards.clear()
    draft.propose(sequence, 3)
    assert model.forwards == [(2,), (1,), (1,)]


def test_a_draft_model_evicts_the_least_recently_drafted_sequence():
    model = PagedLogits(num_blocks=16)
    draft, sequences = drafting(model), [sequence_of([number] * 20) for number in range(4)]
    for number in (0, 1, 0, 2, 0):  # two of them fill the cache
        draft.propose(sequences[number], 2)
    model.forwards.clear()
    draft.propose(sequences[0], 2)
    draft.propose(sequences[1], 2)
    assert model.forwards == [(1,), (1,), (20,), (1,)]


def test_a_draft_model_proposes_nothing_while_it_computes_a_long_prompt():
    model = PagedLogits(max_length=700, num_blocks=175)
    sequence = sequence_of([i % VOCAB_SIZE for i in range(600)], max_length=700)
    draft = drafting(model)
    assert [len(draft.propose(sequence, 2)) for _ in range(3)] == [0, 0, 2]
    assert model.forwards[:3] == [(256,), (256,), (88,)]


def test_all_tokens_of_a_model_that_drafts_for_itself_are_accepted():
    engine = Engine(
        PagedLogits(), decode=sample_loop, speculation=Speculation(drafting(PagedLogits())), clock=Clock()
    )
    sequence = sequence_of([5, 6, 7], max_tokens=41)
    engine.add(sequence)
    num_drafted = num_accepted = 0
    while (result := engine.step()) is not None:
        num_drafted += result.num_drafted
        num_accepted += result.num_accepted
    assert sequence.token_ids[3:] == greedy_answer([5, 6, 7], num_tokens=41)
    assert num_drafted == num_accepted > 20
