"""Block files: blocks of a KV cache in a folder, many in a file, which many processes read and write.

    FOLDER/1f0c...            a folder for each fingerprint of a model: what its keys and values depend on
    FOLDER/1f0c.../ab12....kv blocks that were written together, behind a table of their keys and checksums

The table fills whole pages, so that blocks of whole pages go past the page cache, from and to the memory of
the caller. A file is written under a hidden name, renamed when it is whole, and never changed. The checksums
find what a system that lost power has left of it, so no file is synchronized. The modification time says when
one of its blocks was last used.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_SETFL, fcntl
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<8sIIQ")  # mark of the format, checksum of the table, number and size of blocks
_ENTRY = struct.Struct("<32sI")  # of the table: the key of a block, and the checksum of its content
_MARK = b"genserv3"
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none
_PAGE_BYTES = 4096  # to which disks and file systems align what goes past the page cache
_HUGE_PAGE_BYTES = 2 << 20
# A change is not seen if the folder has changed in the same tick of the file system's clock, or while a block
# was written; then it is found when the folder is listed again.
_LIST_AGAIN_S = 10.0
_ABANDONED_S = 600.0  # an unfinished file that is older belongs to a process that was killed


@dataclass(frozen=True, slots=True)
class _File:
    """What the table of a file says; nothing, if it is damaged or cannot be read."""

    name: str
    block_bytes: int = 0
    entries: Sequence[tuple[bytes, int]] = ()  # the key and the checksum of each block


class BlockFiles:
    """The blocks of one model in a folder, beside other processes. One thread writes, any thread reads.

    An index in memory has the tables of all files.
    """

    def __init__(self, folder: Path, *, fingerprint: str, read_only: bool = False) -> None:
        """Name the blocks of a model; none is known before `refresh`.

        Args:
            folder: the folder of all models.
            fingerprint: identifies the model, 32 hexadecimal digits.
            read_only: damaged files stay, and are read no more; otherwise they are deleted.
        """
        self._folder = folder / fingerprint
        self._read_only = read_only
        self._seed = zlib.crc32(fingerprint.encode())
        # Names its unfinished files: servers in containers may have equal ids of processes and threads.
        self._writer = secrets.token_hex(8)
        self._header = whole_pages(_PAGE_BYTES)  # of the file that is being written
        self._lock = threading.RLock()  # held to change what follows
        self._files: dict[str, _File] = {}  # by name
        self._places: dict[bytes, tuple[_File, int]] = {}  # by key: the file, and the number in its table
        self._others: dict[bytes, list[tuple[_File, int]]] = {}  # of blocks that two servers wrote at once
        self._listed_ns: int | None = None  # when the folder that was listed last had changed
        self._listed_s = 0.0  # when it was listed

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is in a file, which may be damaged, or deleted since the last `refresh`."""
        return key in self._places

    def refresh(self) -> None:
        """Take note of the files that other processes have written or deleted."""
        with self._lock:
            changed_ns, now_s = self._changed_ns(), time.monotonic()
            if changed_ns == self._listed_ns and now_s < self._listed_s + _LIST_AGAIN_S:
                return
            self._listed_ns, self._listed_s = changed_ns, now_s
            try:
                names = {name for name in os.listdir(self._folder) if _FILE_NAME.fullmatch(name)}  # noqa: PTH208
            except FileNotFoundError:
                names = set()
            except OSError as error:
                logger.warning("%s cannot be read: %s", self._folder, error.strerror)
                return
            for name in self._files.keys() - names:
                self._forget(self._files[name])
            for name in names - self._files.keys():
                self._read_table(name)

    def read(self, keys: Sequence[bytes], rows: NDArray[np.uint8]) -> int:
        """Read the contents of blocks, of the first one and of those that follow it in its file.

        Args:
            keys: the blocks.
            rows: [at least len(keys), block_bytes], C-contiguous, best in `whole_pages`; is overwritten from
                the first row on.

        Returns:
            How many were read; 0: the first one is in no file, or the file is damaged.
        """
        place = self._places.get(keys[0])
        if place is None:
            return 0
        file, first = place
        pairs = zip(keys, file.entries[first:], strict=False)
        sums = [checksum for _, (_, checksum) in takewhile(lambda pair: pair[0] == pair[1][0], pairs)]
        start = file_bytes(len(file.entries), 0) + first * file.block_bytes
        path = self._folder / file.name
        found = rows[: len(sums)]
        content = found.reshape(-1).data
        try:
            with path.open("rb", buffering=0) as opened:
                opened.seek(start)
                descriptor = opened.fileno()
                size = _uncached(descriptor, partial(os.readv, descriptor, [content]))
                while size < len(content) and (more := os.readv(descriptor, [content[size:]])):
                    size += more
        except FileNotFoundError:
            self._forget(file)
            return 0
        except OSError as error:
            logger.warning("%s cannot be read, and its tokens are computed again: %s", path, error.strerror)
            return 0
        if size < len(content) or _checksums(found) != sums:
            self._discard(file)
            return 0
        return len(sums)

    def write(self, keys: Sequence[bytes], rows: NDArray[np.uint8]) -> int:
        """Write the blocks that are in no file to a new one; return its size, or 0.

        Args:
            keys: the blocks.
            rows: [len(keys), block_bytes], their contents, best in `whole_pages`.

        Raises:
            OSError: the file cannot be written; none is left behind.
        """
        missing = [index for index, key in enumerate(keys) if key not in self]
        if not missing:
            return 0
        if len(missing) < len(keys):
            keys, rows = [keys[index] for index in missing], rows[missing]
        entries = [*zip(keys, _checksums(rows), strict=True)]
        header = self._fill_header(entries, rows.shape[1])
        # Two processes that computed the same blocks with other bits have files with other names.
        stem = blake2b(header, digest_size=32).hexdigest()
        file = _File(f"{stem}.kv", rows.shape[1], entries)
        changed_ns = self._changed_ns()
        # Not pathlib and io: a writer of small files would hold the interpreter for longer than it writes.
        unfinished = f"{self._folder}/.{stem}.{self._writer}"
        content = rows.reshape(-1).data
        num_bytes, num_aligned = len(header) + len(content), len(content) // _PAGE_BYTES * _PAGE_BYTES
        try:
            opened = self._create(unfinished)
            try:
                size = _uncached(opened, partial(os.writev, opened, [header, content[:num_aligned]]))
                while size < num_bytes:  # a part of a page, or the disk is nearly full
                    begun = size - len(header)
                    rest = [content[begun:]] if begun >= 0 else [header[size:], content]
                    size += os.writev(opened, rest)
            finally:
                os.close(opened)
            os.replace(unfinished, f"{self._folder}/{file.name}")  # noqa: PTH105
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished)  # noqa: PTH108
            raise
        with self._lock:
            self._add(file)
            if changed_ns == self._listed_ns:
                self._listed_ns = self._changed_ns()
        return size

    def touch(self, keys: Sequence[bytes]) -> None:
        """Have the files with blocks of a prompt count as used now, that of the first block last.

        So a prompt is deleted from its end: a block is of no use without those before it.
        """
        places = [self._places.get(key) for key in keys]
        names = dict.fromkeys(place[0].name for place in places if place is not None)
        now_ns = time.time_ns()  # the system's own stamps are the same for milliseconds
        for number, name in enumerate(reversed(names)):
            with suppress(OSError):
                os.utime(f"{self._folder}/{name}", ns=(now_ns + number, now_ns + number))

    def _create(self, path: str) -> int:
        try:
            return os.open(path, _CREATE, 0o666)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, _CREATE, 0o666)

    def _changed_ns(self) -> int:
        """Return when a file in the folder was last created, renamed or deleted; 0: there is no folder."""
        try:
            return os.stat(self._folder).st_mtime_ns  # noqa: PTH116
        except OSError:
            return 0

    def _read_table(self, name: str) -> None:
        """Take note of the blocks of a file, and of a damaged one that it has none."""
        path = self._folder / name
        try:
            with path.open("rb") as opened:
                head = opened.read(_HEAD.size).ljust(_HEAD.size)
                mark, checksum, num_blocks, block_bytes = _HEAD.unpack(head)
                is_whole = os.fstat(opened.fileno()).st_size == file_bytes(num_blocks, block_bytes)
                table = opened.read(file_bytes(num_blocks, 0) - _HEAD.size) if is_whole else b""
        except FileNotFoundError:  # deleted meanwhile
            return
        except OSError as error:
            logger.warning("%s cannot be read, and its tokens are computed again: %s", path, error.strerror)
            self._add(_File(name))  # or each listing would say so
            return
        if mark == _MARK and is_whole and checksum == self._table_checksum(table, block_bytes):
            entries = _ENTRY.iter_unpack(table[: num_blocks * _ENTRY.size])
            self._add(_File(name, block_bytes, [*entries]))
        else:
            self._discard(_File(name))

    def _fill_header(self, entries: Sequence[tuple[bytes, int]], block_bytes: int) -> memoryview:
        """Return what a file has before its blocks, until the next file is written."""
        num_bytes = file_bytes(len(entries), 0)
        if len(self._header) < num_bytes:
            self._header = whole_pages(num_bytes)
        header = self._header[:num_bytes].data
        header[_HEAD.size :] = b"".join(_ENTRY.pack(*entry) for entry in entries).ljust(
            num_bytes - _HEAD.size, b"\0"
        )
        checksum = self._table_checksum(header[_HEAD.size :], block_bytes)
        _HEAD.pack_into(header, 0, _MARK, checksum, len(entries), block_bytes)
        return header

    def _table_checksum(self, table: bytes | memoryview, block_bytes: int) -> int:
        return zlib.crc32(table, zlib.crc32(block_bytes.to_bytes(8, "little"), self._seed))

    def _add(self, file: _File) -> None:
        with self._lock:
            if (before := self._files.get(file.name)) is not None:
                self._forget(before)
            self._files[file.name] = file
            for number, (key, _) in enumerate(file.entries):
                if (place := self._places.get(key)) is not None:
                    self._others.setdefault(key, []).append(place)
                self._places[key] = file, number

    def _forget(self, file: _File) -> None:
        with self._lock:
            self._files.pop(file.name, None)
            for key, _ in file.entries:
                others = [place for place in self._others.pop(key, ()) if place[0] is not file]
                if self._places.get(key, (None, 0))[0] is file:
                    del self._places[key]
                    if others:
                        self._places[key] = others.pop()
                if others:
                    self._others[key] = others

    def _discard(self, file: _File) -> None:
        """Use a damaged file no more, and delete it, so that its blocks are written again."""
        path = self._folder / file.name
        logger.warning("%s is damaged, and its tokens are computed again", path)
        with self._lock:
            self._forget(file)
            if not self._read_only:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    return  # the next file with this name is another one
            self._add(_File(file.name))  # it stays, and is read no more


def file_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return the size of a file."""
    return _page_end(_HEAD.size + num_blocks * _ENTRY.size) + num_blocks * block_bytes


def max_blocks(max_file_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a file of at most this size has, or 1."""
    return max(1, (max_file_bytes - _HEAD.size - _PAGE_BYTES) // (_ENTRY.size + block_bytes))


def _page_end(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def whole_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory of whole pages, huge ones if it is large, of at least `num_bytes` > 0.

    Other memory is read and written through the page cache.
    """
    page_bytes = _PAGE_BYTES if num_bytes < _HUGE_PAGE_BYTES else _HUGE_PAGE_BYTES
    size = -(-num_bytes // page_bytes) * page_bytes
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if page_bytes == _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)  # the disk's driver takes longer with each page
    return np.frombuffer(memory, np.uint8)


def _uncached(opened: int, transfer: Callable[[], int]) -> int:
    """Read or write whole pages of a file past the page cache; return their size, or 0.

    The KV cache has the blocks already, or soon. Memory for the page cache takes more CPU time than the rest.
    """
    try:
        fcntl(opened, F_SETFL, _DIRECT)
        return transfer()
    except OSError:  # a file system refuses it; other errors come again without it
        return 0
    finally:
        fcntl(opened, F_SETFL, 0)


def _checksums(rows: NDArray[np.uint8]) -> list[int]:
    """Return the CRC-32 of the sums of each row's pages; that of all bytes would take longer than writing."""
    num_pages = rows.shape[1] // _PAGE_BYTES
    words = rows[:, : num_pages * _PAGE_BYTES].view(np.uint64)
    sums = words.reshape(len(rows), num_pages, _PAGE_BYTES // 8).sum(axis=2)
    rests = rows[:, num_pages * _PAGE_BYTES :]
    return [zlib.crc32(rest.data, zlib.crc32(sum_.data)) for sum_, rest in zip(sums, rests, strict=True)]


def trim(folder: Path, *, max_bytes: int) -> int:
    """Delete the least recently used files of all models, until the others have at most `max_bytes`.

    Deletes unfinished files of processes that were killed, too. Other files stay.

    Returns:
        The size of the files that are left.
    """
    found = sorted(_scan(folder))
    num_bytes = sum(size for _, size, _ in found)
    for _, size, path in found:
        if num_bytes <= max_bytes:
            break
        with suppress(FileNotFoundError):  # another process has deleted it
            path.unlink()
        num_bytes -= size
    return num_bytes


def _scan(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield when each file was last used, its size and its path; delete abandoned files."""
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
