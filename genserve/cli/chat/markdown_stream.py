"""Markdown stream: shows an answer as it arrives, as Markdown where the terminal can show it."""

from __future__ import annotations

import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, ListItem, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text
from rich.theme import Theme

from genserve.cli.chat.live_lines import Line, LiveLines, pause_s, rendered_lines
from genserve.cli.console import visible

# To be readable on dark and light terminals, there is no background, and all colours are the terminal's own.
_THEME = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.code": "cyan",
        "markdown.block_quote": "italic",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
        "markdown.link": "underline",
        "markdown.link_url": "blue",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
# HTML is shown as text, since models write tags that are no formatting.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class AnswerDisplay(Protocol):
    """Shows one answer."""

    def feed(self, text: str) -> None:
        """Show the next piece of the answer."""

    def finish(self) -> None:
        """Show the rest, and end the last line."""


def answer_display(console: Console, *, with_markdown: bool) -> AnswerDisplay:
    """Return the display of an answer: unchanged on a pipe, plain with NO_COLOR and on dumb terminals."""
    if not console.is_terminal:
        return _Unchanged(console)
    return MarkdownStream(console) if with_markdown and shows_markdown(console) else WordWrap(console)


def shows_markdown(console: Console) -> bool:
    """Whether a terminal can and may show more than plain text."""
    return console.is_terminal and not console.is_dumb_terminal and not console.no_color


class _Unchanged:
    """Writes the text of an answer as it is."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def feed(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()

    def finish(self) -> None:
        self.feed("\n")


class WordWrap:
    """Writes plain text without escape sequences, wrapped between words; writes only complete words."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._spaces = self._word = ""

    def feed(self, text: str) -> None:
        """Write the next piece of text; its last word may be held back."""
        out = ""
        for char in visible(text):
            if char == "\n":
                out += self._end_of_word() + "\n"
                self._column, self._spaces = 0, ""
            elif char.isspace():
                out += self._end_of_word()
                self._spaces += " " * (8 - self._column % 8) if char == "\t" else char
            else:
                # Chinese and Japanese have no spaces between words.
                is_ideograph = unicodedata.east_asian_width(char) in "WF"
                out += self._end_of_word() if is_ideograph else ""
                self._word += char
                out += self._end_of_word() if is_ideograph else ""
        self._write(out)

    def finish(self) -> None:
        """Write the last word, and end the line."""
        self._write(self._end_of_word() + "\n")

    def _end_of_word(self) -> str:
        if not self._word:
            return ""
        word, spaces, width = self._word, self._spaces, cell_len(self._word)
        self._word = self._spaces = ""
        last = max(1, self._console.width - 1)  # some terminals wrap a line that is exactly full
        if self._column > 0 and self._column + len(spaces) + width > last:
            self._column = (width - 1) % last + 1
            return f"\n{word}"
        self._column = (self._column + len(spaces) + width - 1) % last + 1
        return spaces + word

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class MarkdownStream:
    """Renders Markdown while it arrives. Complete blocks are printed once; the last block is repainted."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Show an answer on a terminal; `clock` counts seconds."""
        self._console = console
        self._clock = clock
        self._live = LiveLines(console)
        self._blocks = ""               # the source of the incomplete blocks
        self._num_complete = 0
        self._next_paint_s = 0.0
        self._later: threading.Timer | None = None  # paints text that came too soon after the last painting
        self._lock = threading.Lock()

    def feed(self, text: str) -> None:
        """Show the next piece of text, at once unless rendering would take too much time."""
        with self._lock:
            self._blocks += visible(text)
            delay_s = self._next_paint_s - self._clock()
            if delay_s <= 0:
                self._paint()
            elif self._later is None:
                self._later = threading.Timer(delay_s, self._paint_late)
                self._later.daemon = True
                self._later.start()

    def finish(self) -> None:
        """Show the rest, and end the last line."""
        with self._lock:
            self._paint(is_whole=True)
            self._live.keep()
            self._blocks = ""

    def _paint_late(self) -> None:
        with self._lock:
            if self._later is not None:
                self._paint()

    def _paint(self, *, is_whole: bool = False) -> None:
        started_s = self._clock()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._paint_blocks(is_whole=is_whole)
        ended_s = self._clock()
        self._next_paint_s = ended_s + pause_s(ended_s - started_s)

    def _paint_blocks(self, *, is_whole: bool) -> None:
        *complete, last = _top_blocks(self._blocks)
        for block in complete:
            self._live.show(self._lines(block))
            self._live.keep()
            self._num_complete += 1
        self._blocks = last
        if lines := self._lines(last):
            # A new row may change the widths of all columns, so a table may scroll only when it is complete.
            self._live.show(lines, num_stable=0 if _is_table(last) and not is_whole else None)

    def _lines(self, block: str) -> list[Line]:
        lines = markdown_lines(self._console, block, width=self._console.width - 1)
        return [Line("", 0), *lines] if lines and self._num_complete else lines


def markdown_lines(console: Console, text: str, *, width: int) -> list[Line]:
    """Return the lines of a Markdown text at a width in columns; control characters are already escaped."""
    with console.use_theme(_THEME):
        return rendered_lines(console, _ChatMarkdown(text), width=max(1, width))


def _top_blocks(text: str) -> list[str]:
    """Split a text before each of its outermost blocks; the last block may be incomplete."""
    blocks = (token.map for token in _PARSER.parse(text) if token.level == 0 and token.map)
    starts = [begin for begin, _ in blocks][1:]
    lines = text.split("\n")
    return ["\n".join(lines[begin:end]) for begin, end in zip([0, *starts], [*starts, None], strict=True)]


def _is_table(block: str) -> bool:
    return any(token.type == "table_open" for token in _PARSER.parse(block))


class _LeftHeading(Heading):
    """A heading at the left margin, without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _NumberedItem(ListItem):
    """An item of a list, whose number ends with a period."""

    def render_number(
        self, console: Console, options: ConsoleOptions, number: int, last_number: int
    ) -> RenderResult:
        width = max(3, len(f"{last_number}."))     # a tenth item must not move the items above it
        row = Table.grid(Column(width=width, justify="right"), Column(), padding=(0, 1))
        row.add_row(Text(f"{number}.", style="markdown.item.number"), self.elements)
        yield row


class _PlainCode(CodeBlock):
    """Code without margins and background, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True)


class _ChatMarkdown(Markdown):
    """Markdown as chats show it: a line feed stays a line feed, and the address of a link is shown."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
        "list_item_open": _NumberedItem,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in _inline(self.parsed):
            if token.type == "softbreak":
                token.type = "hardbreak"


def _inline(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield from token.children or ()
