from __future__ import annotations

import threading

import pytest

from genserve.errors import Closed, ContextLengthExceeded, InvalidRequest
from genserve.prompt import Chat, Message
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def ensemble(tiny_repository):
    repository = Repository([tiny_repository])
    repository.start()
    yield repository.text_model("tiny")
    repository.close()


def test_a_prompt_is_tokenised_as_the_tokenizer_does(ensemble):
    request = ensemble.prepare("hello there", SamplingParams())
    assert list(request.prompt_token_ids) == ensemble.tokenizer.encode("hello there")


def test_a_chat_goes_through_the_template(ensemble):
    request = ensemble.prepare(Chat(messages=(Message(role="user", content="hi"),)), SamplingParams())
    assert "assistant" in ensemble.tokenizer.decode(request.prompt_token_ids)


def test_a_seed_is_drawn_where_none_is_given(ensemble):
    drawn = {ensemble.prepare("x", SamplingParams()).seeds for _ in range(4)}
    assert len(drawn) == 4
    assert ensemble.prepare("x", SamplingParams(seed=5)).seeds == (5,)


@pytest.mark.parametrize("num_tokens", [-1, 0, 1])
def test_a_prompt_fits_up_to_the_context_less_one(ensemble, num_tokens):
    length = ensemble.max_length - 1 + num_tokens
    prompt = "!" * length
    assert len(ensemble.tokenizer.encode(prompt)) == length
    if length < ensemble.max_length:
        assert ensemble.prepare(prompt, SamplingParams()).num_prompt_tokens == length
    else:
        with pytest.raises(ContextLengthExceeded, match=str(ensemble.max_length)) as raised:
            ensemble.prepare(prompt, SamplingParams())
        assert raised.value.field == "prompt"


def test_lengths_beyond_the_room_are_clamped_to_it(ensemble):
    room = ensemble.max_length - 10

    def lengths(**asked: int) -> tuple[int | None, int]:
        prepared = ensemble.prepare("!" * 10, SamplingParams(**asked)).params
        return prepared.max_tokens, prepared.min_tokens

    assert lengths(max_tokens=room - 1) == (room - 1, 0)
    assert lengths(max_tokens=room) == lengths(max_tokens=room + 1) == lengths(max_tokens=10**6) == (room, 0)
    assert lengths(max_tokens=room + 5, min_tokens=room + 5) == (room, room)
    assert lengths(min_tokens=room + 1) == (None, room)


def test_the_error_of_a_long_prompt_has_both_numbers(ensemble):
    with pytest.raises(ContextLengthExceeded) as raised:
        ensemble.prepare("!" * (ensemble.max_length + 5), SamplingParams())
    error = raised.value
    assert (error.num_tokens, error.max_length) == (ensemble.max_length + 5, ensemble.max_length)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", SamplingParams(), "prompt"),
        ("x", SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids"),
        (
            "x",
            SamplingParams(allowed_token_ids=(5, 6), suppress_tokens=(6,), stop_token_ids=(5,), min_tokens=1),
            "min_tokens",
        ),
    ],
)
def test_parameters_are_validated_against_the_model(ensemble, prompt, params, field):
    with pytest.raises(InvalidRequest) as raised:
        ensemble.prepare(prompt, params)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [
        (3, "left", slice(-3, None)),
        (3, "right", slice(3)),
        (1, "left", slice(-1, None)),
        (100, "left", slice(None)),
    ],
)
def test_a_prompt_is_truncated_as_the_request_asks(ensemble, limit, side, kept):
    prompt = list(range(20, 40))
    params = SamplingParams(truncate_prompt_tokens=limit, truncation_side=side)
    assert ensemble.prepare(prompt, params).prompt_token_ids == tuple(prompt[kept])


def test_a_prompt_is_truncated_to_the_room_in_the_context(ensemble):
    long = [7] * ensemble.max_length + [8]
    request = ensemble.prepare(long, SamplingParams(truncate_prompt_tokens=-1))
    assert request.prompt_token_ids == tuple(long[2:])
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=10)
    assert ensemble.prepare(long, params).num_prompt_tokens == ensemble.max_length - 10
    # A number that fits no context says nothing about this one: half of it is left for the answer.
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=10**6)
    assert ensemble.prepare(long, params).num_prompt_tokens == ensemble.max_length // 2


def test_truncation_on_the_left_keeps_the_bos_token(ensemble, monkeypatch):
    monkeypatch.setattr(ensemble.tokenizer, "bos_id", 5)
    params = SamplingParams(truncate_prompt_tokens=3)
    assert ensemble.prepare([5, 6, 7, 8, 9], params).prompt_token_ids == (5, 8, 9)
    assert ensemble.prepare([6, 5, 7, 8, 9], params).prompt_token_ids == (7, 8, 9)
    assert ensemble.prepare([5, 6], SamplingParams(truncate_prompt_tokens=1)).prompt_token_ids == (5,)


def test_the_deadline_of_all_choices_begins_when_the_request_arrives(ensemble):
    params = SamplingParams(max_time_ms=1500)
    sequences = ensemble.builder.sequences(
        ensemble.prepare("x", params, num_choices=2, arrived_s=7.0)
    )
    assert [sequence.deadline_s for sequence in sequences] == [8.5, 8.5]
    before_s = ensemble.engine.now_s
    request = ensemble.prepare("x", params)
    assert before_s + 1.5 <= request.deadline_s <= ensemble.engine.now_s + 1.5
    assert ensemble.prepare("x", SamplingParams()).deadline_s is None


def test_bad_words_are_spelled_once_for_all_choices_of_a_request(ensemble, monkeypatch):
    encoded = []
    encode = ensemble.tokenizer.encode

    def noted(text, **options):
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(ensemble.tokenizer, "encode", noted)
    request = ensemble.prepare([7, 8], SamplingParams(bad_words=("you",)), num_choices=3)
    sequences = ensemble.builder.sequences(request)
    assert encoded == ["you", " you"]
    for sequence in sequences:
        banned = sequence.sampling.edits([*sequence.token_ids, *encode("you")[:-1]], row=0).banned
        assert encode("you")[-1] in banned.token_ids


def test_slow_preparation_delays_neither_structured_outputs_nor_other_models(
    ensemble, tiny_repository
):
    other = Repository([tiny_repository])
    other.start()
    may_go_on = threading.Event()
    slow = [ensemble.run_soon(may_go_on.wait, compiles=False) for _ in range(50)]
    assert ensemble.run_soon(lambda: "form", compiles=True).result(timeout=30) == "form"
    assert other.text_model("tiny").run_soon(lambda: "other", compiles=False).result(timeout=30) == "other"
    assert not any(one.done() for one in slow)
    may_go_on.set()
    assert all(one.result(timeout=30) for one in slow)
    closed = other.text_model("tiny")
    other.close()
    with pytest.raises(Closed):
        closed.run_soon(lambda: None, compiles=False)
