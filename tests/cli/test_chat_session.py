from __future__ import annotations

import pytest

from genserve.errors import InvalidRequest
from tests.cli.fake_model import FakeModel, chat_with


def test_a_question_is_sent_with_the_options_and_what_was_said_before() -> None:
    model = FakeModel()
    session = chat_with(model, system="Be brief.")
    session.ask("hi")
    session.ask("bye")
    assert [m.content for m in model.asked[-1]] == ["Be brief.", "hi", "HI", "bye"]
    assert model.options[-1] == {"temperature": 0.5}


def test_a_refused_question_is_not_remembered() -> None:
    session = chat_with(FakeModel())
    with pytest.raises(InvalidRequest):
        session.ask("refuse this")
    assert len(session.conversation) == 0
