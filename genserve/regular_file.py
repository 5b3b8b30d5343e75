"""Regular files: reads files of models, and nothing that waits or never ends, such as a FIFO or a device."""

from __future__ import annotations

import os
import stat
from errno import EFBIG, EILSEQ, EINVAL
from pathlib import Path


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """Read a whole file.

    Args:
        path: links are followed.
        max_bytes: the longest file that is read.

    Raises:
        OSError: it cannot be read, is not a regular file, or is longer.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. It has no effect on regular files.
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
        OSError: it cannot be read, is not a regular file, is longer, or is not UTF-8; has a `strerror`.
    """
    try:
        return read_regular_file(path, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OSError(EILSEQ, str(error), str(path)) from None


def special_kind(path: Path) -> str:
    """Return what a path is if it is neither a regular file nor a folder; empty: it is, or is missing."""
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
