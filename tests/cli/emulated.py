"""Emulated: a console whose output goes to a terminal emulator in this process."""

from __future__ import annotations

import signal
import threading
from io import StringIO

import pyte
from rich.console import Console


class EmulatedTerminal:
    """A terminal of some size, and the console that writes to it."""

    def __init__(self, *, columns: int, rows: int) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self.written = ""
        self.painted = threading.Event()
        self._emulator = pyte.Stream(self.screen)
        self._lock = threading.Lock()   # a spinner is painted by a thread of its own
        self.console = _InterruptedConsole(
            file=_Writer(self), force_terminal=True, color_system="standard", width=columns, height=rows,
            markup=False, highlight=False, emoji=False, _environ={},
        )  # fmt: skip

    def interrupt_next_rendering(self) -> None:
        """Let Ctrl-C come in the midst of the next rendering on the main thread."""
        self.console.is_interrupted = True

    def write(self, text: str) -> None:
        with self._lock:
            self.written += text
            self.painted.set()
            self._emulator.feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))

    def lines(self) -> list[str]:
        """Return the lines as people see them, also those that have scrolled away."""
        with self._lock:
            rows = [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self.screen.lines))]
            lines = ["".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines


class _InterruptedConsole(Console):
    is_interrupted = False

    def _exit_buffer(self) -> None:
        if self.is_interrupted and threading.current_thread() is threading.main_thread():
            self.is_interrupted = False
            signal.raise_signal(signal.SIGINT)
        super()._exit_buffer()


class _Writer(StringIO):
    def __init__(self, terminal: EmulatedTerminal) -> None:
        super().__init__()
        self._terminal = terminal

    def write(self, text: str) -> int:
        self._terminal.write(text)
        return len(text)
