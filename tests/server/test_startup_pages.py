"""Pages of libraries that only the start has read are given back; nothing that the process has changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from genserve.server.startup_pages import unmodified_mappings

# Mappings with their pages that are in no file, in memory and swapped out.
MAPPINGS = {
    "7f0000000000-7f0000002000 r-xp 00001000 fd:01 77    /lib/code.so": (0, 0),
    "7f0000002000-7f0000003000 r--p 00003000 fd:01 77    /lib/relocated.so": (4, 0),
    "7f0000003000-7f0000004000 r-xp 00003000 fd:01 77    /lib/swapped.so": (0, 4),
    "7f0000004000-7f0000005000 rw-p 00004000 fd:01 77    /lib/data.so": (0, 0),
    "7f0000005000-7f0000006000 r--p 00004000 fd:01 78    /lib/a folder/constants.so": (0, 0),
    "7f0000006000-7f0000007000 r--s 00000000 fd:01 79    /shared": (0, 0),
    "7f0000007000-7f0000008000 r-xp 00000000 00:00 0     [vdso]": (0, 0),
    "7f0000008000-7f0000009000 r--p 00000000 00:00 0": (0, 0),
}

PROGRAM = """
import numpy as np
from genserve.server.startup_pages import unmap_startup_pages

def resident_kb():
    is_numpy, total = False, 0
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            is_numpy = "_multiarray_umath" in line and "r-xp" in line
        elif is_numpy and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total

before = resident_kb()
unmap_startup_pages()
after = resident_kb()
assert 0 <= after < before / 4, (before, after)
assert np.linalg.inv(np.eye(3) * 2).sum() == 1.5
assert resident_kb() > after
"""


def test_only_unchanged_readable_pages_of_files_are_given_back() -> None:
    smaps = [
        line
        for mapping, (anonymous, swap) in MAPPINGS.items()
        for line in (mapping, "Rss: 4 kB", f"Anonymous: {anonymous} kB", f"Swap: {swap} kB", "VmFlags: rd mr")
    ]
    given_back = [hex(start) for start, _ in unmodified_mappings(smaps)]
    assert given_back == ["0x7f0000000000", "0x7f0000005000"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_library_works_after_its_pages_were_given_back() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
