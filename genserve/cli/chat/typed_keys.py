"""Typed keys: kept unseen for the next prompt while an answer streams; Ctrl-C still interrupts."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_keys() -> Iterator[None]:
    """Neither show nor interpret what is typed: the next prompt reads it as if it were typed there.

    SIGTERM and SIGHUP leave by SystemExit, so that every end of the program restores the terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    found = termios.tcgetattr(terminal)
    held = termios.tcgetattr(terminal)
    held[0] &= ~termios.ICRNL
    held[3] &= ~(termios.ECHO | termios.ICANON)

    def hold(_number: int = 0, _frame: FrameType | None = None) -> None:
        termios.tcsetattr(terminal, termios.TCSANOW, held)

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # Between Ctrl-Z and `fg`, after which comes SIGCONT, a shell changes the terminal.
    handlers = ((signal.SIGCONT, hold), (signal.SIGTERM, leave), (signal.SIGHUP, leave))
    before = [(number, signal.getsignal(number)) for number, _ in handlers]
    try:
        for number, handler in handlers:
            signal.signal(number, handler)
        hold()
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, found)
        for number, earlier in before:
            signal.signal(number, earlier)


@contextmanager
def released_keys() -> Iterator[None]:
    """Let another program read the keys, in the midst of `held_keys`."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    held = termios.tcgetattr(terminal)
    usual = termios.tcgetattr(terminal)
    usual[0] |= termios.ICRNL
    usual[3] |= termios.ECHO | termios.ICANON
    termios.tcsetattr(terminal, termios.TCSADRAIN, usual)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, held)
