from __future__ import annotations

import pytest

from genserve.completion import Delta, join_deltas
from genserve.errors import InvalidRequest, StreamBroken
from genserve.prompt import MAX_CHAT_MESSAGES, Chat, Message, read_chat, read_messages


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


def test_a_chat_has_so_many_messages_at_the_most():
    message = Message(role="user", content="a")
    assert len(Chat(messages=read_messages([message] * MAX_CHAT_MESSAGES)).messages) == MAX_CHAT_MESSAGES
    for make in (read_messages, read_chat, lambda messages: Chat(messages=tuple(messages))):
        with pytest.raises(InvalidRequest, match="messages has 1025 messages; the limit is 1024") as raised:
            make([message] * (MAX_CHAT_MESSAGES + 1))
        assert raised.value.field == "messages"


def test_deltas_without_an_end_are_no_answer():
    with pytest.raises(StreamBroken):
        join_deltas([Delta(text="half", token_ids=(1,))])
