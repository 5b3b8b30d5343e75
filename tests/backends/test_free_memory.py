from __future__ import annotations

from pathlib import Path

import pytest

from genserve.textmodel.runtimes.kv_cache_memory import free_memory_bytes, total_memory_bytes


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:       8000 kB\nMemFree:   10 kB\nMemAvailable:   4000 kB\n")
    return tmp_path / "meminfo"


def cgroup(folder: Path, *, limit: str, used: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile 999999\ninactive_file {cached - 7}\nactive_file 7\n")
    return folder


def test_what_the_machine_has_available_is_free(meminfo: Path, tmp_path: Path) -> None:
    assert free_memory_bytes(meminfo=meminfo, cgroup=tmp_path / "none") == 4000 * 1024
    unlimited = cgroup(tmp_path, limit="max", used=1, cached=7)
    assert free_memory_bytes(meminfo=meminfo, cgroup=unlimited) == 4000 * 1024


def test_a_container_has_what_its_limit_leaves_without_its_files(meminfo: Path, tmp_path: Path) -> None:
    folder = cgroup(tmp_path, limit="1000000", used=700_000, cached=100_000)
    assert free_memory_bytes(meminfo=meminfo, cgroup=folder) == 400_000


def test_nothing_is_said_where_nothing_is_known(tmp_path: Path) -> None:
    assert free_memory_bytes(meminfo=tmp_path / "none", cgroup=tmp_path) is None


def test_a_container_has_no_more_than_its_limit_in_total(meminfo: Path, tmp_path: Path) -> None:
    assert total_memory_bytes(meminfo=meminfo, cgroup=tmp_path / "none") == 8000 * 1024
    unlimited = cgroup(tmp_path, limit="max", used=1, cached=7)
    assert total_memory_bytes(meminfo=meminfo, cgroup=unlimited) == 8000 * 1024
    limited = cgroup(tmp_path, limit="1000000", used=1, cached=7)
    assert total_memory_bytes(meminfo=meminfo, cgroup=limited) == 1_000_000
    assert total_memory_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none") is None
