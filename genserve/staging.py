"""Staging: hidden folders for files that are not complete, which no killed process leaves behind for good."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """An empty hidden folder, deleted on exit together with those that killed processes left behind.

    The folder of the same name of another running process is locked, and stays.
    """
    parent.mkdir(parents=True, exist_ok=True)
    leftover = re.compile(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}\.tmp")
    for path in parent.iterdir():
        if leftover.fullmatch(path.name):
            # Its process may end and delete it meanwhile; in /tmp it may be of another user, or no folder.
            with suppress(OSError), _locked(path) as is_free:
                if is_free:
                    shutil.rmtree(path)
    made = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    with _locked(made):
        # An unlocked folder with this suffix counts as a leftover, so it is locked before it is renamed.
        folder = made.rename(f"{made}.tmp")
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the process ends at the latest; False: another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:     # some network file systems have no locks
        return True
    return True
