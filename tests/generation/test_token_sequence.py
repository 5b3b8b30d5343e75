from __future__ import annotations

import pytest

from genserve.completion import FinishReason, Usage
from genserve.errors import ModelFailed
from genserve.sampling.repetition_detection import RepetitionDetection
from tests.fakes.logits import VOCAB_SIZE
from tests.fakes.sequences import sequence_of

TWICE = RepetitionDetection(max_pattern_size=2, min_count=2)


def test_the_end_of_sequence_token_is_counted_and_has_no_text():
    sequence = sequence_of([1, 2], eos_token_ids=[3])
    sequence.append(5)
    sequence.append(3)
    delta = sequence.take_delta()
    assert delta.text == "<5>"
    assert delta.token_ids == (5, 3)
    assert delta.finish_reason is FinishReason.END_OF_SEQUENCE
    assert delta.usage == Usage(prompt_tokens=2, completion_tokens=2)


def test_ignore_eos_goes_on_but_stop_token_ids_still_end():
    sequence = sequence_of([1], eos_token_ids=[3], ignore_eos=True, stop_token_ids=(4,))
    sequence.append(3)
    assert not sequence.finished
    sequence.append(4)
    assert sequence.finish_reason is FinishReason.END_OF_SEQUENCE
    assert sequence.stop_reason == 4


def test_a_stop_string_ends_with_its_own_reason():
    sequence = sequence_of([1], stop_at=6)
    sequence.append(5)
    sequence.append(6)
    assert sequence.finish_reason is FinishReason.STOP_STRING
    delta = sequence.take_delta()
    assert delta.text == "<5>"
    assert delta.stop_reason == "<6>"


@pytest.mark.parametrize(("stop_token_ids", "stop_reason"), [((3,), None), ((4,), 4)])
def test_the_end_of_the_sequence_has_no_name_and_a_stop_token_has_its_id(stop_token_ids, stop_reason):
    sequence = sequence_of([1], eos_token_ids=[3], stop_token_ids=stop_token_ids)
    sequence.append(stop_token_ids[0])
    assert sequence.take_delta().stop_reason == stop_reason


def test_deltas_may_have_several_tokens_but_the_first_comes_at_once():
    sequence = sequence_of([1], stream_interval=3, max_tokens=6, logprobs=True)
    deltas = []
    for token_id in range(6):
        sequence.append(token_id)
        deltas.append(sequence.take_delta())
    found = [(at, d.token_ids, d.text, len(d.logprobs)) for at, d in enumerate(deltas) if d]
    assert found == [(0, (0,), "<0>", 1), (3, (1, 2, 3), "<1><2><3>", 3), (5, (4, 5), "<4><5>", 2)]


def test_an_answer_that_goes_round_in_circles_ends():
    sequence = sequence_of([7, 8, 7, 8], repetition_detection=TWICE)
    for token_id in (7, 8, 7):
        sequence.append(token_id)
        assert not sequence.finished
    sequence.append(8)
    assert sequence.finish_reason is FinishReason.REPETITION
    assert sequence.stop_reason == "repetition_detected"


def test_before_min_tokens_it_may_go_round_in_circles():
    sequence = sequence_of([1], repetition_detection=TWICE, min_tokens=4)
    for token_id in (7, 7, 7):
        sequence.append(token_id)
        assert not sequence.finished
    sequence.append(7)
    assert sequence.finish_reason is FinishReason.REPETITION


def test_the_text_of_a_stop_token_is_kept_where_that_is_asked_for():
    sequence = sequence_of([1], stop_token_ids=(4,), include_stop_str_in_output=True)
    sequence.append(4)
    assert sequence.take_delta().text == "<4>"


@pytest.mark.parametrize(("max_tokens", "expected"), [(3, 3), (None, 6), (6, 6)])
def test_the_answer_ends_at_max_tokens_or_at_the_end_of_the_context(max_tokens, expected):
    sequence = sequence_of([1, 2], max_length=8, max_tokens=max_tokens)
    while not sequence.finished:
        sequence.append(5)
    assert sequence.num_new_tokens == expected
    assert sequence.finish_reason is FinishReason.LENGTH


def test_deltas_come_once_and_join_to_the_answer():
    sequence = sequence_of([1], max_tokens=3)
    assert sequence.take_delta() is None
    sequence.append(5)
    first = sequence.take_delta()
    assert sequence.take_delta() is None
    sequence.append(6)
    sequence.append(7)
    rest = sequence.take_delta()
    assert first.text + rest.text == "<5><6><7>"
    assert first.finish_reason is None
    assert first.usage is None
    assert rest.token_ids == (6, 7)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_an_id_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(ModelFailed, match="outside the vocabulary"):
        sequence_of([1]).append(token_id)


def test_nothing_is_appended_after_the_end():
    sequence = sequence_of([1], max_tokens=1)
    sequence.append(5)
    with pytest.raises(ModelFailed, match="has ended"):
        sequence.append(5)
