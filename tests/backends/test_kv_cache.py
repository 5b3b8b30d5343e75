from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from genserve.backends.kv_cache import PagedKvCache

FLOAT32, FLOAT16, INT8 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int8)


def cache_of(*, head_dim: int = 64, dtype: np.dtype = FLOAT32, max_length: int = 512) -> PagedKvCache:
    layers = dict.fromkeys(("past_key_values.0.key", "past_key_values.0.value"), (3, head_dim, dtype))
    return PagedKvCache(layers, num_slots=4, max_length=max_length)


def fill(cache: PagedKvCache, slot: int, value: int) -> None:
    for _, view in cache.slots(slot, num_slots=1):
        view[:] = value


def values(cache: PagedKvCache, slot: int) -> np.ndarray:
    """[buffers, kv_heads, length, head_dim]"""
    return np.concatenate([view.copy() for _, view in cache.slots(slot, num_slots=1)])


@pytest.mark.parametrize(
    ("head_dim", "dtype", "tokens"),
    [(64, FLOAT32, 16), (64, INT8, 64), (80, FLOAT32, 64), (128, FLOAT16, 16)],
)
def test_whole_pages_hold_a_number_of_tokens_and_slots_consist_of_them(head_dim, dtype, tokens):
    cache = cache_of(head_dim=head_dim, dtype=dtype, max_length=100)
    assert cache.page_tokens == tokens
    assert cache.token_bytes == 2 * 3 * head_dim * dtype.itemsize
    assert values(cache, 0).shape[2] == -(-100 // tokens) * tokens


def test_a_move_copies_the_used_positions_and_nothing_else():
    cache = cache_of()
    fill(cache, 1, 1)
    fill(cache, 3, 3)
    cache.move(source=3, target=1, length=5)
    assert (values(cache, 1)[:, :, :5] == 3).all()
    assert (values(cache, 1)[:, :, 5:] == 1).all()
    assert (values(cache, 2) == 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux promises zeros")
@pytest.mark.parametrize("length", [0, 1, 16, 17, 512])
def test_what_is_given_back_is_gone_and_everything_else_is_kept(length):
    cache = cache_of()
    for slot in range(4):
        fill(cache, slot, slot + 1)
    cache.give_back(2, length=length)
    kept = -(-length // cache.page_tokens) * cache.page_tokens
    assert (values(cache, 2)[:, :, :kept] == 3).all()
    assert (values(cache, 2)[:, :, kept:] == 0).all()
    assert all((values(cache, slot) == slot + 1).all() for slot in (0, 1, 3))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_as_it_is_written_and_given_back():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    cache = cache_of(max_length=1 << 16)  # 96 MiB a slot
    slot_bytes = cache.nbytes // 4
    assert resident() - before < slot_bytes / 10
    fill(cache, 1, 1)
    assert resident() - before > 0.9 * slot_bytes
    cache.give_back(1, length=100)
    assert resident() - before < slot_bytes / 10
