"""Console: writes text, errors and progress bars, and reads piped standard input."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

    from genserve.export.export_options import Unit

from genserve.errors import GenserveError, InvalidRequest

# Control characters except tab and line feed. U+0080 to U+009F control some terminals too.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text unchanged, without markup, highlighting or wrapping."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def visible(text: str) -> str:
    r"""Return the text with its control characters escaped (`\x1b`)."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def counted(number: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sized(num_bytes: int) -> str:
    """Return `93 MB`, `1.2 GB`."""
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes < 995e6 else f"{num_bytes / 1e9:.1f} GB"


def write_text(console: Console, text: str) -> None:
    """Write a piece of a model's text without buffering; on a terminal, control characters are escaped."""
    # `is_terminal` would not do: FORCE_COLOR makes it true for files too.
    console.file.write(visible(text) if console.file.isatty() else text)
    console.file.flush()


def print_table(table: Table) -> None:
    """Print a table in full: a narrow terminal wraps its lines, while rich would cut names."""
    console = make_console()
    console.width = max(console.width, _full_width(table, console))
    console.print(table)


def fits_terminal(table: Table) -> bool:
    """Return whether the lines of a table need no wrapping; outside a terminal none do."""
    console = make_console()
    return not console.is_terminal or _full_width(table, console) <= console.width


def _full_width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum


def print_prose(text: str, *, console: Console | None = None) -> None:
    """Print sentences, wrapped between words on a terminal; by default on stdout."""
    console = console or make_console()
    console.print(text, soft_wrap=not console.is_terminal)


def print_json(document: object) -> None:
    """Print a document as JSON on stdout, in UTF-8 in any locale; NaN is null, and paths are strings."""
    sys.stdout.flush()
    sys.stdout.buffer.write(orjson.dumps(document, default=str, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()


def error_heading(error: GenserveError) -> str:
    """Return `error[model_not_found]`, or `error` for an error without a code of its own."""
    return "error" if type(error) is GenserveError else f"error[{error.code}]"


def print_error(error: GenserveError) -> None:
    """Print an error and its remedy on stderr."""
    console = make_console(stderr=True)
    # Triton ends the reason of a failed load with a line feed.
    message = visible(error.message.rstrip())
    console.print(Text.assemble((error_heading(error), "bold red"), f": {message}"))
    if error.remedy:
        console.print(Text.assemble(("  remedy", "bold"), f": {visible(error.remedy)}"))


class ConsoleProgress:
    """Shows the tasks of an export on stderr: progress bars on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._console = make_console(stderr=True)

    @contextmanager
    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> Iterator[Callable[[int], None]]:
        """Show a task of `total` units of work (None: unknown); yield a function that advances it."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            self._console.print(name)
            yield lambda _units: None
            return
        columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn(30))
        size = (DownloadColumn(),) if unit else ()
        left = (TimeRemainingColumn(), TextColumn("left")) if total else ()
        with Progress(*columns, *size, TimeElapsedColumn(), *left, console=self._console) as bars:
            task = bars.add_task(name, total=total)
            yield partial(bars.advance, task)
            bars.update(task, total=total or 1, completed=total or 1)


def read_text() -> str:
    """Return standard input, with line feeds as line ends.

    Raises:
        InvalidRequest: the text is not in the encoding of the locale, usually UTF-8.
    """
    return re.sub("\r\n?", "\n", _decoded(sys.stdin.buffer.read(), place="standard input"))


def _decoded(raw: bytes, *, place: str) -> str:
    encoding = sys.stdin.encoding
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{place} is not {encoding.upper()}, at byte {error.start}",
            remedy=f"convert it, for example with `iconv -f LATIN1 -t {encoding.upper()}`",
        ) from None
