"""Terminal: a pseudo-terminal with a program in it, for tests that type."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import pyte
from pyte.screens import Char

PATIENCE_S = 15
# A prompt begins with this: it requests bracketed paste once it controls the terminal.
PROMPT = "\x1b[?2004h"
_ESCAPE = re.compile(r"\x1b(?!\[\?2004h)(\[[0-9;?]*[A-Za-z]|[=>])")
CTRL_C, CTRL_D, ENTER, ALT_ENTER, TAB, UP = "\x03", "\x04", "\r", "\x1b\r", "\t", "\x1b[A"


class Terminal:
    """Runs `python -m MODULE` in a terminal, whose screen is that of an emulator."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        home: Path,
        columns: int = 200,
        rows: int = 24,
        environment: Mapping[str, str] = {},
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._emulator = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes_before = termios.tcgetattr(slave)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # The size is the terminal's, not the one that a test runner gives its processes.
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            | {
                "HOME": str(home),
                "XDG_STATE_HOME": str(home),
                "TERM": "xterm",
                # This terminal does not answer where its cursor is.
                "PROMPT_TOOLKIT_NO_CPR": "1",
            }
            | environment,
        )
        os.close(slave)
        self._unread = ""

    def type(self, keys: str) -> None:
        self.type_bytes(keys.encode())

    def type_bytes(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def expect(self, text: str) -> str:
        """Read up to and including the text; return what came before it, both without escape sequences."""
        while text not in (plain := _ESCAPE.sub("", self._unread)):
            ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
            assert ready, f"no {text!r} in {self._unread!r}"
            self._read()
        before, _, self._unread = plain.partition(text)
        return before

    def _read(self) -> None:
        data = os.read(self._master, 65536)
        self._emulator.feed(data)
        self._unread += data.decode(errors="replace")

    def screen(self) -> list[str]:
        """Return the lines as people see them, also those that have scrolled away."""
        rows = [*self._screen.history.top, *(self._screen.buffer[y] for y in range(self._screen.lines))]
        lines = ["".join(row[x].data for x in range(self._screen.columns)).rstrip() for row in rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def styled(self, text: str) -> list[Char]:
        """Return the characters of the screen's first occurrence of a text."""
        for y in range(self._screen.lines):
            row = self._screen.buffer[y]
            if (x := self._screen.display[y].find(text)) >= 0:
                return [row[i] for i in range(x, x + len(text))]
        raise AssertionError(f"no {text!r} on the screen")

    def expect_screen(self, is_shown: Callable[[list[str]], bool]) -> list[str]:
        """Read until the screen shows something; return its lines."""
        while not is_shown(lines := self.screen()):
            ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
            assert ready, "\n".join(lines)
            self._read()
        return lines

    def resize(self, *, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def modes(self) -> list[object]:
        """Return the modes of the terminal, as `stty -a` shows them."""
        return termios.tcgetattr(self._master)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)
