"""Disk: a folder that cannot be written to, as an error that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from genserve.errors import ExportError

__all__ = ["writing_into"]

_FULL = "make room, or choose a folder on another disk"
_CLOSED = "choose a folder that you may write to, or change its permissions"
_REMEDIES: Mapping[int | None, str] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.EEXIST: "there is a file of this name: choose another folder",
}


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Raise ExportError where the system refuses what is written below a folder; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(folder) else ""
        raise ExportError(
            f"{folder} cannot be written to: {error.strerror}{where}", remedy=_REMEDIES[error.errno]
        ) from error
