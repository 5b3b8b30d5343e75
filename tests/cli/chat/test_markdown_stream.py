from __future__ import annotations

from io import StringIO
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from genserve.cli.chat.markdown_stream import MarkdownStream, WordWrap, answer_display, markdown_lines
from tests.cli.emulated import EmulatedTerminal
from tests.cli.terminal import PATIENCE_S

ANSWER = """# Sorting in `Python`

A *stable* sort keeps equal items in **their** order, see [the manual](https://docs.python.org/3/howto/).
A second line.

- one
- two, which is so long that it does not fit into one line of the terminal
  1. nested

```python
def longest(words: list[str]) -> str:
    return max(words, key=len)
```

| name | order |
| --- | ---: |
| insertion | n² |
| merge | n log n |

> quoted
> text

Use <br> and 2 < 3, 日本語のテキストは空白がありません。

## The end
"""


def shown(text: str, cuts: list[int], *, columns: int, rows: int) -> EmulatedTerminal:
    terminal = EmulatedTerminal(columns=columns, rows=rows)
    stream = MarkdownStream(terminal.console, clock=lambda: 0.0)
    for begin, end in pairwise([0, *sorted(cuts), len(text)]):
        stream.feed(text[begin:end])
    stream.finish()
    return terminal


def rendered(text: str, *, columns: int) -> list[str]:
    return shown(text, [], columns=columns, rows=200).lines()


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, len(ANSWER)), max_size=120),
    st.sampled_from([20, 34, 60, 200]),
    st.integers(8, 40),
)
def test_a_stream_looks_like_the_whole_answer_however_it_is_cut(
    cuts: list[int], columns: int, rows: int
) -> None:
    assert shown(ANSWER, cuts, columns=columns, rows=rows).lines() == rendered(ANSWER, columns=columns)


def test_markdown_is_rendered_at_the_width_of_the_terminal() -> None:
    assert rendered(ANSWER, columns=48) == [
        "Sorting in Python",
        "",
        "A stable sort keeps equal items in their order,",
        "see the manual",
        "(https://docs.python.org/3/howto/).",
        "A second line.",
        "",
        " • one",
        " • two, which is so long that it does not fit",
        "   into one line of the terminal",
        "    1. nested",
        "",
        "def longest(words: list[str]) -> str:",
        "    return max(words, key=len)",
        "",
        " name         order",
        " ──────────────────",
        " insertion       n²",
        " merge      n log n",
        "",
        "▌ quoted",
        "▌ text",
        "",
        "Use <br> and 2 < 3,",
        "日本語のテキストは空白がありません。",
        "",
        "The end",
    ]


def test_only_the_changes_are_written() -> None:
    terminal = EmulatedTerminal(columns=80, rows=24)
    stream = MarkdownStream(terminal.console, clock=lambda: 0.0)
    stream.feed("The first paragraph.\n\nAnother")
    before = len(terminal.written)
    stream.feed(" one")
    assert terminal.written[before:] == " one"


def test_lines_that_have_scrolled_away_are_never_written_again() -> None:
    items = "".join(f"- item {i}\n" for i in range(60))
    terminal = shown(items, list(range(0, len(items), 7)), columns=30, rows=10)
    assert terminal.lines() == [f" • item {i}" for i in range(60)]


def test_a_table_taller_than_the_screen_has_columns_of_one_width() -> None:
    rows = "".join(f"| {'x' * (i % 7 + i // 5)} | words of row {i} |\n" for i in range(24))
    table = f"Before.\n\n| a | b |\n| --- | --- |\n{rows}\nAfter.\n"
    assert shown(table, list(range(0, len(table), 13)), columns=40, rows=10).lines() == rendered(
        table, columns=40
    )


def test_after_a_resize_the_answer_goes_on_at_the_new_width() -> None:
    terminal = EmulatedTerminal(columns=60, rows=12)
    stream = MarkdownStream(terminal.console, clock=lambda: 0.0)
    stream.feed("Before.\n\nA paragraph that is wrapped at the right margin of")
    terminal.screen.resize(12, 30)
    terminal.console.size = (30, 12)
    stream.feed(" the terminal, wherever it is.")
    stream.finish()
    wrapped = ["A paragraph that is wrapped", "at the right margin of the", "terminal, wherever it is."]
    assert terminal.lines()[-3:] == wrapped


def test_a_line_separator_is_no_end_of_a_line() -> None:
    terminal = shown("one\u2028two\n\nthree\n\nfour", [], columns=40, rows=9)
    assert terminal.written == "one\u2028two\n\r\nthree\n\r\nfour\n"


def test_control_characters_are_escaped() -> None:
    terminal = shown("a \x1b[2J\x9b31m b\r\a", [], columns=40, rows=5)
    assert terminal.lines() == ["a \\x1b[2J\\x9b31m b\\x0d\\x07"]


def test_rendering_takes_a_part_of_the_time_only_and_catches_up_in_a_pause() -> None:
    times_s = iter([0.0, 0.0, 0.1, *[0.2] * 100])  # the first paint takes a tenth of a second
    terminal = EmulatedTerminal(columns=40, rows=5)
    stream = MarkdownStream(terminal.console, clock=lambda: next(times_s))
    for word in ("one", "two", "three", "four"):
        stream.feed(f"{word} ")
    assert terminal.lines() == ["one"]
    terminal.painted.clear()
    assert terminal.painted.wait(PATIENCE_S)
    assert terminal.lines() == ["one two three four"]


def plain(text: str, *, width: int) -> str:
    file = StringIO()
    wrap = WordWrap(Console(file=file, width=width, height=24, force_terminal=True, _environ={}))
    for char in text:
        wrap.feed(char)
    wrap.finish()
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("  indented more", ["  indented", "more"]),
        ("a\n\nb  c", ["a", "", "b  c"]),
        ("a verylongwordindeed b c", ["a", "verylongwordindeed b", "c"]),
        ("日本語テキスト", ["日本語テキ", "スト"]),
        ("a \x1b[0m b", ["a \\x1b[0m", "b"]),
    ],
)
def test_plain_text_is_wrapped_between_words(text: str, lines: list[str]) -> None:
    assert plain(text, width=11).split("\n") == [*lines, ""]


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours_shows_plain_text(environment: dict[str, str]) -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ=environment)
    display = answer_display(console, with_markdown=True)
    display.feed("**bold** `code`")
    display.finish()
    assert file.getvalue() == "**bold** `code`\n"


def test_a_pipe_receives_the_text_unchanged() -> None:
    file = StringIO()
    display = answer_display(Console(file=file, width=10, _environ={}), with_markdown=True)
    display.feed("**a long line** of \x1b[1m text")
    display.finish()
    assert file.getvalue() == "**a long line** of \x1b[1m text\n"


def test_nothing_is_wider_than_a_narrow_terminal() -> None:
    console = Console(width=20, force_terminal=True, _environ={})
    assert max(line.width for line in markdown_lines(console, ANSWER, width=19)) <= 19
