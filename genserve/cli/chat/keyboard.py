"""Keyboard: keeps what is typed during an answer for the next prompt, runs editors, and defers Ctrl-C."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from genserve.errors import InvalidRequest

_REMEDY = "set EDITOR to the command of an editor"
_USUAL = ("sensible-editor", "nano", "vim", "vi")


@contextmanager
def held_keys() -> Iterator[None]:
    """Neither show nor interpret what is typed, so that the next prompt reads it as if it were typed there.

    Ctrl-C still interrupts. SIGTERM and SIGHUP raise SystemExit, so that every end of the program restores
    the terminal.
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

    # A shell changes the terminal between Ctrl-Z and `fg`, which sends SIGCONT.
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
    """Let another program read the keys for a while within `held_keys`."""
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


def edited(text: str) -> str:
    """Let the user edit a text in $VISUAL, $EDITOR or a common editor; return it without a final line feed.

    Raises:
        InvalidRequest: there is no editor, it failed, or the file is not UTF-8.
    """
    command = _command()
    with tempfile.TemporaryDirectory(prefix="genserve-") as folder:     # only the user can read it
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8", errors="replace")
        try:
            with released_keys(), _interrupts_ignored():
                status = subprocess.run([*command, str(path)], check=False).returncode
            if status:
                raise InvalidRequest(f"the editor {command[0]} failed with status {status}", remedy=_REMEDY)
            return path.read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            raise InvalidRequest(f"the editor {command[0]}: {error.strerror}", remedy=_REMEDY) from None
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the edited text is not UTF-8, at byte {error.start}") from None


def _command() -> list[str]:
    named = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    try:
        command = shlex.split(named) if named else [name for name in _USUAL if shutil.which(name)][:1]
    except ValueError as error:
        raise InvalidRequest(f"EDITOR is {named!r}: {error}", remedy=_REMEDY) from None
    if not command:
        raise InvalidRequest("there is no editor", remedy=_REMEDY)
    return command


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, which must not stop halfway.

    Once a KeyboardInterrupt has cut a `print` or a capture short, rich's Console prints nothing any more, and
    an interrupted display does not know what the terminal shows. Other threads are not interrupted anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda _number, frame: deferred.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if deferred and callable(before):
            before(signal.SIGINT, deferred[0])


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Leave Ctrl-C to the editor. This is a handler, since a child would inherit SIG_IGN."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
