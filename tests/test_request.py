from __future__ import annotations

import pytest

from genserve.errors import InvalidRequest, StreamBroken
from genserve.request import Delta, Message, join_deltas, read_messages


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
