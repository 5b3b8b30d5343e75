from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from genserve.textmodel.runtimes.kv_cache_memory import KVCache, lazy_zeros, token_bytes

SHAPES = {
    "past_key_values.0.key": ((3, 64), np.dtype(np.int8)),
    "past_key_values.0.value": ((3, 64), np.dtype(np.int8)),
    "past_key_values.0.key_scale": ((3,), np.dtype(np.float32)),
}


def cache_of(*, num_blocks: int = 8, block_size: int = 16) -> KVCache:
    return KVCache(
        {
            name: lazy_zeros((num_blocks, block_size, *shape), dtype)
            for name, (shape, dtype) in SHAPES.items()
        }
    )


def test_it_takes_what_its_tokens_take():
    cache = cache_of()
    assert token_bytes(SHAPES) == 2 * 3 * 64 + 3 * 4
    assert cache.nbytes == 8 * 16 * token_bytes(SHAPES)


def test_whole_blocks_are_copied_one_after_the_other_and_nothing_else():
    cache = cache_of()
    for buffer in cache.buffers.values():
        buffer[:] = np.arange(8).reshape(8, *[1] * (buffer.ndim - 1))
    cache.copy_blocks([(3, 1), (5, 7), (1, 2)])
    for buffer in cache.buffers.values():
        assert [np.unique(block).tolist() for block in buffer] == [[0], [3], [3], [3], [4], [5], [6], [5]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_as_it_is_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    zeros = lazy_zeros((1 << 10, 16, 64, 64), np.dtype(np.float32))     # 256 MiB
    assert resident() - before < zeros.nbytes / 10
    zeros[100:612] = 1
    assert 0.4 < (resident() - before) / zeros.nbytes < 0.6
