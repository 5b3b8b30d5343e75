"""Record `genserve chat` in a terminal for the picture in docs/chat.md, with smollm2 from a model repository.

    python scripts/record_repl.py MODEL_REPOSITORY [CAST]

Types into a real chat, and draws what the terminal shows as an animated SVG. The recording itself is
written to CAST, as asciicast v2 for `asciinema play`.
"""

from __future__ import annotations

import fcntl
import html
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby
from pathlib import Path

import pyte
from pyte.screens import Char

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "chat.svg"
COLUMNS, ROWS = 92, 24
# With this seed, and the seed of /compare, all answers are right. Read them again when you record.
SEED = "9"
# What is typed, what the terminal then shows, and for how many seconds the picture stays.
STEPS = (
    ("Suggest one name for a black cat, and say why in one sentence.\r", "tokens/s", 1.5),
    ("/alt\r", "Esc", 1.5),
    ("\t", "", 0.8),
    ("\x1b[B", "", 0.8),
    ("\x1b[B", "", 0.8),
    ("\r", "tokens/s", 2.0),
    ("/clear\r", "cleared", 0.5),
    ("/compare 25 Explain in one sentence what photosynthesis is.\r", "neither", 2.5),
    ("1\r", "", 0.5),
    ("/tokens\r", "left", 0.5),
    ("\x04", "", 0.0),
)
KEY_S, MAX_PAUSE_S, FRAME_S, LAST_S, PATIENCE_S = 0.045, 2.5, 0.12, 3.0, 60.0

FONTS = 'ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace'
CELL_WIDTH, CELL_HEIGHT, MARGIN, FONT_SIZE = 8.4, 18, 14, 14
FOREGROUND, BACKGROUND = "#d6dae2", "#171b24"
COLOURS = {
    "black": "#2a303c", "red": "#e0707a", "green": "#8fbf7f", "brown": "#d9b36c", "blue": "#6ea8e0",
    "magenta": "#b78bd6", "cyan": "#66bfc4", "white": "#d6dae2", "brightblack": "#7f8899",
    "brightred": "#ee8a92", "brightgreen": "#a5d394", "brightbrown": "#ebcb8b", "brightblue": "#8cbcf0",
    "brightmagenta": "#cba6e6", "brightcyan": "#83d3d7", "brightwhite": "#f2f4f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """Output of the program, and when it was written, in seconds since the beginning."""

    at_s: float
    text: str


class Screen(pyte.Screen):
    """A screen that shows dim text in grey, since the emulator lacks dim text."""

    def select_graphic_rendition(self, *attrs: int, **kwargs: bool) -> None:
        """Set the style of what is written next."""
        super().select_graphic_rendition(*(90 if attr == 2 else attr for attr in attrs), **kwargs)


def record(repository: str) -> list[Output]:
    """Type the steps into a chat; return what it writes."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = ["genserve", "chat", "smollm2", "--model-repository", repository, "--seed", SEED]
    with tempfile.TemporaryDirectory() as state:
        environment = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": state}
        program = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | environment,
        )
        os.close(slave)
        outputs: list[Output] = []
        began_s = time.monotonic()

        def read(for_s: float, until: str = "", begin: int = 0) -> None:
            end_s = time.monotonic() + (PATIENCE_S if until else for_s)
            while (left_s := end_s - time.monotonic()) > 0 and program.poll() is None:
                if until and until in "".join(output.text for output in outputs[begin:]):
                    return
                if select.select([master], [], [], left_s)[0]:
                    text = os.read(master, 65536).decode(errors="replace")
                    outputs.append(Output(time.monotonic() - began_s, text))

        read(0, "leaves")
        read(1.0)
        for keys, until, pause_s in STEPS:
            begin = len(outputs)
            for key in [keys] if keys.startswith("\x1b") else keys:
                os.write(master, key.encode())
                read(KEY_S)
            if until:
                read(0, until, begin)
            read(pause_s)
        program.wait(PATIENCE_S)
    return outputs


def without_long_pauses(outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs, closer together."""
    short, at_s, before_s = [], 0.0, outputs[0].at_s
    for output in outputs:
        at_s += min(output.at_s - before_s, MAX_PAUSE_S)
        before_s = output.at_s
        short.append(Output(at_s, output.text))
    return short


Row = tuple[Char, ...]
Frame = tuple[float, list[Row], tuple[int, int] | None]     # seconds, rows, the cursor


def frames(outputs: Sequence[Output]) -> Iterator[Frame]:
    """Yield what the terminal shows, a few times per second."""
    screen = Screen(COLUMNS, ROWS)
    emulator = pyte.Stream(screen)
    for tick, group in groupby(outputs, key=lambda output: int(output.at_s / FRAME_S)):
        for output in group:
            emulator.feed(output.text)
        rows = [tuple(screen.buffer[y][x] for x in range(COLUMNS)) for y in range(ROWS)]
        cursor = None if screen.cursor.hidden else (screen.cursor.x, screen.cursor.y)
        yield tick * FRAME_S, rows, cursor


def is_starting(frame: Frame) -> bool:
    """Return whether a frame comes before the first prompt."""
    return not any(row[0].data == ">" for row in frame[1])


def svg_of(shown: Sequence[Frame]) -> str:
    """Return the frames as an animated picture, the last one first: some programs show the first one only."""
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, ROWS * CELL_HEIGHT + 2 * MARGIN
    ids: dict[Row, str] = {}
    strips, moves = [], []
    began_s = shown[0][0]
    duration_s = shown[-1][0] - began_s + LAST_S
    for index, (at_s, rows, cursor) in enumerate(shown):
        uses = "".join(
            f'<use href="#{ids.setdefault(row, f"r{len(ids)}")}" y="{y * CELL_HEIGHT}"/>'
            for y, row in enumerate(rows)
            if any(char.data.strip() or char.reverse for char in row)
        )
        if cursor:
            x, y = cursor[0] * CELL_WIDTH, cursor[1] * CELL_HEIGHT
            uses += f'<rect class="c" x="{x:.1f}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}"/>'
        strips.append(f'<g transform="translate(0 {index * height:.0f})">{uses}</g>')
        moves.append(f"{(at_s - began_s) / duration_s:.3%}{{transform:translateY({-index * height:.0f}px)}}")
    definitions = "".join(f'<g id="{name}">{row_svg(row)}</g>' for row, name in ids.items())
    last = -(len(shown) - 1) * height
    play = f"play {duration_s:.1f}s steps(1,end) {LAST_S - duration_s:.1f}s infinite"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">
<title>A chat in the terminal</title>
<style>
text{{font:{FONT_SIZE}px {FONTS};fill:{FOREGROUND};white-space:pre}}
.b{{font-weight:bold}}.i{{font-style:italic}}.u{{text-decoration:underline}}.c{{fill:{FOREGROUND};opacity:.6}}
#film{{transform:translateY({last:.0f}px);animation:{play}}}
@keyframes play{{{"".join(moves)}100%{{transform:translateY({last:.0f}px)}}}}
</style>
<defs>{definitions}</defs>
<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>
<svg x="{MARGIN}" y="{MARGIN}" width="{COLUMNS * CELL_WIDTH:.0f}" height="{ROWS * CELL_HEIGHT}">
<g id="film">{"".join(strips)}</g>
</svg>
</svg>
"""


def row_svg(row: Row) -> str:
    """Return the text of a row, split by style."""
    parts = []
    for _, group in groupby(enumerate(row), key=lambda cell: cell[1]._replace(data="")):
        cells = list(group)
        text = "".join(char.data for _, char in cells)
        char, x = cells[0][1], cells[0][0] * CELL_WIDTH
        foreground, background = (colour(char.fg, FOREGROUND), colour(char.bg, ""))
        if char.reverse:
            foreground, background = background or BACKGROUND, foreground
        width = len(cells) * CELL_WIDTH
        if background:
            box = f'width="{width:.1f}" height="{CELL_HEIGHT}"'
            parts.append(f'<rect x="{x:.1f}" {box} fill="{background}"/>')
        if text.strip():
            styles = (("b", char.bold), ("i", char.italics), ("u", char.underscore))
            names = " ".join(name for name, is_on in styles if is_on)
            parts.append(
                f'<text x="{x:.1f}" y="{FONT_SIZE}" textLength="{width:.1f}"'
                + (f' class="{names}"' if names else "")
                + (f' fill="{foreground}" style="fill:{foreground}"' if foreground != FOREGROUND else "")
                + f">{html.escape(text)}</text>"
            )
    return "".join(parts)


def colour(name: str, default: str) -> str:
    """Return a colour of the emulator as CSS."""
    return default if name == "default" else COLOURS.get(name, f"#{name}")


def main(repository: str, cast: str | None = None) -> None:
    """Record a chat, and draw it."""
    outputs = without_long_pauses(record(repository))
    if cast:
        header = {"version": 2, "width": COLUMNS, "height": ROWS}
        lines = [header, *([round(output.at_s, 3), "o", output.text] for output in outputs)]
        Path(cast).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    PICTURE.write_text(svg_of(list(dropwhile(is_starting, frames(outputs)))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
