from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from errno import EFBIG
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from genserve.cli.chat.chat_session import ChatSession
from genserve.cli.chat.repl import SlashCompleter
from genserve.cli.chat.slash_commands import COMMANDS, run_slash
from genserve.completion import CacheMatch, CacheMatchEnd, Usage
from genserve.errors import InvalidRequest, ModelNotFound
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
        ("/nope", "unknown command /nope; see /help"),     # not /compare, which ends alike
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
    ("typed", "remedy"),
    [
        ("temperature -1", ""),
        ("temperature hot", ""),
        ("temprature 1", "did you mean temperature?"),
        ("temprature", "did you mean temperature?"),
        ("stop 5", ""),
    ],
)
def test_set_rejects_an_invalid_value_and_changes_nothing(
    session: ChatSession, typed: str, remedy: str
) -> None:
    before = dict(session.options)
    with pytest.raises(InvalidRequest) as caught:
        run_slash(session, f"/set {typed}")
    assert (caught.value.field, caught.value.remedy) == (typed.split()[0], remedy)
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


def test_retry_asks_a_question_whose_answer_failed_and_keeps_the_answer_before_it(
    session: ChatSession, said
) -> None:
    session.ask("one")
    for _ in range(2):
        session.options = SamplingOptions(temperature=-1)
        with pytest.raises(InvalidRequest):
            session.ask("two")
    session.options = SamplingOptions()
    assert said("/retry").startswith("TWO")
    assert contents(session) == ["one", "ONE", "two", "TWO"]
    assert said("/retry").startswith("TWO")
    assert contents(session) == ["one", "ONE", "two", "TWO"]


def test_retry_asks_a_question_again_that_did_not_fit_into_the_context(session: ChatSession, said) -> None:
    session.ask("one")
    with pytest.raises(InvalidRequest):
        session.ask("reject")
    assert said("/undo") == "removed: one\n"
    with pytest.raises(InvalidRequest, match="rejected"):
        run_slash(session, "/retry")
    said("/clear")
    assert said("/retry") == "nothing to retry\n"


def test_retry_in_an_empty_chat_does_nothing(said) -> None:
    assert said("/retry") == "nothing to retry\n"


def test_save_writes_the_messages_to_a_new_file_and_again_to_the_same(
    session: ChatSession, said, tmp_path: Path
) -> None:
    assert said("/save") == "usage: /save FILE\n"
    session.ask("grüß dich")
    path = tmp_path / "my chat.json"
    assert said(f"/save {path}") == f"saved as {path}\n"
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "messages": [{"role": "user", "content": "grüß dich"}, {"role": "assistant", "content": "GRÜSS DICH"}]
    }
    session.ask("more")
    assert said("/save") == f"saved as {path}\n"
    assert len(json.loads(path.read_text(encoding="utf-8"))["messages"]) == 4
    said("/clear")
    with pytest.raises(InvalidRequest, match=r"my chat\.json exists"):
        run_slash(session, f"/save {path}")


def test_save_leaves_no_partial_file_on_a_full_disk(session: ChatSession, tmp_path: Path) -> None:
    session.ask("a question that is longer than the disk is large")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(InvalidRequest, match=f"/chat.json .*{os.strerror(EFBIG)}"):
            run_slash(session, f"/save {tmp_path}/chat.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_load_goes_on_with_a_saved_conversation(
    session: ChatSession, model: FakeModel, said, tmp_path: Path
) -> None:
    said("/system Be brief.")
    session.ask("one")
    said(f"/save {tmp_path}/chat.json")
    said("/clear")
    said("/system")
    shown = said(f"/load {tmp_path}/chat.json")
    assert shown == "loaded 1 exchange; /save writes them back\n> one\nONE\n"
    session.ask("two")
    assert [m.content for m in model.asked[-1]] == ["Be brief.", "one", "ONE", "two"]


def test_load_reads_what_the_chat_page_exports(session: ChatSession, said, tmp_path: Path) -> None:
    def conversation(updated: int, *texts: str, other: str = "") -> dict[str, object]:
        roles, parents = ("user", "assistant") * len(texts), ("root", *map(str, range(len(texts))))
        messages = [
            {"id": str(i), "parent": parents[i], "role": roles[i], "content": text, "created": i}
            for i, text in enumerate(texts)
        ]
        messages.append({"id": "x", "parent": "root", "role": "user", "content": "another branch"})
        return {
            "system": "Be brief.",
            "updated": updated,
            "messages": {message["id"]: message for message in messages},
            "chosen": {message["parent"]: message["id"] for message in messages[:-1]},
        }

    path = tmp_path / "chat.json"
    conversations = [conversation(1, "old", "OLD"), conversation(2, "one", "ONE", "two", "TWO")]
    path.write_text(json.dumps({"format": "genserve-conversations", "conversations": conversations}))
    exported = path.read_bytes()
    assert said(f"/load {path}").startswith("loaded 2 exchanges, the newest conversation of the chat page\n")
    assert contents(session) == ["Be brief.", "one", "ONE", "two", "TWO"]
    assert said("/save") == "usage: /save FILE\n"     # the export has more
    assert path.read_bytes() == exported
    path.write_text(json.dumps({"format": "genserve-conversations", "conversations": []}))
    with pytest.raises(InvalidRequest, match="is not a whole export of the chat page"):
        run_slash(session, f"/load {path}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "there is no file"),
        (b"\xff{}", "is not UTF-8, at byte 0"),
        (b"{", "is not JSON: Expecting property name"),
        (b"{}", "has no list of messages"),
        (b"[1]", "has no list of messages"),
        (b'[{"role": "nobody", "content": ""}]', "role must be one of"),
        (b'[{"role": "user", "content": "a"}]', "the last question has no answer"),
        (b'[{"role": "assistant", "content": "a"}]', r"messages\[0\] is of the assistant, not of the user"),
    ],
)
def test_load_rejects_other_files_and_changes_nothing(
    session: ChatSession, tmp_path: Path, content: bytes | None, problem: str
) -> None:
    session.ask("one")
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=problem):
        run_slash(session, f"/load {path}")
    assert contents(session) == ["one", "ONE"]


def editor(tmp_path: Path, script: str) -> str:
    path = tmp_path / "editor"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_edit_changes_the_last_question_and_asks_it(
    session: ChatSession, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", editor(tmp_path, 'sed -i s/one/two/ "$1"'))
    assert said("/edit") == "nothing to ask\n"
    session.ask("first")
    session.ask("one more")
    assert said("/edit").startswith("TWO MORE\n3 tokens")
    assert contents(session) == ["first", "FIRST", "two more", "TWO MORE"]
    assert said("/edit") == "not changed; /retry asks it again\n"


def test_edit_changes_a_question_whose_answer_failed(
    session: ChatSession, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", editor(tmp_path, 'sed -i s/reject/two/ "$1"'))
    session.ask("one")
    with pytest.raises(InvalidRequest):
        session.ask("reject")
    assert said("/edit").startswith("TWO")
    assert contents(session) == ["one", "ONE", "two", "TWO"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("/nowhere/vi", "the editor /nowhere/vi: No such file or directory"),
        ("false", "the editor false failed with status 1"),
        ("'", "EDITOR is"),
        ("printf '\\377' >", "UTF-8"),
    ],
)
def test_an_editor_that_fails_changes_nothing(
    session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, problem: str
) -> None:
    if command.startswith("printf"):
        command = editor(tmp_path, f'{command} "$1"')
    monkeypatch.setenv("VISUAL", command)
    session.ask("one")
    with pytest.raises(InvalidRequest, match=problem):
        run_slash(session, "/edit")
    assert contents(session) == ["one", "ONE"]


def test_model_switches_and_keeps_what_the_user_has_set(session: ChatSession, said) -> None:
    assert said("/model") == "* fake\n  other\n"
    said("/set top_k 7")
    assert said("/model other") == "other answers from now on\n"
    assert session.options == {"temperature": 0.8, "top_k": 7}
    said("/set temperature 0.1")
    with pytest.raises(ModelNotFound):
        run_slash(session, "/model nowhere")
    assert session.model.name == "other"
    said("/model fake")
    assert session.options == {"temperature": 0.1, "top_k": 7}


def test_tokens_are_counted_by_message(session: ChatSession, said) -> None:
    assert said("/tokens") == "nothing was said yet\n"
    said("/system Be brief.")
    session.ask("one two three")
    assert [line.split()[:2] for line in said("/tokens").splitlines()] == [
        ["system", "2"],
        ["user", "3"],
        ["assistant", "3"],
        ["template", "9"],
        ["context", "17"],
    ]
    assert said("/tokens").endswith("context 17 of 2048, 2031 left\n")


def test_compare_rejects_a_seed_that_changes_nothing(session: ChatSession, said) -> None:
    said("/set temperature 0")
    with pytest.raises(InvalidRequest, match="at temperature 0 every seed gives the same answer"):
        run_slash(session, "/compare 7 Hi")


def test_compare_asks_a_question_whose_answer_failed(
    session: ChatSession, model: FakeModel, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genserve.cli.chat.side_by_side.prompt", lambda _question: "2")
    session.ask("one")
    session.options = SamplingOptions(temperature=-1)
    with pytest.raises(InvalidRequest):
        session.ask("two")
    session.options = SamplingOptions()
    said("/compare other")
    assert [[m.content for m in asked] for asked in model.asked[-2:]] == [["one", "ONE", "two"]] * 2
    assert contents(session) == ["one", "ONE", "two", "TWO"]


def test_compare_needs_a_question(session: ChatSession, said) -> None:
    assert said("/compare").startswith("usage: /compare SEED|MODEL [QUESTION]")
    assert said("/compare 7").startswith("usage: /compare")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/he", ["/help"]),
        ("/set temp", ["temperature"]),
        ("/set temperature ", ["0.5", "0.0"]),
        ("/set ignore_eos ", ["false", "true"]),
        ("/set truncation_side ", ["left", "right"]),
        ("/set early_stopping n", ["never"]),
        ("/set nothing ", []),
        ("/model ", ["fake", "other"]),
        ("/model o", ["other"]),
        ("/markdown ", ["on", "off"]),
        ("/help ", []),
        ("hello", []),
    ],
)
def test_names_and_values_are_completed(session: ChatSession, typed: str, words: list[str]) -> None:
    found = SlashCompleter(session).get_completions(Document(typed), CompleteEvent())
    assert [completion.text for completion in found] == words


def test_paths_are_completed(session: ChatSession, tmp_path: Path) -> None:
    (tmp_path / "chat.json").touch()
    found = SlashCompleter(session).get_completions(Document(f"/load {tmp_path}/ch"), CompleteEvent())
    assert [completion.text for completion in found] == ["at.json"]


def test_stats_count_answers_and_tokens(session: ChatSession, said) -> None:
    assert said("/stats") == "fake: 0 answers, 0 tokens\n"
    session.ask("one")
    session.ask("one two")
    assert said("/stats").startswith("fake: 2 answers, 5 tokens\nlast: 3 tokens")


def test_cache_shows_where_the_last_prompt_left_the_prefix_cache(session: ChatSession, said) -> None:
    assert said("/cache").startswith("nothing is known")
    session.ask("one")
    match = CacheMatch(
        matched_tokens=3,
        end=CacheMatchEnd.DIFFERENT,
        prompt_token_ids=session.model.text_model.tokenize("blue sea"),
        cached_token_ids=session.model.text_model.tokenize("red"),
    )
    usage = Usage(prompt_tokens=5, completion_tokens=1, cached_tokens=2, cache_match=match)
    session.answers[-1] = replace(session.answers[-1], usage=usage)
    first, *texts = said("/cache").splitlines()
    assert "3 of 5 tokens" in first
    assert [line.split() for line in texts[-2:]] == [["prompt", "blue", "sea"], ["cached", "red"]]


@pytest.mark.parametrize("name", ["/bye", "/exit", "/quit"])
def test_bye_ends_the_chat(session: ChatSession, name: str) -> None:
    with pytest.raises(EOFError):
        run_slash(session, name)
