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
from pathlib import Path
from typing import Self

PATIENCE_S = 15
# A prompt begins with this: it requests bracketed paste once it controls the terminal.
PROMPT = "\x1b[?2004h"
_ESCAPE = re.compile(r"\x1b(?!\[\?2004h)(\[[0-9;?]*[A-Za-z]|[=>])")
CTRL_C, CTRL_D, ENTER, ALT_ENTER, TAB, UP = "\x03", "\x04", "\r", "\x1b\r", "\t", "\x1b[A"


class Terminal:
    """Runs `python -m MODULE` in a terminal of 24 rows and 200 columns."""

    def __init__(self, module: str, *, home: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ
            | {
                "HOME": str(home),
                "XDG_STATE_HOME": str(home),
                "TERM": "xterm",
                # This terminal does not answer where its cursor is.
                "PROMPT_TOOLKIT_NO_CPR": "1",
            },
        )
        os.close(slave)
        self._unread = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> str:
        """Read up to and including the text; return what came before it, both without escape sequences."""
        while text not in (plain := _ESCAPE.sub("", self._unread)):
            ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
            assert ready, f"no {text!r} in {self._unread!r}"
            self._unread += os.read(self._master, 65536).decode(errors="replace")
        before, _, self._unread = plain.partition(text)
        return before

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)
