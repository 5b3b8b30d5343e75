"""Disk cache: the blocks of a prefix cache in files, written behind the engine and read ahead of it.

A block that is full is copied once, and a thread writes the copy. When a prompt comes, the thread of its
caller reads the blocks that the KV cache does not have, before the request is submitted. So the engine waits
for no disk.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from errno import ENOSPC
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.engine.block_files import BlockFiles, file_bytes, max_blocks, trim, whole_pages
from genserve.engine.engine_request import Request
from genserve.engine.prefix_cache import StoredBlocks, block_keys
from genserve.generation_metrics import GenerationMetrics

logger = logging.getLogger(__name__)

# The engine takes a part of a prompt's blocks between two steps. A file has at most a part, too.
_PART_BYTES = 8 << 20
_MAX_SPARE_PARTS = 4  # whose memory is kept; fresh memory takes longer than the disk
_MAX_UNWRITTEN_BYTES = 256 << 20  # copies that wait for a slow disk; further blocks are not written
# A folder is looked through and trimmed when a model has written a part of its spare space, 1/16 of the
# limit, since other models and processes write too.
_SPARE = 16
_MAX_WRITERS = 4  # that the limit holds for; more may exceed it by 1/64 each
_CLOSE_S = 20.0  # a disk that takes longer to write the rest does not keep a model from unloading


class BlockMemory(Protocol):
    """The contents of the blocks and of the state slots of a KV cache; used by the engine's thread."""

    @property
    def block_bytes(self) -> int:
        """Size of one block."""

    def read_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy whole blocks into `rows`: [len(block_ids), block_bytes]."""

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Overwrite whole blocks with rows of `read_blocks`."""

    @property
    def state_bytes(self) -> int:
        """Size of the recurrent state of one sequence; 0: the model has none."""

    def read_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy recurrent states into `rows`: [len(slots), state_bytes]."""

    def write_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Overwrite recurrent states with rows of `read_states`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheFolder:
    """Where the blocks of all models are written.

    Attributes:
        path: the folder, which other servers may use too.
        max_bytes: the size of all blocks in it.
    """

    path: Path
    max_bytes: int


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of blocks or of states that are to be written."""

    keys: Sequence[bytes]
    rows: NDArray[np.uint8]


# The writing thread writes copies, marks the blocks of a prompt as used, or ends.
_Work: TypeAlias = _Copies | Sequence[bytes] | None


class DiskCache:
    """The blocks of one model in files.

    Attributes:
        memory: the KV cache whose blocks these are.
        writes: whether blocks are written.
        part_blocks: how many blocks are best copied, read and written at once.
    """

    def __init__(
        self,
        memory: BlockMemory,
        *,
        name: str,
        block_size: int,
        fingerprint: str,
        metrics: GenerationMetrics,
        folder: Path | None = None,
        max_bytes: int = 0,
        shipped: Sequence[Path] = (),
    ) -> None:
        """Start the thread that writes.

        Args:
            memory: the KV cache.
            name: the name of the model, for the log.
            block_size: tokens of a block.
            fingerprint: identifies what the contents of blocks depend on besides tokens, 32 hexadecimal
                digits.
            metrics: the metrics of the model.
            folder: where blocks are written and read; None: none are written.
            max_bytes: the size of all blocks in `folder`, of other models too.
            shipped: folders whose blocks are read, but not written.
        """
        self.memory = memory
        self.writes = folder is not None
        self.part_blocks = max_blocks(_PART_BYTES, memory.block_bytes)
        self._name = name
        self._block_size = block_size
        self._metrics = metrics
        self._readable = [BlockFiles(path, fingerprint=fingerprint, read_only=True) for path in shipped]
        self._part_bytes = self.part_blocks * memory.block_bytes
        # Whose pages the system provides when they are first written.
        spare = (whole_pages(self._part_bytes) for _ in range(_MAX_SPARE_PARTS))
        self._spare: deque[NDArray[np.uint8]] = deque(spare, maxlen=_MAX_SPARE_PARTS)
        self._lock = threading.Lock()
        self._unwritten_bytes = 0  # guarded by the lock
        self._was_slow = False  # the log says so
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if folder is not None:
            files = BlockFiles(folder, fingerprint=fingerprint)
            self._readable.insert(0, files)
            self._thread = threading.Thread(
                target=self._run, args=(files, folder, max_bytes), name=f"disk-cache-{name}", daemon=True
            )
            self._thread.start()

    def store(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Copy blocks, given by keys and numbers, which are written soon; for the engine's thread."""
        blocks = blocks[: self._reserve(len(blocks), self.memory.block_bytes)]
        for start in range(0, len(blocks), self.part_blocks):
            part = blocks[start : start + self.part_blocks]
            rows = self._rows(len(part), self.memory.block_bytes)
            self.memory.read_blocks([block for _, block in part], rows)
            self._work.put(_Copies([key for key, _ in part], rows))

    def store_states(self, snapshots: Sequence[tuple[bytes, int]]) -> None:
        """Do the same with states at the ends of blocks, given by the keys of these and by slots."""
        snapshots = snapshots[: self._reserve(len(snapshots), self.memory.state_bytes)]
        if snapshots:
            rows = self._rows(len(snapshots), self.memory.state_bytes)
            self.memory.read_states([slot for _, slot in snapshots], rows)
            self._work.put(_Copies([_state_key(key) for key, _ in snapshots], rows))

    def _reserve(self, num_copies: int, copy_bytes: int) -> int:
        """Reserve memory for copies; return for how many."""
        with self._lock:
            if not self.writes:
                return 0
            num_reserved = min(num_copies, max(0, _MAX_UNWRITTEN_BYTES - self._unwritten_bytes) // copy_bytes)
            self._unwritten_bytes += num_reserved * copy_bytes
        if num_reserved < num_copies and not self._was_slow:
            self._was_slow = True
            logger.warning(
                "the disk is slower than model %s, and some of its blocks are not written", self._name
            )
        return num_reserved

    def read_ahead(
        self,
        request: Request,
        *,
        is_cached: Callable[[bytes], bool],
        has_snapshot: Callable[[bytes], bool],
    ) -> Iterator[StoredBlocks]:
        """Yield the blocks of a prompt that are in files, up to the first one that is nowhere, in parts.

        Of a model with recurrent states these end where a state is known, in a file or in memory.

        Args:
            request: has the prompt, and is not submitted yet.
            is_cached: whether the KV cache has the block with a key.
            has_snapshot: whether it has the state at the end of that block.
        """
        if request.skip_reading_prefix_cache:
            return
        root = request.cache_root
        keys = block_keys(request.token_ids, block_size=self._block_size, root=root)
        if self._thread is not None:
            self._work.put(self._with_states(keys))
        for files in self._readable:
            files.refresh()
        state: NDArray[np.uint8] | None = None
        if self.memory.state_bytes:
            # The request computes at least one token, and has no state in the middle of a block.
            keys = keys[: (len(request.token_ids) - 1) // self._block_size]
            keys = self._up_to_a_state(keys, is_cached=is_cached, has_snapshot=has_snapshot)
            if keys and not has_snapshot(keys[-1]):
                state = np.empty(self.memory.state_bytes, np.uint8)
                if not self._read([_state_key(keys[-1])], state[np.newaxis]):
                    return
        stored = partial(
            StoredBlocks,
            token_ids=request.token_ids,
            parents=[root, *keys],
            keys=keys,
            owner=request.group.share.name,
        )
        missing = [index for index, key in enumerate(keys) if not is_cached(key)]
        self._metrics.disk_cache_queried(tokens=len(missing) * self._block_size)
        for start in range(0, len(missing), self.part_blocks):
            wanted = missing[start : start + self.part_blocks]
            rows = self._rows(len(wanted), self.memory.block_bytes)
            num_read = self._read([keys[index] for index in wanted], rows)
            if num_read:
                num_bytes = num_read * self.memory.block_bytes
                self._metrics.disk_cache_hit(tokens=num_read * self._block_size, read_bytes=num_bytes)
                yield stored(indices=wanted[:num_read], rows=rows[:num_read])
            else:
                self.recycle(rows)
            if num_read < len(wanted):
                return
        if state is not None:
            self._metrics.disk_cache_hit(tokens=0, read_bytes=len(state))
            nothing = np.empty((0, self.memory.block_bytes), np.uint8)
            yield stored(indices=(), rows=nothing, state=state, state_index=len(keys) - 1)

    def recycle(self, rows: NDArray[np.uint8]) -> None:
        """Use the memory of the rows of a part again, which nobody reads any more."""
        if rows.base is not None and len(rows.base) >= self._part_bytes:
            self._spare.append(rows.base)

    def num_stored_tokens(self, token_ids: Sequence[int]) -> int:
        """Return after how many tokens of a prompt a request can go on with what is in files."""
        for files in self._readable:
            files.refresh()
        keys = block_keys(token_ids, block_size=self._block_size)
        if self.memory.state_bytes:
            found = self._up_to_a_state(keys, is_cached=lambda _: False, has_snapshot=lambda _: False)
        else:
            found = list(takewhile(self._has_file, keys))
        return len(found) * self._block_size

    def close(self) -> None:
        """Write what was copied, and end the thread."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_CLOSE_S)

    def _rows(self, num_rows: int, row_bytes: int) -> NDArray[np.uint8]:
        """Return memory for blocks or states: that of a part which nobody reads any more, or just enough.

        Copies that wait for a slow disk would otherwise take much more than `_MAX_UNWRITTEN_BYTES`.
        """
        num_bytes = num_rows * row_bytes
        try:
            memory = self._spare.pop() if num_bytes <= self._part_bytes else whole_pages(num_bytes)
        except IndexError:
            memory = whole_pages(num_bytes)
        return memory[:num_bytes].reshape(num_rows, row_bytes)

    def _up_to_a_state(
        self,
        keys: Sequence[bytes],
        *,
        is_cached: Callable[[bytes], bool],
        has_snapshot: Callable[[bytes], bool],
    ) -> list[bytes]:
        """Return the keys of the longest beginning of a prompt that is known with the state at its end."""
        known = list(takewhile(lambda key: is_cached(key) or self._has_file(key), keys))
        while known and not (has_snapshot(known[-1]) or self._has_file(_state_key(known[-1]))):
            known.pop()
        return known

    def _with_states(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys of blocks and of the states at their ends, if the model has any."""
        if not self.memory.state_bytes:
            return keys
        return [own for key in keys for own in (key, _state_key(key))]

    def _has_file(self, key: bytes) -> bool:
        return any(key in files for files in self._readable)

    def _read(self, keys: Sequence[bytes], rows: NDArray[np.uint8]) -> int:
        """Read the contents of blocks, up to the first one that is in no file; return of how many."""
        num_read = 0
        while num_read < len(keys):
            found = (files.read(keys[num_read:], rows[num_read:]) for files in self._readable)
            num_more = next(filter(None, found), 0)
            if not num_more:
                break
            num_read += num_more
        return num_read

    def _run(self, files: BlockFiles, folder: Path, max_bytes: int) -> None:
        """Write blocks until the cache is closed, or the disk takes no more."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            num_bytes = trim(folder, max_bytes=max_bytes)
            files.refresh()
            logger.info(
                "model %s has a prefix cache on disk: %s, with %.1f MiB of at most %.1f MiB",
                self._name,
                folder,
                num_bytes / 2**20,
                max_bytes / 2**20,
            )
            self._write_all(files, folder, max_bytes)
        except Exception as error:  # otherwise copies would wait for ever
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            logger.warning(
                "the prefix cache of model %s is not written to %s any more, until it is loaded again: %s",
                self._name,
                folder,
                reason,
            )
            with self._lock:
                self.writes = False
            while self._work.get() is not None:  # what is copied already is dropped
                pass

    def _write_all(self, files: BlockFiles, folder: Path, max_bytes: int) -> None:
        left_bytes = 0  # that may be written before the folder is looked through again
        spare_bytes = max_bytes // _SPARE
        share_bytes = spare_bytes // _MAX_WRITERS
        while (work := self._work.get()) is not None:
            if not isinstance(work, _Copies):
                files.touch(work)
                continue
            num_rows, row_bytes = work.rows.shape
            per_file = max_blocks(min(_PART_BYTES, share_bytes), row_bytes)
            for start in range(0, num_rows, per_file):
                keys, rows = work.keys[start : start + per_file], work.rows[start : start + per_file]
                size = file_bytes(len(rows), row_bytes)
                if spare_bytes < size:
                    raise OSError(
                        ENOSPC, f"{max_bytes} bytes are too few for its blocks, at least {_SPARE * size}"
                    )
                if left_bytes < size:
                    trim(folder, max_bytes=max_bytes - spare_bytes)
                    files.refresh()
                    left_bytes = max(share_bytes, size)
                num_bytes = files.write(keys, rows)
                left_bytes -= num_bytes
                self._metrics.disk_cache_written(num_bytes)
            self.recycle(work.rows)
            with self._lock:
                self._unwritten_bytes -= work.rows.nbytes


def _state_key(key: bytes) -> bytes:
    """Return the key of the state at the end of a block, by which files name it."""
    return blake2b(key, digest_size=32, person=b"state").digest()
