"""Typed keys: kept unseen for the next prompt while an answer streams; Ctrl-C still interrupts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

if sys.platform != "win32":
    import termios


@contextmanager
def held_keys() -> Iterator[None]:
    """Neither show nor interpret what is typed: the next prompt reads it as if it were typed there."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    found = termios.tcgetattr(terminal)
    held = termios.tcgetattr(terminal)
    held[0] &= ~termios.ICRNL
    held[3] &= ~(termios.ECHO | termios.ICANON)

    def hold(_signal: int = 0, _frame: FrameType | None = None) -> None:
        termios.tcsetattr(terminal, termios.TCSANOW, held)

    before = signal.signal(signal.SIGCONT, hold)    # between Ctrl-Z and `fg` a shell changes the terminal
    try:
        hold()
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, found)
        signal.signal(signal.SIGCONT, before)


@contextmanager
def released_keys() -> Iterator[None]:
    """Let another program read the keys, in the midst of `held_keys`."""
    if sys.platform == "win32" or not sys.stdin.isatty():
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


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP leave by SystemExit, so that the terminal is restored."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
