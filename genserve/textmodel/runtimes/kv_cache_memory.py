"""KV cache memory: the buffers of a KV cache, how much memory is free for them, and the host's memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.backends.onnx_session import CPU_PROVIDER, Provider

__all__ = [
    "HostMemory",
    "KVCache",
    "LogitsMemory",
    "TokenShapes",
    "free_memory_bytes",
    "lazy_zeros",
    "token_bytes",
    "total_memory_bytes",
]


_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_memory_bytes(*, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the smaller of what the machine and what the container has free; None: neither says.

    Args:
        meminfo: Linux's file of that name.
        cgroup: folder of a control group, version 2. Files that it has cached count as free, as the
            machine's do.
    """
    known = [free for free in (_of_machine(meminfo), _of_container(cgroup)) if free is not None]
    return min(known, default=None)


def total_memory_bytes(*, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the smaller of what the machine and what the container has; None: neither says.

    Args:
        meminfo: see `free_memory_bytes`.
        cgroup: likewise.
    """
    kilobytes = _fields(meminfo).get("MemTotal:")
    known = [] if kilobytes is None else [kilobytes * 1024]
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:
        limit = ""
    return min([*known, int(limit)] if limit.isdecimal() else known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    kilobytes = _fields(meminfo).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_container(cgroup: Path) -> int | None:
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
    except OSError:
        return None
    if not limit.strip().isdecimal():  # "max": no limit
        return None
    fields = _fields(cgroup / "memory.stat")
    cached = fields.get("active_file", 0) + fields.get("inactive_file", 0)   # not `file`: that has tmpfs
    return max(0, int(limit) - int(used) + cached)


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


# What a cache keeps of one token: shape and type, by the name of the graph's input. Keys and values have
# [kv_heads, head_dim], the scales of a cache in int8 [kv_heads].
TokenShapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class KVCache:
    """A buffer [num_blocks, block_size, ...] for each of the graph's inputs that hold keys and values.

    One thread uses it.

    Attributes:
        buffers: by the name of the input: numpy arrays or torch tensors.
    """

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        """Take over the buffers."""
        self.buffers = buffers

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks: of each pair (source, target) the first to the second."""
        for buffer in self.buffers.values():
            for source, target in pairs:
                buffer[target] = buffer[source]


def token_bytes(shapes: TokenShapes) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros whose memory is taken page by page as they are touched.

    numpy's own allocation asks for huge pages. Every layer's keys and values then take 2 MiB at least: 120
    MiB for the first token of 30 layers.

    Raises:
        OSError, OverflowError: there is not so much address space.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


class LogitsMemory(Protocol):
    """The memory of one device. A buffer of it is a numpy array, or an object with `__dlpack__`.

    Attributes:
        device: what ONNX Runtime calls it: "cpu" or "cuda".
        device_id: which of them.
        providers: what runs the graph, in the order of preference.
        is_host: whether what is bound from the memory of the host is read where it lies; else ONNX
            Runtime copies it to the device when it is bound.
        is_lazy: whether a buffer takes memory only as it is written.
        block_size: tokens of a block of the KV cache.
    """

    device: str
    device_id: int
    providers: Sequence[Provider]
    is_host: bool
    is_lazy: bool
    block_size: int

    def free_bytes(self) -> int | None:
        """Return how much of it nobody uses; None where that is not known."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a buffer of zeros.

        Raises:
            OSError, OverflowError: there is no room for it.
        """

    def logits(self, num_rows: int, num_tokens: int) -> Any:
        """Return a buffer [num_rows, num_tokens] float32, of any content."""

    def address(self, buffer: Any) -> int:
        """Return where the first element of a buffer lies."""

    def settle(self) -> None:
        """Wait for what was done to buffers other than by running the graph."""


class HostMemory:
    """The memory of the CPU; implements `LogitsMemory`."""

    device = "cpu"
    device_id = 0
    providers: Sequence[Provider] = (CPU_PROVIDER,)
    is_host = True
    is_lazy = True
    block_size = 16

    def free_bytes(self) -> int | None:
        """See `LogitsMemory.free_bytes`."""
        return free_memory_bytes()

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See `LogitsMemory.zeros`."""
        return lazy_zeros(shape, dtype)

    def logits(self, num_rows: int, num_tokens: int) -> Any:
        """See `LogitsMemory.logits`."""
        return np.empty((num_rows, num_tokens), dtype=np.float32)

    def address(self, buffer: Any) -> int:
        """See `LogitsMemory.address`."""
        address: int = buffer.ctypes.data
        return address

    def settle(self) -> None:
        """See `LogitsMemory.settle`: nothing is ever under way."""
