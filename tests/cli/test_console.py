from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from genserve.cli.console import ConsoleProgress, print_error, print_table, visible, write_text
from genserve.errors import ModelNotFound


def test_control_characters_are_escaped_and_other_text_is_unchanged() -> None:
    assert visible("a\x1b[2Jb\x07\r\x9b31m\x7f") == r"a\x1b[2Jb\x07\x0d\x9b31m\x7f"
    assert visible("tab\tline\nÄ€漢🙂\u2028") == "tab\tline\nÄ€漢🙂\u2028"


@given(st.text())
def test_no_control_character_remains_except_tab_and_line_feed(text: str) -> None:
    shown = visible(text).translate({ord("\t"): None, ord("\n"): None})
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in shown)


def test_text_is_escaped_on_a_terminal() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        write_text(Console(file=file), "\x1b[2J")
        assert os.read(master, 100) == rb"\x1b[2J"
    os.close(master)


def test_text_is_unchanged_in_a_pipe_also_with_force_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    write_text(Console(file=file), "\x1b[2J")
    assert file.getvalue() == "\x1b[2J"


def test_a_table_is_printed_in_full_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = Table("model", "state", box=None)
    table.add_row("a-model-with-a-long-name", "ready to load")
    print_table(table)
    assert "a-model-with-a-long-name  ready to load" in capsys.readouterr().out


def test_an_error_is_printed_with_control_characters_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ModelNotFound("no [bold]model[/bold] \x1b[2J:smile:", remedy="look [here]"))
    assert capsys.readouterr().err == (
        "error[model_not_found]: no [bold]model[/bold] \\x1b[2J:smile:\n  remedy: look [here]\n"
    )


def test_an_error_without_a_remedy_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ModelNotFound("no model"))
    assert capsys.readouterr().err == "error[model_not_found]: no model\n"


def test_progress_is_one_line_per_task_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress()
    with progress.task("reading"):
        pass
    with progress.task("converting", total=2) as advance:
        advance(1)
        advance(1)
    captured = capsys.readouterr()
    assert captured.err == "reading\nconverting\n"
    assert captured.out == ""


def test_progress_is_one_line_per_task_on_a_terminal_that_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with ConsoleProgress().task("converting", total=2) as advance:
        advance(2)
    assert "━" not in capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ConsoleProgress().task("converting", total=2) as advance:
        advance(2)
    shown = capsys.readouterr().err
    assert "converting" in shown
    assert "━" in shown


def test_progress_in_bytes_tells_how_many_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with ConsoleProgress().task("converting", total=3_400_000_000, unit="bytes") as advance:
        advance(1_700_000_000)
    shown = capsys.readouterr().err
    assert "3.4/3.4 GB" in shown
    assert "left" in shown


PROGRAM = "from genserve.cli.console import read_text; print(ascii(read_text()))"


@pytest.mark.parametrize(
    ("encoding", "typed", "read"), [("utf-8", "é\r\n", "\\xe9\\n"), ("latin-1", "é", "\\xe9")]
)
def test_the_encoding_is_that_of_the_locale(encoding: str, typed: str, read: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=typed.encode(encoding),
        env={"PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == f"'{read}'"
