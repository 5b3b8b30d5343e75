from __future__ import annotations

import random

import pytest

from genserve.generation.engine import Engine
from genserve.generation.engine_request import TokenSequence
from genserve.generation.speculation import DraftModel, Speculation
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer
from tests.fakes.sequences import Clock, sample_loop, sequence_of


def drafting(model: PagedLogits) -> DraftModel:
    return DraftModel(model, vocab_size=VOCAB_SIZE)


def grow(sequence: TokenSequence, *token_ids: int) -> None:
    for token_id in token_ids:
        sequence.append(token_id)


def test_the_best_tokens_of_the_model_are_proposed():
    sequence = sequence_of([5, 6, 7])
    assert drafting(PagedLogits()).propose(sequence, 4) == greedy_answer([5, 6, 7], num_tokens=4)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_blocks", [16, 24, 48])
def test_whatever_follows_each_draft_the_next_is_that_of_a_plain_loop(seed, num_blocks):
    """Sequences that take turns in fewer blocks, and go on as was drafted, or not, or in part."""
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


def test_only_what_is_new_is_computed():
    model = PagedLogits()
    draft, sequence = drafting(model), sequence_of([5, 6, 7])
    proposed = draft.propose(sequence, 3)
    grow(sequence, *proposed, 9)
    model.forwards.clear()
    draft.propose(sequence, 3)
    assert model.forwards == [(2,), (1,), (1,)]


def test_the_sequence_that_was_asked_for_least_recently_loses_its_blocks():
    model = PagedLogits(num_blocks=16)
    draft, sequences = drafting(model), [sequence_of([number] * 20) for number in range(4)]
    for number in (0, 1, 0, 2, 0):      # two of them fill the cache
        draft.propose(sequences[number], 2)
    model.forwards.clear()
    draft.propose(sequences[0], 2)
    draft.propose(sequences[1], 2)
    assert model.forwards == [(1,), (1,), (20,), (1,)]


def test_a_long_prompt_is_computed_in_chunks_that_propose_nothing():
    model = PagedLogits(max_length=700, num_blocks=175)
    sequence = sequence_of([i % VOCAB_SIZE for i in range(600)], max_length=700)
    draft = drafting(model)
    assert [len(draft.propose(sequence, 2)) for _ in range(3)] == [0, 0, 2]
    assert model.forwards[:3] == [(256,), (256,), (88,)]


def test_a_model_that_drafts_for_itself_is_always_right():
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
