from __future__ import annotations

import numpy as np
import pytest

from genserve.completion import FinishReason, Usage
from genserve.engine.engine_request import LogitsRequest
from genserve.errors import ContextLengthExceeded, InvalidRequest, ModelFailed
from genserve.sampling.repetition_detection import RepetitionDetection
from tests.fakes.logits import VOCAB_SIZE
from tests.fakes.sequences import sequence_of

TWICE = RepetitionDetection(max_pattern_size=2, min_count=2)


def test_the_end_of_sequence_token_is_counted_and_has_no_text():
    sequence = sequence_of([1, 2], eos_token_ids=[3])
    sequence.append(5)
    sequence.append(3)
    delta = sequence.pop_delta()
    assert delta.text == "<5>"
    assert delta.token_ids == (5, 3)
    assert delta.finish_reason is FinishReason.STOP
    assert delta.usage == Usage(prompt_tokens=2, completion_tokens=2)


def test_ignore_eos_does_not_ignore_stop_token_ids():
    sequence = sequence_of([1], eos_token_ids=[3], ignore_eos=True, stop_token_ids=(4,))
    sequence.append(3)
    assert not sequence.finished
    sequence.append(4)
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.stop_reason == 4


def test_a_stop_string_ends_with_its_own_reason():
    sequence = sequence_of([1], stop_at=6)
    sequence.append(5)
    sequence.append(6)
    assert sequence.finish_reason is FinishReason.STOP
    delta = sequence.pop_delta()
    assert delta.text == "<5>"
    assert delta.stop_reason == "<6>"


@pytest.mark.parametrize(("stop_token_ids", "stop_reason"), [((3,), None), ((4,), 4)])
def test_the_stop_reason_of_a_stop_token_is_its_id(stop_token_ids, stop_reason):
    sequence = sequence_of([1], eos_token_ids=[3], stop_token_ids=stop_token_ids)
    sequence.append(stop_token_ids[0])
    assert sequence.pop_delta().stop_reason == stop_reason


def test_stream_interval_delays_all_deltas_but_the_first():
    sequence = sequence_of([1], stream_interval=3, max_tokens=6, logprobs=True)
    deltas = []
    for token_id in range(6):
        sequence.append(token_id)
        deltas.append(sequence.pop_delta())
    found = [(at, d.token_ids, d.text, len(d.logprobs)) for at, d in enumerate(deltas) if d]
    assert found == [(0, (0,), "<0>", 1), (3, (1, 2, 3), "<1><2><3>", 3), (5, (4, 5), "<4><5>", 2)]


def test_repetition_detection_ends_an_answer():
    sequence = sequence_of([7, 8, 7, 8], repetition_detection=TWICE)
    for token_id in (7, 8, 7):
        sequence.append(token_id)
        assert not sequence.finished
    sequence.append(8)
    assert sequence.finish_reason is FinishReason.REPETITION
    assert sequence.stop_reason == "repetition_detected"


def test_repetition_detection_waits_for_min_tokens():
    sequence = sequence_of([1], repetition_detection=TWICE, min_tokens=4)
    for token_id in (7, 7, 7):
        sequence.append(token_id)
        assert not sequence.finished
    sequence.append(7)
    assert sequence.finish_reason is FinishReason.REPETITION


def test_include_stop_str_in_output_keeps_the_text_of_a_stop_token():
    sequence = sequence_of([1], stop_token_ids=(4,), include_stop_str_in_output=True)
    sequence.append(4)
    assert sequence.pop_delta().text == "<4>"


@pytest.mark.parametrize(("max_tokens", "expected"), [(3, 3), (None, 6), (6, 6)])
def test_the_answer_ends_at_max_tokens_or_at_the_end_of_the_context(max_tokens, expected):
    sequence = sequence_of([1, 2], max_length=8, max_tokens=max_tokens)
    while not sequence.finished:
        sequence.append(5)
    assert sequence.num_new_tokens == expected
    assert sequence.finish_reason is FinishReason.LENGTH


def test_deltas_join_to_the_answer():
    sequence = sequence_of([1], max_tokens=3)
    assert sequence.pop_delta() is None
    sequence.append(5)
    first = sequence.pop_delta()
    assert sequence.pop_delta() is None
    sequence.append(6)
    sequence.append(7)
    rest = sequence.pop_delta()
    assert first.text + rest.text == "<5><6><7>"
    assert first.finish_reason is None
    assert first.usage is None
    assert rest.token_ids == (6, 7)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_an_id_outside_the_vocabulary_is_rejected(token_id):
    with pytest.raises(ModelFailed, match=rf" {token_id}\b"):
        sequence_of([1]).append(token_id)


def test_nothing_is_appended_after_the_end():
    sequence = sequence_of([1], max_tokens=1)
    sequence.append(5)
    with pytest.raises(ModelFailed, match="finished sequence"):
        sequence.append(5)


def request(token_ids) -> LogitsRequest:
    return LogitsRequest(token_ids, on_logits=lambda _: None, vocab_size=10, max_length=4)


@pytest.mark.parametrize("token_ids", [[1, 2, 9], (1, 2, 9), np.array([1, 2, 9], dtype=np.int32)])
def test_ids_may_be_lists_and_arrays(token_ids):
    assert request(token_ids).token_ids == [1, 2, 9]
    assert type(request(token_ids).token_ids[0]) is int


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        ([], "no token ids"),
        ([1, 10], "10 .* 10"),
        ([-1], "-1"),
        ([1.0], "float64"),
        ([[1, 2]], r"int64 \[1, 2\]"),
    ],
)
def test_invalid_ids_are_rejected(token_ids, words):
    with pytest.raises(InvalidRequest, match=words):
        request(token_ids)


def test_more_ids_than_the_context_are_rejected():
    assert request([1] * 4).num_pending == 4
    with pytest.raises(ContextLengthExceeded, match=r"\b5\b.*\b4\b"):
        request([1] * 5)
