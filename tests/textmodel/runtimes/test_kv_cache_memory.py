from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from genserve.textmodel.runtimes.kv_cache_memory import (
    KVCache,
    free_memory_bytes,
    lazy_zeros,
    token_bytes,
    total_memory_bytes,
)

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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_allocated_as_it_is_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    zeros = lazy_zeros((1 << 10, 16, 64, 64), np.dtype(np.float32))     # 256 MiB
    assert resident() - before < zeros.nbytes / 10
    zeros[100:612] = 1
    assert 0.4 < (resident() - before) / zeros.nbytes < 0.6


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:       8000 kB\nMemFree:   10 kB\nMemAvailable:   4000 kB\n")
    return tmp_path / "meminfo"


def cgroup(folder: Path, *, limit: str, used: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile 999999\ninactive_file {cached - 7}\nactive_file 7\n")
    return folder


def test_available_memory_of_the_machine_is_free(meminfo: Path, tmp_path: Path) -> None:
    assert free_memory_bytes(meminfo=meminfo, cgroup=tmp_path / "none") == 4000 * 1024
    unlimited = cgroup(tmp_path, limit="max", used=1, cached=7)
    assert free_memory_bytes(meminfo=meminfo, cgroup=unlimited) == 4000 * 1024


def test_free_memory_of_a_container_ignores_its_cached_files(meminfo: Path, tmp_path: Path) -> None:
    folder = cgroup(tmp_path, limit="1000000", used=700_000, cached=100_000)
    assert free_memory_bytes(meminfo=meminfo, cgroup=folder) == 400_000


def test_unknown_memory_is_none(tmp_path: Path) -> None:
    assert free_memory_bytes(meminfo=tmp_path / "none", cgroup=tmp_path) is None


def test_the_total_memory_of_a_container_is_its_limit(meminfo: Path, tmp_path: Path) -> None:
    assert total_memory_bytes(meminfo=meminfo, cgroup=tmp_path / "none") == 8000 * 1024
    unlimited = cgroup(tmp_path, limit="max", used=1, cached=7)
    assert total_memory_bytes(meminfo=meminfo, cgroup=unlimited) == 8000 * 1024
    limited = cgroup(tmp_path, limit="1000000", used=1, cached=7)
    assert total_memory_bytes(meminfo=meminfo, cgroup=limited) == 1_000_000
    assert total_memory_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none") is None
