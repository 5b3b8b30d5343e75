from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

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


def test_the_size_of_a_cache_is_that_of_its_tokens():
    cache = cache_of()
    assert token_bytes(SHAPES) == 2 * 3 * 64 + 3 * 4
    assert cache.nbytes == 8 * 16 * token_bytes(SHAPES)


def test_copying_blocks_copies_whole_blocks_in_order():
    cache = cache_of()
    for buffer in cache.buffers.values():
        buffer[:] = np.arange(8).reshape(8, *[1] * (buffer.ndim - 1))
    cache.copy_blocks([(3, 1), (5, 7), (1, 2)])
    for buffer in cache.buffers.values():
        assert [np.unique(block).tolist() for block in buffer] == [[0], [3], [3], [3], [4], [5], [6], [5]]


@pytest.mark.parametrize("on", ["numpy", "torch"])
def test_blocks_are_written_as_they_were_read(on):
    cache = cache_of()
    for index, buffer in enumerate(cache.buffers.values()):
        buffer[:] = np.random.default_rng(index).integers(-100, 100, buffer.shape)
    before = {name: buffer.copy() for name, buffer in cache.buffers.items()}
    if on == "torch":
        cache = KVCache({name: torch.from_numpy(buffer) for name, buffer in cache.buffers.items()})
    rows, again = (np.zeros((count, cache.block_bytes), np.uint8) for count in (2, 1))
    cache.read_blocks([5, 2], rows)
    assert cache.block_bytes * 8 == cache.nbytes
    cache.write_blocks([7, 0], rows)
    for name, buffer in cache.buffers.items():
        expected = before[name]
        expected[[7, 0]] = expected[[5, 2]]
        np.testing.assert_array_equal(np.asarray(buffer), expected)
    cache.write_blocks([], rows[:0])
    cache.write_blocks([3], rows[[1]])
    cache.read_blocks([3], again)
    np.testing.assert_array_equal(again, rows[[1]])


def test_many_blocks_are_read_and_written_in_their_order():
    cache = cache_of(num_blocks=400)
    rng = np.random.default_rng(0)
    for buffer in cache.buffers.values():
        buffer[:] = rng.integers(-100, 100, buffer.shape)
    expected = np.hstack([buffer.reshape(400, -1).view(np.uint8) for buffer in cache.buffers.values()])
    source, target = np.split(rng.permutation(400), 2)
    rows = np.zeros((200, cache.block_bytes), np.uint8)
    assert rows.nbytes > 1 << 20  # threads share the copy
    cache.read_blocks(source.tolist(), rows)
    np.testing.assert_array_equal(rows, expected[source])
    cache.write_blocks(target.tolist(), rows)
    expected[target] = expected[source]
    cache.read_blocks(range(200, 400), rows)
    np.testing.assert_array_equal(rows, expected[200:])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_allocated_as_it_is_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    zeros = lazy_zeros((1 << 10, 16, 64, 64), np.dtype(np.float32))     # 256 MiB
    assert resident() - before < zeros.nbytes / 10
    zeros[100:612] = 1
    assert 0.4 < (resident() - before) / zeros.nbytes < 0.6
