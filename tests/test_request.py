from __future__ import annotations

import pytest

from genserve.errors import InvalidRequest, StreamBroken
from genserve.request import Delta, Message, join_deltas, read_messages, sampling_params


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": None}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop": ["a" * 257]}, "stop[0]"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"max_tokns": 5}, "max_tokns"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, field):
    with pytest.raises(InvalidRequest) as raised:
        sampling_params(options)
    assert raised.value.field == field


def test_loose_options_become_strict_parameters():
    params = sampling_params({"stop": "END", "stop_token_ids": [3], "temperature": 1, "seed": 2**64 - 1})
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert sampling_params({"stop": None, "stop_token_ids": None}) == sampling_params({})


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0]"),
        ([Message(role="user", content="a"), {"role": "root", "content": "b"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(messages, field):
    with pytest.raises(InvalidRequest) as raised:
        read_messages(messages)
    assert raised.value.field == field


def test_deltas_without_an_end_are_no_answer():
    with pytest.raises(StreamBroken):
        join_deltas([Delta(text="half", token_ids=(1,))])
