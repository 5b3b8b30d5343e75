from __future__ import annotations

from genserve.cli.chat_session import Conversation, Exchange
from genserve.prompt import Message


def test_the_turns_come_in_order_after_the_system_prompt() -> None:
    conversation = Conversation(system="Be brief.")
    conversation.add("Hi", answer="Hello.")
    assert conversation.messages_with("Bye") == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Hello."),
        Message(role="user", content="Bye"),
    ]


def test_a_question_that_is_only_asked_is_not_remembered() -> None:
    conversation = Conversation()
    conversation.messages_with("Hi")
    assert conversation.messages() == []


def test_undo_forgets_one_exchange_and_tells_it() -> None:
    conversation = Conversation()
    conversation.add("1", answer="one")
    conversation.add("2", answer="two")
    assert conversation.undo() == Exchange(question="2", answer="two")
    assert [m.content for m in conversation.messages()] == ["1", "one"]
    conversation.undo()
    assert conversation.undo() is None


def test_clear_keeps_the_system_prompt() -> None:
    conversation = Conversation(system="Be brief.")
    conversation.add("Hi", answer="Hello.")
    conversation.clear()
    assert conversation.messages() == [Message(role="system", content="Be brief.")]
