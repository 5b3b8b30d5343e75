from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from genserve.cli.chat_session import ChatSession
from genserve.cli.slash_commands import COMMANDS, run_slash
from genserve.errors import InvalidRequest
from genserve.sampling.sampling_options import SamplingOptions
from tests.cli.fake_model import FakeModel, chat_with


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def session(model: FakeModel) -> ChatSession:
    return chat_with(model)


@pytest.fixture
def said(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> object:
    def run(line: str) -> str:
        capsys.readouterr()
        run_slash(session, line)
        return capsys.readouterr().out

    return run


def contents(session: ChatSession) -> list[str]:
    return [message.content for message in session.conversation.messages()]


def test_help_names_every_command(said) -> None:
    shown = said("/help")
    assert all(command.usage in shown for command in COMMANDS.values())


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/hlep", "unknown command /hlep; did you mean /help?"),
        ("/xyzzy 1", "unknown command /xyzzy; see /help"),
    ],
)
def test_an_unknown_command_suggests_the_nearest(said, line: str, answer: str) -> None:
    assert said(line) == f"{answer}\n"


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("temperature 0.25", "temperature", 0.25),
        ("max_tokens 5", "max_tokens", 5),
        ("max_tokens none", "max_tokens", None),
        ("ignore_eos true", "ignore_eos", True),
        ("stop END", "stop", "END"),
        ('stop ["a b", "c"]', "stop", ["a b", "c"]),
        ("max_tokens=5", "max_tokens", 5),
        ("stop a=b", "stop", "a=b"),
    ],
)
def test_set_changes_a_parameter_of_the_next_answer(
    session: ChatSession, model: FakeModel, said, typed: str, name: str, value: object
) -> None:
    said(f"/set {typed}")
    session.ask("hi")
    assert model.options[-1][name] == value


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ("temperature -1", "temperature must be between 0 and 100"),
        ("temperature hot", "temperature"),
        ("temprature 1", "temperature"),
        ("temprature", "temperature"),
        ("stop 5", "stop must be text"),
    ],
)
def test_set_rejects_an_invalid_value_and_changes_nothing(
    session: ChatSession, said, typed: str, complaint: str
) -> None:
    before = dict(session.options)
    assert complaint in said(f"/set {typed}")
    assert session.options == before


@pytest.mark.parametrize(
    ("line", "name", "note"),
    [
        ("temperature 1", "temperature", "temperature = 0.5\n"),
        ("stop END", "stop", "stop is at its default\n"),
    ],
)
def test_set_without_a_value_resets_the_parameter(
    session: ChatSession, said, line: str, name: str, note: str
) -> None:
    before = dict(session.options)
    said(f"/set {line}")
    assert session.options != before
    assert said(f"/set {name}") == note
    assert session.options == before


def test_set_alone_shows_the_changed_parameters_and_the_names_of_the_others(said) -> None:
    shown = said("/set")
    assert shown.startswith("temperature = 0.5\ntop_p = 0.9, the default of the model\nat their defaults: ")
    assert ", max_tokens, " in shown


def test_system_sets_and_removes_the_system_prompt(session: ChatSession, said) -> None:
    said("/system Be very brief.")
    assert contents(session) == ["Be very brief."]
    said("/system")
    assert contents(session) == []


def test_undo_and_clear_remove_exchanges(session: ChatSession, said) -> None:
    for question in ("one", "two", "three"):
        session.ask(question)
    assert said("/undo") == "removed: three\n"
    assert contents(session) == ["one", "ONE", "two", "TWO"]
    said("/clear")
    assert contents(session) == []
    assert said("/undo") == "nothing to undo\n"


def test_retry_asks_the_last_question_again_without_its_answer(
    session: ChatSession, model: FakeModel, said
) -> None:
    session.ask("one")
    session.ask("two")
    assert said("/retry").startswith("TWO\n2 tokens")
    assert [m.content for m in model.asked[-1]] == ["one", "ONE", "two"]
    assert contents(session) == ["one", "ONE", "two", "TWO"]


def test_a_failed_retry_keeps_the_conversation(session: ChatSession) -> None:
    session.ask("one")
    session.options = SamplingOptions(temperature=-1)
    with pytest.raises(InvalidRequest):
        run_slash(session, "/retry")
    assert contents(session) == ["one", "ONE"]


def test_retry_in_an_empty_chat_does_nothing(said) -> None:
    assert said("/retry") == "nothing to retry\n"


def test_save_writes_the_messages_to_a_new_file_only(session: ChatSession, said, tmp_path: Path) -> None:
    session.ask("grüß dich")
    path = tmp_path / "my chat.json"
    said(f"/save {path}")
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "messages": [{"role": "user", "content": "grüß dich"}, {"role": "assistant", "content": "GRÜSS DICH"}]
    }
    assert "not saved" in said(f"/save {path}")
    assert said("/save") == "usage: /save FILE\n"


def test_save_leaves_no_partial_file_on_a_full_disk(session: ChatSession, said, tmp_path: Path) -> None:
    session.ask("a question that is longer than the disk is large")
    path = tmp_path / "chat.json"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        note = said(f"/save {path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert note.startswith("not saved: ")
    assert not path.exists()


def test_stats_count_answers_and_tokens(session: ChatSession, said) -> None:
    assert said("/stats") == "fake: 0 answers, 0 tokens\n"
    session.ask("one")
    session.ask("one two")
    assert said("/stats").startswith("fake: 2 answers, 5 tokens\nlast: 3 tokens")


def test_bye_ends_the_chat(session: ChatSession) -> None:
    with pytest.raises(EOFError):
        run_slash(session, "/bye")
