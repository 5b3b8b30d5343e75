"""Pages of libraries that only the start has read are given back; nothing that the process has changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from genserve.server.startup_pages import unmodified_mappings

SMAPS = """
7f0000000000-7f0000002000 r-xp 00001000 fd:01 77    /lib/code.so
Size:                  8 kB
Rss:                   8 kB
Anonymous:             0 kB
AnonHugePages:         0 kB
7f0000002000-7f0000003000 r--p 00003000 fd:01 77    /lib/relocated.so
Rss:                   4 kB
Anonymous:             4 kB
7f0000003000-7f0000004000 rw-p 00004000 fd:01 77    /lib/data.so
Rss:                   4 kB
Anonymous:             0 kB
7f0000004000-7f0000005000 r--p 00004000 fd:01 78    /lib/a folder/constants.so
Rss:                   4 kB
Anonymous:             0 kB
7f0000005000-7f0000006000 r--s 00000000 fd:01 79    /shared
Anonymous:             0 kB
7f0000006000-7f0000007000 r-xp 00000000 00:00 0     [vdso]
Anonymous:             0 kB
7f0000007000-7f0000008000 r--p 00000000 00:00 0
Anonymous:             0 kB
"""

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
    assert [hex(start) for start, _ in unmodified_mappings(SMAPS.splitlines())] == [
        "0x7f0000000000",
        "0x7f0000004000",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_library_works_after_its_pages_were_given_back() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
