"""Files: reads regular files of models, but no FIFO or device, which may block or never end; writes safely.

Incomplete files are in hidden folders. If a process is killed, a later one deletes its folders.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EFBIG, EILSEQ, EINVAL
from pathlib import Path

# Smaller files are edited by people, who would change the copy with the original.
_MIN_LINKED_BYTES = 2**20


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """Read a whole file.

    Args:
        path: the file; links are followed.
        max_bytes: the longest file that is read.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is longer.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. The flag has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(EINVAL, f"it is {_kind(status.st_mode)}, not a regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(EFBIG, f"it is longer than {max_bytes} bytes", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(descriptor)


def read_regular_text(path: Path, *, max_bytes: int) -> str:
    """Read a whole file of UTF-8; see `read_regular_file`.

    Raises:
        OSError: the file cannot be read, is not a regular file, is longer, or is not UTF-8; has a `strerror`.
    """
    try:
        return read_regular_file(path, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OSError(EILSEQ, str(error), str(path)) from None


def special_kind(path: Path) -> str:
    """Return the kind of a special file, such as "a FIFO"; empty for a file, a folder or a missing path."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else _kind(mode)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Copy a file; a large one becomes a link to the same data, where the file system can make one."""
    if os.path.getsize(source) >= _MIN_LINKED_BYTES:    # noqa: PTH202  # a copy_function gets texts
        try:
            os.link(source, target, follow_symlinks=True)
        except OSError:     # of another disk, or a file system without links
            pass
        else:
            return
    shutil.copy2(source, target)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Open an empty, private, hidden file that replaces `path` on exit.

    After an exception the hidden file is deleted, and `path` stays as it was.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    made = Path(name)
    try:
        yield made
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


@contextmanager
def staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make an empty hidden folder, and delete it on exit, with any that killed processes have left behind.

    Folders of other running processes are locked, and stay.
    """
    parent.mkdir(parents=True, exist_ok=True)
    leftover = re.compile(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}\.tmp")
    for path in parent.iterdir():
        if leftover.fullmatch(path.name):
            # The process may end and delete its folder meanwhile; in /tmp it may belong to another user, or
            # be a file.
            with suppress(OSError), _locked(path) as is_free:
                if is_free:
                    shutil.rmtree(path)
    made = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    with _locked(made):
        # An unlocked folder with this suffix counts as left behind, so lock it before renaming it.
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
