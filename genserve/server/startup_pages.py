"""Startup pages: unmaps the pages of libraries that only the start of a server has read.

To load ONNX Runtime, gRPC and the others runs code over 40 MB of their files, which serving reads little of.
The pages count as the process's memory until the system is short of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_SMAPS = Path("/proc/self/smaps")
_MADV_DONTNEED = 4
# 7f10c0000000-7f10c0021000 r-xp 00001000 fd:01 1234    /usr/lib/libm.so.6
_MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) r-.p \S+ \S+ [1-9]\d* ")
_NEXT_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


def unmap_startup_pages() -> None:
    """Unmap what can be read again from its file; the next use of a page maps it again, within 1 us.

    Weights, which are mapped too, have not been read when the models are loaded. Does nothing on
    systems other than Linux.
    """
    if sys.platform != "linux":
        return
    try:
        ranges = list(unmodified_mappings(_SMAPS.read_text(errors="replace").splitlines()))
    except OSError as error:    # a container may hide it
        logger.debug("the pages of the start stay mapped: %s", error)
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in ranges:
        if advise(start, end - start, _MADV_DONTNEED):
            logger.debug("madvise of %x-%x failed: %s", start, end, os.strerror(ctypes.get_errno()))


def unmodified_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of the mappings of files that the process can only read, and has never changed.

    The loader writes into some pages before it makes them read-only, and a debugger into code: `Anonymous`
    and `Swap` count such pages, whose contents are in no file.

    Args:
        smaps: lines of /proc/PID/smaps.
    """
    mapping: re.Match[str] | None = None
    for line in smaps:
        if _NEXT_MAPPING.match(line):
            mapping = _MAPPING.match(line)
        elif mapping and line.startswith(("Anonymous:", "Swap:")) and int(line.split()[1]):
            mapping = None
        elif mapping and line.startswith("VmFlags:"):   # the last line of a mapping
            yield int(mapping["start"], 16), int(mapping["end"], 16)
