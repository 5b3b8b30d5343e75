"""The REPL in a real pseudo-terminal, over a fake model; a chat is a process, so most keys are extended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from genserve.cli.chat.repl import history_path
from tests.cli.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, PROMPT, TAB, UP, Terminal


def say(terminal: Terminal, keys: str) -> None:
    """Type at the next prompt: before it, the terminal is not yet the prompt's."""
    terminal.expect(PROMPT)
    terminal.type(keys)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path) as terminal:
        terminal.expect("Ctrl-D leaves")
        yield terminal


def test_an_answer_is_printed_with_its_timing_and_ctrl_d_leaves(terminal: Terminal) -> None:
    say(terminal, "good day" + ENTER)
    terminal.expect("GOOD DAY")
    terminal.expect("3 tokens · first after ")
    terminal.expect("tokens/s · context 13 of 2048 · stop")
    say(terminal, CTRL_D)
    terminal.expect("streams closed: [True]")
    assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_keeps_its_text(terminal: Terminal) -> None:
    say(terminal, "forever young" + ENTER)
    terminal.expect("FOREVER")
    terminal.type(CTRL_C)
    terminal.expect("1 token · first after ")
    terminal.expect(" · stopped")
    say(terminal, "and on" + ENTER)
    terminal.expect("AND ON")
    say(terminal, CTRL_D)
    terminal.expect("streams closed: [True, True]")
    terminal.expect("last asked: ['forever young', 'FOREVER', 'and on']")
    assert terminal.wait() == 0


def test_ctrl_c_drops_the_line_or_hints_how_to_leave(terminal: Terminal) -> None:
    say(terminal, "never mind")
    terminal.expect("never mind")
    terminal.type(CTRL_C)
    assert "leaves" not in terminal.expect(PROMPT)
    terminal.type(CTRL_C)
    terminal.expect("Ctrl-D or /bye leaves")
    say(terminal, CTRL_D)
    terminal.expect("last asked: None")


@pytest.mark.extended
def test_alt_enter_starts_a_new_line_and_enter_sends_both(terminal: Terminal) -> None:
    say(terminal, "one" + ALT_ENTER + "two" + ENTER)
    terminal.expect("ONE TWO")
    say(terminal, CTRL_D)
    terminal.expect(r"last asked: ['one\ntwo']")


@pytest.mark.extended
def test_three_quotes_open_and_close_a_block(terminal: Terminal) -> None:
    say(terminal, '"""' + ENTER + "one" + ENTER + ENTER + "two" + ENTER + '"""' + ENTER)
    terminal.expect("ONE TWO")
    say(terminal, CTRL_D)
    terminal.expect(r"last asked: ['one\n\ntwo']")


@pytest.mark.extended
def test_bytes_that_are_no_utf8_are_replaced(terminal: Terminal) -> None:
    terminal.expect(PROMPT)
    terminal.type_bytes(b"a\xffb" + ENTER.encode())
    terminal.expect("A?B")
    say(terminal, CTRL_D)
    terminal.expect("last asked: ['a?b']")


@pytest.mark.extended
def test_pasted_lines_are_one_message(terminal: Terminal) -> None:
    say(terminal, "\x1b[200~one\ntwo\x1b[201~" + ENTER)
    terminal.expect("ONE TWO")
    say(terminal, CTRL_D)
    terminal.expect(r"last asked: ['one\ntwo']")


def test_typed_keys_do_not_mix_with_the_answer_and_are_the_next_prompt(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    environment = {"GATE": str(gate)}
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path, environment=environment) as terminal:
        say(terminal, "one gated two" + ENTER)
        terminal.expect("ONE GATED")
        terminal.type("typed ahead" + ENTER + "and half of")
        gate.touch()
        lines = terminal.expect_screen(lambda lines: lines[-1:] == ["> and half of"])
        assert [line for line in lines if line and "tokens" not in line][1:] == [
            "> one gated two", "ONE GATED TWO", "> typed ahead", "TYPED AHEAD", "> and half of"
        ]  # fmt: skip
        terminal.type(CTRL_C)
        say(terminal, CTRL_D)
        assert terminal.wait() == 0
        assert terminal.modes() == terminal.modes_before


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.extended)])
def test_a_signal_during_an_answer_leaves_a_sane_terminal(tmp_path: Path, number: int) -> None:
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path) as terminal:
        say(terminal, "forever" + ENTER)
        terminal.expect("FOREVER")
        assert terminal.modes() != terminal.modes_before
        terminal.signal(number)
        assert terminal.wait() == 128 + number
        assert terminal.modes() == terminal.modes_before


@pytest.mark.extended
def test_an_answer_goes_on_after_a_resize_of_the_terminal(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Terminal(
        "tests.cli.chat_on_terminal", home=tmp_path, columns=40, environment={"GATE": str(gate)}
    ) as terminal:
        say(terminal, "- a list of words gated that becomes narrow" + ENTER)
        terminal.expect("WORDS GATED")
        terminal.resize(columns=20, rows=24)
        gate.touch()
        lines = terminal.expect_screen(lambda lines: any(line.endswith("stop") for line in lines))
        at = lines.index(" • A LIST OF WORDS")
        assert lines[at + 1 : at + 4] == ["   GATED THAT", "   BECOMES NARROW", "10 tokens · first"]
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_an_error_is_printed_and_the_chat_continues(terminal: Terminal) -> None:
    say(terminal, "reject" + ENTER)
    terminal.expect("error[invalid_request]")
    terminal.expect("ask something else")
    say(terminal, "full" + ENTER)
    terminal.expect("/undo removes the last exchange, and then /retry asks again")
    say(terminal, "hello" + ENTER)
    terminal.expect("HELLO")
    say(terminal, CTRL_D)
    terminal.expect("last asked: ['hello']")


def test_commands_are_completed_and_bye_leaves(terminal: Terminal) -> None:
    say(terminal, "/he")
    terminal.expect("show this help")
    terminal.type(TAB)
    terminal.expect_screen(lambda lines: "> /help" in lines)
    terminal.type(ENTER)
    terminal.expect("clear the conversation")
    say(terminal, "/bye" + ENTER)
    terminal.expect("streams closed: []")
    assert terminal.wait() == 0


@pytest.mark.extended
def test_a_second_tab_leaves_the_only_completion(terminal: Terminal) -> None:
    terminal.expect(PROMPT)
    terminal.type("/markd")
    terminal.expect("render answers")  # in the menu
    terminal.type(TAB + TAB + " off" + ENTER)
    terminal.expect("Markdown is shown as the model writes it")


def test_the_history_is_kept_for_the_next_chat_and_is_private(tmp_path: Path) -> None:
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path) as first:
        say(first, "remember me" + ENTER)
        first.expect("REMEMBER ME")
        say(first, CTRL_D)
        first.wait()
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path) as second:
        say(second, UP + ENTER)
        second.expect("REMEMBER ME")
    assert (tmp_path / "genserve" / "history").stat().st_mode & 0o077 == 0


@pytest.mark.extended
def test_a_history_that_becomes_unwritable_does_not_disturb_the_chat(tmp_path: Path) -> None:
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path) as terminal:
        terminal.expect(PROMPT)
        history = tmp_path / "genserve" / "history"
        history.unlink()
        history.mkdir()
        terminal.type("loud" + ENTER)
        assert "Exception" not in terminal.expect("LOUD")
        say(terminal, UP + ENTER)
        assert "Exception" not in terminal.expect("LOUD")


def test_the_history_is_in_the_state_folder_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert history_path() == Path("/home/me/.local/state/genserve/history")
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert history_path() == Path("/elsewhere/genserve/history")


def test_ctrl_c_while_a_model_is_loaded_keeps_the_old_one(terminal: Terminal) -> None:
    say(terminal, "/model slow" + ENTER)
    terminal.expect("loading slow")
    terminal.type(CTRL_C)
    terminal.expect("stopped")
    say(terminal, "/model" + ENTER)
    terminal.expect("* fake")
    say(terminal, CTRL_D)
    assert terminal.wait() == 0


@pytest.mark.extended
def test_ctrl_c_before_the_first_token_leaves_the_question_out(terminal: Terminal) -> None:
    say(terminal, "silent" + ENTER)
    terminal.expect("⠋")
    terminal.type(CTRL_C)
    terminal.expect("0 tokens · stopped")
    say(terminal, "hello" + ENTER)
    terminal.expect("HELLO")
    say(terminal, CTRL_D)
    terminal.expect("last asked: ['hello']")


@pytest.mark.extended
def test_ctrl_c_in_the_editor_belongs_to_the_editor(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text(
        '#!/bin/sh\ntrap "echo caught; printf %s edited > $1; exit 0" INT\n'
        "echo open\nwhile :; do sleep 0.05; done\n"
    )
    editor.chmod(0o700)
    with Terminal(
        "tests.cli.chat_on_terminal", home=tmp_path, environment={"EDITOR": str(editor)}
    ) as terminal:
        say(terminal, "first" + ENTER)
        terminal.expect("FIRST")
        say(terminal, "/edit" + ENTER)
        terminal.expect("open")
        terminal.type(CTRL_C)
        terminal.expect("caught")
        terminal.expect("EDITED")
        say(terminal, "pending" + "\x18\x05")
        terminal.expect("open")
        terminal.type(CTRL_C)
        terminal.expect_screen(lambda lines: lines[-1] == "> edited")
        terminal.type(" twice" + ENTER)
        terminal.expect("EDITED TWICE")
        say(terminal, CTRL_D)
        assert terminal.wait() == 0
        assert terminal.modes() == terminal.modes_before


@pytest.mark.extended
def test_ctrl_r_searches_what_was_typed(terminal: Terminal) -> None:
    for question in ("about apples", "of pears"):
        say(terminal, question + ENTER)
        terminal.expect(question.upper())
    say(terminal, "\x12appl")
    terminal.expect("about")
    terminal.type(ENTER)
    terminal.type(ENTER)
    terminal.expect("ABOUT APPLES")


@pytest.mark.extended
def test_a_message_may_begin_with_a_slash_behind_a_space_and_a_narrow_terminal_will_do(
    tmp_path: Path,
) -> None:
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path, columns=20) as terminal:
        say(terminal, " /etc is a folder of files" + ENTER)
        lines = terminal.expect_screen(lambda lines: any(line.endswith("stop") for line in lines))
        assert "/ETC IS A FOLDER OF" in lines
        assert "FILES" in lines
        say(terminal, "/help" + ENTER)
        lines = terminal.expect_screen(lambda lines: any("message." in line for line in lines))
        assert all(len(line) <= 20 for line in lines)
