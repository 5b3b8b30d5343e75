from __future__ import annotations

import pytest

from genserve.errors import InvalidRequest
from genserve.prompt import MAX_CHAT_MESSAGES, Chat, Message, read_chat, read_messages


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([Message(role="user", content="a"), {"role": "root", "content": "b"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
    ],
)
def test_an_invalid_message_is_rejected_with_its_index(messages, field):
    with pytest.raises(InvalidRequest) as raised:
        read_messages(messages)
    assert raised.value.field == field


def test_an_unknown_key_of_a_message_is_named():
    with pytest.raises(InvalidRequest, match="'mood'") as raised:
        read_messages([{"role": "user", "content": "a", "mood": "b"}])
    assert raised.value.field == "messages[0]"


def test_the_number_of_messages_is_limited():
    message = Message(role="user", content="a")
    assert len(Chat(messages=read_messages([message] * MAX_CHAT_MESSAGES)).messages) == MAX_CHAT_MESSAGES
    for make in (read_messages, read_chat, lambda messages: Chat(messages=tuple(messages))):
        with pytest.raises(InvalidRequest, match=str(MAX_CHAT_MESSAGES)) as raised:
            make([message] * (MAX_CHAT_MESSAGES + 1))
        assert raised.value.field == "messages"


def test_developer_messages_are_system_messages():
    [message] = read_messages([{"role": "developer", "content": "D"}])
    assert message == Message(role="system", content="D")
