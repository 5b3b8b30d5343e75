"""Load cycles: loads and unloads a model many times, and prints the memory of the process after each as JSON.

Usage: python -m tests.repository.load_cycles REPOSITORY MODEL CYCLES
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(root: str, model: str, cycles: str) -> None:
    """Run the cycles."""
    repository = Repository([Path(root)], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start([])
    gc.freeze()     # as `genserve serve` does
    memory = []
    for _ in range(int(cycles)):
        repository.load(model)
        repository.unload(model)
        while any(entry.state == "UNLOADING" for entry in repository.index()):
            time.sleep(0.001)
        memory.append(_memory_bytes())
    repository.close()
    sys.stdout.write(json.dumps(memory))


if __name__ == "__main__":
    main(*sys.argv[1:])
