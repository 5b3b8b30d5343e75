"""KV cache: the keys and values of all sequences, in blocks of tokens, on any device."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["KVCache", "TokenShapes", "lazy_zeros", "token_bytes"]

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
