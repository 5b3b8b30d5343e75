"""The limits of a machine and of its control groups, read from trees of files as the kernel writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from genserve.machine import free_memory_bytes, num_cores, total_memory_bytes

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 10 kB\nMemAvailable: {8 * GIB // 1024} kB\n"
# Whether the group has its limit in a container, as a service, in a pod ... : /proc/self/cgroup, a line of
# /proc/self/mountinfo, and the folders of the group that has the limit and of one whose limits do not hold.
V2_MOUNT = "31 23 0:27 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V2_LAYOUTS = {
    "a container": ("0::/", V2_MOUNT.format(root="/"), "", "system.slice"),
    "a service": (
        "0::/system.slice/genserve.service", V2_MOUNT.format(root="/"),
        "system.slice/genserve.service", "system.slice/other.service",
    ),
    "a slice": (
        "0::/machine.slice/m.scope/app", V2_MOUNT.format(root="/"), "machine.slice", "user.slice",
    ),
    "a container that sees the machine's paths": (
        "0::/docker/abc", V2_MOUNT.format(root="/docker/abc"), "", "docker/abc",
    ),
}  # fmt: skip
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/{names} rw,relatime - cgroup cgroup rw,{names}"
V1_LAYOUTS = {
    "a container": ("/", V1_MOUNT.format(root="/", names="{names}"), "", "other"),
    "a container that sees the machine's paths": (
        "/docker/abc", V1_MOUNT.format(root="/docker/abc", names="{names}"), "", "docker/abc",
    ),
    "a parent": (
        "/kubepods/pod1/c2", V1_MOUNT.format(root="/", names="{names}"), "kubepods/pod1", "kubepods/pod9",
    ),
}  # fmt: skip


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": ""})
    return tmp_path


def mounted_v2(root: Path, layout: str) -> tuple[str, str]:
    own, mount, limited, other = V2_LAYOUTS[layout]
    write(root, {"proc/self/cgroup": f"{own}\n", "proc/self/mountinfo": f"{mount}\n"})
    return str(Path("sys/fs/cgroup") / limited), str(Path("sys/fs/cgroup") / other)


def mounted_v1(root: Path, layout: str, names: str) -> tuple[str, str]:
    own, mount, limited, other = V1_LAYOUTS[layout]
    lines = ["9:name=systemd:/x", f"4:{names}:{own}", "0::/"]
    mounts = [
        "30 23 0:29 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755", mount.format(names=names),
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    ]  # fmt: skip
    write(root, {"proc/self/cgroup": "\n".join(lines), "proc/self/mountinfo": "\n".join(mounts)})
    folder = Path("sys/fs/cgroup") / names
    return str(folder / limited), str(folder / other)


def memory_v2(folder: str, *, limit: str, name: str = "memory.max") -> dict[str, str]:
    return {
        f"{folder}/memory.max": "max\n", f"{folder}/memory.high": "max\n", f"{folder}/{name}": f"{limit}\n",
        f"{folder}/memory.current": f"{GIB}\n",
        f"{folder}/memory.stat": f"anon 5\nfile 999999\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\n",
    }  # fmt: skip


def memory_v1(folder: str, *, limit: int) -> dict[str, str]:
    stat = f"active_file 1\ninactive_file 1\ntotal_active_file {GIB // 4}\ntotal_inactive_file {GIB // 4}\n"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n", f"{folder}/memory.usage_in_bytes": f"{GIB}\n",
        f"{folder}/memory.stat": stat,
    }  # fmt: skip


def test_without_control_groups_the_memory_is_the_machines(root: Path) -> None:
    assert (free_memory_bytes(root=root), total_memory_bytes(root=root)) == (8 * GIB, 16 * GIB)


def test_without_limits_the_memory_is_the_machines(root: Path) -> None:
    folder, _ = mounted_v2(root, "a service")
    write(root, memory_v2(folder, limit="max"))
    assert (free_memory_bytes(root=root), total_memory_bytes(root=root)) == (8 * GIB, 16 * GIB)


def test_without_any_file_the_memory_is_unknown(tmp_path: Path) -> None:
    assert (free_memory_bytes(root=tmp_path), total_memory_bytes(root=tmp_path)) == (None, None)


@pytest.mark.parametrize("layout", V2_LAYOUTS)
@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_a_limit_of_version_2_holds_and_its_cached_files_are_free(root: Path, layout: str, name: str) -> None:
    limited, other = mounted_v2(root, layout)
    write(root, memory_v2(other, limit=str(2 * GIB)) | memory_v2(limited, limit=str(3 * GIB), name=name))
    assert total_memory_bytes(root=root) == 3 * GIB
    assert free_memory_bytes(root=root) == 2.5 * GIB


@pytest.mark.parametrize("layout", V1_LAYOUTS)
def test_a_limit_of_version_1_holds_and_its_cached_files_are_free(root: Path, layout: str) -> None:
    limited, other = mounted_v1(root, layout, "memory")
    write(root, memory_v1(other, limit=2 * GIB) | memory_v1(limited, limit=3 * GIB))
    assert total_memory_bytes(root=root) == 3 * GIB
    assert free_memory_bytes(root=root) == 2.5 * GIB


def test_the_smallest_limit_of_a_group_and_its_parents_holds(root: Path) -> None:
    mounted_v2(root, "a service")
    write(root, memory_v2("sys/fs/cgroup/system.slice/genserve.service", limit=str(5 * GIB)))
    write(root, memory_v2("sys/fs/cgroup/system.slice", limit=str(4 * GIB)))
    assert total_memory_bytes(root=root) == 4 * GIB


def test_a_group_of_version_1_without_a_limit_has_the_machines_memory(root: Path) -> None:
    limited, _ = mounted_v1(root, "a container", "memory")
    write(root, memory_v1(limited, limit=9223372036854771712))
    assert (free_memory_bytes(root=root), total_memory_bytes(root=root)) == (8 * GIB, 16 * GIB)


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)


QUOTAS = {"max": 6, "50000": 1, "100000": 1, "250000": 2, "400000": 4, "900000": 6}


@pytest.mark.usefixtures("six_cores")
@pytest.mark.parametrize("layout", V2_LAYOUTS)
@pytest.mark.parametrize(("quota", "cores"), QUOTAS.items())
def test_a_quota_of_version_2_counts_as_whole_cores(root: Path, layout: str, quota: str, cores: int) -> None:
    limited, other = mounted_v2(root, layout)
    write(root, {f"{other}/cpu.max": "100000 100000\n", f"{limited}/cpu.max": f"{quota} 100000\n"})
    assert num_cores(root=root) == cores


@pytest.mark.usefixtures("six_cores")
@pytest.mark.parametrize("layout", V1_LAYOUTS)
@pytest.mark.parametrize(("quota", "cores"), QUOTAS.items())
def test_a_quota_of_version_1_counts_as_whole_cores(root: Path, layout: str, quota: str, cores: int) -> None:
    limited, other = mounted_v1(root, layout, "cpu,cpuacct")
    quotas = {limited: quota.replace("max", "-1"), other: "100000"}
    for folder, quota_us in quotas.items():
        write(root, {f"{folder}/cpu.cfs_quota_us": quota_us, f"{folder}/cpu.cfs_period_us": "100000\n"})
    assert num_cores(root=root) == cores


def test_without_cpu_affinity_all_cores_are_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert num_cores(root=root) == 12
