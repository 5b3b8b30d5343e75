"""Watched files: calls a function when files that an operator maintains have changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

logger = logging.getLogger(__name__)

# How often the files are looked at. A change is passed on when the next look finds no further one, since
# a file may be half written, and a certificate and its key are replaced one after the other.
_INTERVAL_S = 1.0

# What tells two states of a file apart. None: it is not there.
_State: TypeAlias = tuple[int, ...] | None


class WatchedFiles:
    """Watches files on a thread, by their time, size and inode; links are followed.

    Renaming a new file over the old one, rewriting it, and exchanging a link, as Kubernetes does with the
    folder of a secret, are changes.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._watches: list[_Watch] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watched files", daemon=True)

    def add(self, files: Sequence[Path], reload: Callable[[], None]) -> None:
        """Call `reload` on the thread after each change of `files`; before `start`."""
        if files:
            self._watches.append(_Watch(files, reload))

    def start(self) -> None:
        """Begin to watch, if there is any file."""
        if self._watches:
            self._thread.start()

    def close(self) -> None:
        """Stop watching; a call of `reload` that runs is completed."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            for watch in self._watches:
                watch.look()


class _Watch:
    """Files that are loaded together."""

    def __init__(self, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self._files = files
        self._reload = reload
        self._loaded = self._seen = self._state()

    def look(self) -> None:
        """Call the function if the files have changed, and no longer change."""
        state = self._state()
        if state == self._seen != self._loaded:
            self._loaded = state
            try:
                self._reload()
            except Exception:
                logger.exception("reloading %s failed", ", ".join(map(str, self._files)))
        self._seen = state

    def _state(self) -> tuple[_State, ...]:
        return tuple(map(_state_of, self._files))


def _state_of(file: Path) -> _State:
    try:
        status = file.stat()
    except OSError:
        return None
    # The second time changes with the permissions too.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
