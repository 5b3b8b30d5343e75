"""Block files: blocks of a KV cache in a folder, a file each, which many processes read and write.

    FOLDER/1f0c...            a folder for each fingerprint of a model: what its keys and values depend on
    FOLDER/1f0c.../ab12....kv a block, named by its key

A file is written under a hidden name and renamed when it is whole. Its checksum finds what a system that lost
power has left of it, so nothing waits until the disk has it. The modification time says when a block was last
used.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sI4x")       # the mark of the format, and the checksum of key and content
HEADER_BYTES = _HEADER.size
_MARK = b"genserve"
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_ABANDONED_S = 600.0    # an unfinished file that is older belongs to a process that was killed


class BlockFiles:
    """The blocks of one model in a folder, beside other processes. One thread writes, any thread reads."""

    def __init__(self, folder: Path, *, fingerprint: str, read_only: bool = False) -> None:
        """Name the blocks of a model.

        Args:
            folder: the folder of all models.
            fingerprint: identifies the model, 32 hexadecimal digits.
            read_only: damaged blocks stay, and are read no more; otherwise they are deleted.
        """
        self._folder = folder / fingerprint
        self._read_only = read_only
        self._damaged: set[bytes] = set()       # blocks of which the log says so
        self._seed = zlib.crc32(fingerprint.encode())
        # Names its unfinished files: servers in containers may have equal ids of processes and threads.
        self._writer = secrets.token_hex(8)

    def read(self, key: bytes, row: NDArray[np.uint8]) -> bool:
        """Read the content of a block into `row`; False: there is no such block, or its file is damaged."""
        if key in self._damaged:
            return False
        header = bytearray(HEADER_BYTES)
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                size = os.readv(file.fileno(), [header, row.data, bytearray(1)])
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("%s cannot be read, and its tokens are computed again: %s", path, error.strerror)
            return False
        if size == HEADER_BYTES + len(row) and bytes(header) == self._header(key, row):
            return True
        logger.warning("%s is damaged, and its tokens are computed again", path)
        if self._read_only:
            self._damaged.add(key)
        else:
            with suppress(OSError):     # so that it is written again
                path.unlink()
        return False

    def write(self, key: bytes, row: NDArray[np.uint8]) -> int:
        """Write a block, unless it is there; return the size of the file, or 0.

        Raises:
            OSError: the file cannot be written; none is left behind.
        """
        if key in self:
            return 0
        # Not pathlib and io: a writer of small blocks would hold the interpreter for longer than it writes.
        unfinished = f"{self._folder}/.{key.hex()}.{self._writer}"
        try:
            file = self._create(unfinished)
            try:
                size = os.writev(file, [self._header(key, row), row.data])
                while size < HEADER_BYTES + len(row):    # the disk is nearly full: the next call says so
                    size += os.write(file, row.data[size - HEADER_BYTES :])
            finally:
                os.close(file)
            os.replace(unfinished, self._path(key))  # noqa: PTH105
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished)  # noqa: PTH108
            raise
        return size

    def _create(self, path: str) -> int:
        try:
            return os.open(path, _CREATE, 0o666)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, _CREATE, 0o666)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block has a file, which may be damaged."""
        return self._path(key).exists()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Have the blocks of a prompt that are there count as used now, the first one last.

        So a prompt is deleted from its end: a block is of no use without those before it.
        """
        now_ns = time.time_ns()     # the system's own stamps are the same for milliseconds
        for number, key in enumerate(reversed(keys)):
            with suppress(OSError):
                os.utime(self._path(key), ns=(now_ns + number, now_ns + number))

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"

    def _header(self, key: bytes, row: NDArray[np.uint8]) -> bytes:
        return _HEADER.pack(_MARK, zlib.crc32(row.data, zlib.crc32(key, self._seed)))


def trim(folder: Path, *, max_bytes: int) -> int:
    """Delete the least recently used blocks of all models, until the others have at most `max_bytes`.

    Deletes unfinished files of processes that were killed, too. Other files stay.

    Returns:
        The size of the blocks that are left.
    """
    found = sorted(_scan(folder))
    num_bytes = sum(size for _, size, _ in found)
    for _, size, path in found:
        if num_bytes <= max_bytes:
            break
        with suppress(FileNotFoundError):       # another process has deleted it
            path.unlink()
        num_bytes -= size
    return num_bytes


def _scan(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield when each block was last used, its size and its path; delete abandoned files."""
    abandoned_ns = time.time_ns() - int(_ABANDONED_S * 1e9)
    for path in folder.iterdir():
        if not _FOLDER_NAME.fullmatch(path.name) or not path.is_dir():
            continue
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _FILE_NAME.fullmatch(entry.name):
                        stat = entry.stat()
                        yield stat.st_mtime_ns, stat.st_size, Path(entry.path)
                    elif _UNFINISHED.fullmatch(entry.name) and entry.stat().st_mtime_ns < abandoned_ns:
                        Path(entry.path).unlink()
