"""Editor: a text in the editor of the user."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from genserve.cli.chat.typed_keys import released_keys
from genserve.errors import InvalidRequest

_REMEDY = "set EDITOR to the command of an editor"
_USUAL = ("sensible-editor", "nano", "vim", "vi")


def edited(text: str) -> str:
    """Return the text after an edit in $VISUAL, $EDITOR or a usual editor, without a line feed at its end.

    Raises:
        InvalidRequest: there is no editor, it failed, or it left no UTF-8.
    """
    command = _command()
    with tempfile.TemporaryDirectory(prefix="genserve-") as folder:     # only its owner may read it
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
def _interrupts_ignored() -> Iterator[None]:
    """Leave Ctrl-C to the editor; unlike SIG_IGN a handler is not inherited."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
