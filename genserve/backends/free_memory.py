"""Free memory: how much this process may still take, and how much at all."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory_bytes", "total_memory_bytes"]

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
