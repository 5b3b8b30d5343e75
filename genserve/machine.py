"""Machine: the cores and the memory that the machine and control groups let this process use.

Control groups limit containers (`docker run --memory --cpus`, `limits` of Kubernetes) and services of
systemd. The limits of a group's parents apply too. /proc tells the group of a process, and where groups are:
https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_size(text: str) -> int | None:
    """Return the bytes of a text such as `2GiB`, `1.5 GB` or `1048576`; None: the text is not an amount."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    return None if match is None or unit is None else int(float(match[1]) * unit)


def num_cores(*, root: Path = _ROOT) -> int:
    """Return the number of cores that this process may use; if unknown, the number of the machine's cores.

    A quota of 2.5 cores counts as 2: with a third thread the group would use up its quota early in a period,
    and all threads of a step would wait for the next period.

    Args:
        root: the folder with the system's `proc` and `sys`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _control_groups("cpu", root) if (quota := _cpu_quota(group)) is not None]
    return max(1, min([cores, *map(int, quotas)]))


def default_threads() -> int:
    """Return OMP_NUM_THREADS, by which Ray and batch systems divide a machine, or the number of cores."""
    configured = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list is for nested loops
    return int(configured) if configured.isdecimal() and int(configured) else num_cores()


def free_memory_bytes(*, root: Path = _ROOT) -> int | None:
    """Return the free memory of the machine or of a control group, whichever is less; None: unknown.

    Cached files count as free, both the machine's and a group's.

    Args:
        root: see `num_cores`.
    """
    known = [] if (available := _meminfo(root).get("MemAvailable:")) is None else [available * 1024]
    for group in _control_groups("memory", root):
        limit = _memory_limit(group)
        used = _first_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            known.append(max(0, limit - used + _cached_files(group)))
    return min(known, default=None)


def total_memory_bytes(*, root: Path = _ROOT) -> int | None:
    """Return the memory of the machine or the limit of a control group, whichever is less; None: unknown.

    Args:
        root: see `num_cores`.
    """
    known = [] if (total := _meminfo(root).get("MemTotal:")) is None else [total * 1024]
    limits = [_memory_limit(group) for group in _control_groups("memory", root)]
    return min([*known, *(limit for limit in limits if limit is not None)], default=None)


def own_memory_bytes() -> int:
    """Return the memory of this process without mapped files; 0: unknown."""
    return _fields(_ROOT / "proc/self/status").get("RssAnon:", 0) * 1024


@cache  # each load asks, and the table of mounts may be long; limits may change, groups stay
def _control_groups(controller: str, root: Path) -> tuple[Path, ...]:
    """Return the folders of this process's group and of its parents, as far as they are mounted here."""
    folders: list[Path] = []
    own: dict[str, PurePosixPath] = {}  # paths by controller; version 2 names no controller
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            group = own.get("")
        elif kind == "cgroup" and controller in options.split(","):
            group = own.get(controller)
        else:
            continue
        mounted, mount_point = mount.split()[3:5]
        if group is not None:
            # A container may see only its own group, although the path is the machine's.
            below = group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()
            folder = root / mount_point.lstrip("/")
            folders += (folder / parent for parent in (below, *below.parents))
    return tuple(folders)


def _memory_limit(group: Path) -> int | None:
    """Return the limit in bytes; without a limit it is "max", or in version 1 a number of 63 bits."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    return min((limit for name in names if (limit := _first_number(group, name)) is not None), default=None)


def _cached_files(group: Path) -> int:
    """Return the bytes of cached files, which the system drops when it needs memory."""
    fields = _fields(group / "memory.stat")
    # The field `file` would count tmpfs. In version 1 the fields that include children begin with total_.
    names = ("active_file", "inactive_file")
    return sum(fields.get(f"total_{name}", fields.get(name, 0)) for name in names)


def _cpu_quota(group: Path) -> float | None:
    """Return the cores that the group may use on average over a period."""
    numbers = " ".join(_lines(group / "cpu.max")).split() or [
        *_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us"),
    ]  # fmt: skip
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):  # "max", or in version 1 -1
        return None
    quota_us, period_us = map(int, numbers)
    return quota_us / period_us


def _first_number(folder: Path, *names: str) -> int | None:
    lines = [line for name in names for line in _lines(folder / name)]
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _meminfo(root: Path) -> dict[str, int]:
    return _fields(root / "proc/meminfo")


def _fields(path: Path) -> dict[str, int]:
    lines = [line.split() for line in _lines(path)]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
