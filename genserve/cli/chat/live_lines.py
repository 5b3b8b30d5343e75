"""Live lines: repaints the last lines of a terminal in place where they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments

_RENDERING_SHARE = 0.2  # the largest share of the time, since the model may compute on the same cores


def pause_s(rendering_s: float) -> float:
    """Return the seconds to pause after some seconds of rendering, so that it takes a fifth of the time."""
    return rendering_s * (1 / _RENDERING_SHARE - 1)


class Line(NamedTuple):
    """One row of a terminal: its text with escape sequences, and its width in columns."""

    text: str
    width: int


@dataclass(slots=True)
class _Painted:
    """The lines on the terminal; the cursor is at the end of the last line."""

    lines: list[Line]
    num_scrolled: int   # lines above the screen, which nothing can change
    width: int          # the terminal's width in columns


class LiveLines:
    """Paints lines, and later only their changes, so that nothing flickers or is printed twice.

    Lines that no longer fit on the screen have scrolled away, and can never change again.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._painted = _Painted([], 0, console.width)

    def show(self, lines: Sequence[Line], *, num_stable: int | None = None) -> None:
        """Show lines in place of the lines shown before.

        Args:
            lines: the lines, each narrower than the terminal.
            num_stable: how many of the first lines are final. If more than a screen of lines follows them,
                the rest is shown later. None: all lines may scroll away.
        """
        width, height = self._console.size
        room = max(1, height - 1)
        if num_stable is not None:
            lines = lines[: num_stable + room]
        out = self._at_new_width(lines, width, room) if width != self._painted.width else ""
        out += self._changes(lines)
        self._painted.num_scrolled = max(self._painted.num_scrolled, len(self._painted.lines) - room)
        if out:
            self._console.file.write(out)
            self._console.file.flush()

    def keep(self) -> None:
        """Leave the lines on the terminal, and show the next lines below."""
        if self._painted.lines:
            self._console.file.write("\n")
            self._console.file.flush()
        self._painted = _Painted([], 0, self._console.width)

    def _changes(self, lines: Sequence[Line]) -> str:
        """Return the output that turns the painted lines into the new ones, and store these as painted."""
        old, first = self._painted.lines, self._painted.num_scrolled
        if len(lines) <= first:
            return ""
        while first < min(len(old), len(lines)) and old[first] == lines[first]:
            first += 1
        if first == len(old) == len(lines):
            return ""
        first = min(first, len(lines) - 1)  # with fewer lines than before, rewrite the last one
        self._painted.lines = [*old[:first], *lines[first:]]
        if first == len(old):
            begin = "\r\n" if old else ""
        elif first == len(old) - 1 and lines[first].text.startswith(old[first].text):
            added = lines[first].text[len(old[first].text) :]
            return "\r\n".join([added, *(line.text for line in lines[first + 1 :])])
        else:
            num_up = len(old) - 1 - first
            begin = f"\x1b[{num_up}A\r" if num_up else "\r"
        widths = [line.width for line in old[first:]] + [0] * len(lines)
        # Erase the end of a longer old line after writing the new text, so that nothing flickers.
        rows = (
            line.text + ("\x1b[K" if line.width < width else "")
            for line, width in zip(lines[first:], widths, strict=False)
        )
        return begin + "\r\n".join(rows) + ("\x1b[J" if len(lines) < len(old) else "")

    def _at_new_width(self, lines: Sequence[Line], width: int, room: int) -> str:
        """Return the output that erases the lines after a resize.

        Most terminals have wrapped the lines that became too long. The lines that have scrolled away are
        replaced by as many new lines as have the same amount of text.
        """
        painted = self._painted
        on_screen = painted.lines[painted.num_scrolled :]
        num_rows = sum(max(1, -(-line.width // width)) for line in on_screen)
        num_above, num_gone = sum(line.width for line in painted.lines[: painted.num_scrolled]), 0
        while num_above > 0 and num_gone < len(lines):
            num_above -= lines[num_gone].width
            num_gone += 1
        self._painted = _Painted([*lines[:num_gone], Line("", 0)], num_gone, width)
        if not on_screen:
            return ""
        num_up = min(num_rows, room) - 1
        return (f"\x1b[{num_up}A" if num_up else "") + "\r\x1b[J"


def rendered_lines(console: Console, renderable: RenderableType, *, width: int) -> list[Line]:
    """Return the lines of a renderable at a width in columns, without trailing spaces."""
    options = console.options.update(width=width, height=None, highlight=False)
    rows = [_stripped(row) for row in console.render_lines(renderable, options, pad=False)]
    widths = [Segment.get_line_length(row) for row in rows]
    with console.capture() as captured:
        for row in rows:
            console.print(Segments([*row, Segment.line()]), soft_wrap=True)
    lines = list(map(Line, captured.get().split("\n"), widths))
    while lines and not lines[0].width:
        del lines[0]
    while lines and not lines[-1].width:
        del lines[-1]
    return lines


def _stripped(row: list[Segment]) -> list[Segment]:
    """Return the segments of a row without trailing spaces, which would wrap in a narrower terminal."""
    kept = [segment for segment in row if not segment.control]
    while kept and not kept[-1].text.strip(" "):
        kept.pop()
    if kept:
        last = kept[-1]
        kept[-1] = Segment(last.text.rstrip(" "), last.style)
    return kept
