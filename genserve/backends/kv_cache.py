"""KV cache: the keys and values of all slots, on any device; on the CPU in memory taken as tokens come."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["KvCache", "Layers", "PagedKvCache", "token_bytes"]

# kv_heads, head_dim and type of an element, by the name of the graph's input.
Layers: TypeAlias = Mapping[str, tuple[int, int, np.dtype[Any]]]


class KvCache:
    """One buffer [num_slots, kv_heads, length, head_dim] for each layer's keys, and one for its values.

    One thread uses it.

    Attributes:
        num_slots: how many token sequences have a place.
        page_tokens: a slot's memory is taken and given back for so many tokens at a time.
        token_bytes: keys and values of one token in all layers.
    """

    def __init__(
        self, layers: Layers, buffers: Mapping[str, Any], *, num_slots: int, page_tokens: int
    ) -> None:
        """Take over the buffers, one to each of the layers: numpy arrays or torch tensors."""
        self.num_slots = num_slots
        self.page_tokens = page_tokens
        self.token_bytes = token_bytes(layers)
        self._buffers = buffers

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache, if every slot is used to its end."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def slots(self, first_slot: int, *, num_slots: int) -> Iterator[tuple[str, Any]]:
        """Yield each buffer's name, and the view [num_slots, kv_heads, length, head_dim] of some slots."""
        for name, buffer in self._buffers.items():
            yield name, buffer[first_slot : first_slot + num_slots]

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` over those of slot `target`."""
        for buffer in self._buffers.values():
            buffer[target, :, :length] = buffer[source, :, :length]

    def give_back(self, slot: int, *, length: int) -> None:
        """Give the memory of a slot behind its first `length` positions back, where that can be done."""


class PagedKvCache(KvCache):
    """A cache of numpy arrays. Address space is reserved at once, and memory taken as positions are written.

    `page_tokens` tokens of a slot fill whole pages of memory. No page belongs to two slots, or to two heads:
    `length` is the number of tokens asked for, rounded up to these.
    """

    def __init__(self, layers: Layers, *, num_slots: int, max_length: int) -> None:
        """Reserve the buffers.

        Args:
            layers: what is kept of each token.
            num_slots: how many token sequences have a place.
            max_length: tokens per slot.

        Raises:
            OSError, OverflowError: there is not so much address space.
        """
        rows = (head_dim * dtype.itemsize for _, head_dim, dtype in layers.values())
        page_tokens = math.lcm(*(mmap.PAGESIZE // math.gcd(row, mmap.PAGESIZE) for row in rows))
        length = -(-max_length // page_tokens) * page_tokens
        self._memory: dict[str, mmap.mmap] = {}
        buffers: dict[str, NDArray[Any]] = {}
        for name, (kv_heads, head_dim, dtype) in layers.items():
            shape = (num_slots, kv_heads, length, head_dim)
            self._memory[name] = _reserve(math.prod(shape) * dtype.itemsize)
            buffers[name] = np.frombuffer(self._memory[name], dtype=dtype).reshape(shape)
        super().__init__(layers, buffers, num_slots=num_slots, page_tokens=page_tokens)

    def give_back(self, slot: int, *, length: int) -> None:
        """Give the memory of a slot behind its first `length` positions back to the system.

        What was there reads as 0, or as it was where the system takes nothing back. The rest of the page
        that holds the last kept position stays.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        kept = -(-length // self.page_tokens) * self.page_tokens
        for name, buffer in self._buffers.items():
            behind = buffer[slot, :, kept:]
            start = slot * buffer.strides[0] + kept * buffer.strides[2]
            for _ in range(len(behind) if behind.size else 0):
                self._memory[name].madvise(mmap.MADV_DONTNEED, start, behind[0].nbytes)
                start += buffer.strides[1]


def token_bytes(layers: Layers) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return sum(kv_heads * head_dim * dtype.itemsize for kv_heads, head_dim, dtype in layers.values())


def _reserve(num_bytes: int) -> mmap.mmap:
    """Return memory that is taken page by page as it is touched.

    numpy's own allocation asks for huge pages. Every head of every slot then takes at least 2 MiB: 1.9 GiB
    for what needs 0.1 (20 arrays of 32 slots, 4096 tokens each, 200 of them used). A shared mapping, mmap's
    default, would keep what is given back.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
