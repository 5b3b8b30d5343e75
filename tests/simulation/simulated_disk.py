"""Disk of a simulation: real files, which are torn, on a disk that gets full."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from errno import ENOSPC
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from genserve.engine.block_files import BlockFiles


class SimulatedDisk:
    """What happens to the files of all models."""

    def __init__(
        self,
        rng: Random,
        *,
        tear_rate: float,
        room: int | None,
        sleep: Callable[[float], None],
        fault: Callable[[str], None],
    ) -> None:
        """Describe the disk.

        Args:
            rng: draws what happens.
            tear_rate: how often a crash of the system would leave a file torn, though it was renamed.
            room: how many files can be written; None: any number.
            sleep: waits for so many seconds.
            fault: counts a fault.
        """
        self._rng = rng
        self._tear_rate = tear_rate
        self._room = room
        self._sleep = sleep
        self._fault = fault
        self._write_s = rng.choice([0.0, 0.001, 0.1])

    def before_write(self) -> None:
        """Take the time of a write; raises OSError when the disk is full."""
        self._sleep(self._write_s)
        if self._room is not None:
            if not self._room:
                self._fault("full disk")
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            self._room -= 1

    def after_write(self, path: Path) -> None:
        """Tear a file, sometimes: it has lost its end, or its end is zeros."""
        if self._rng.random() < self._tear_rate:
            self._fault("torn file")
            whole = path.read_bytes()
            left = whole[: self._rng.randrange(len(whole) // 2, len(whole))]
            path.write_bytes(left.ljust(len(whole), b"\0") if self._rng.random() < 0.7 else left)


class SimulatedFiles(BlockFiles):
    """The product's, on a simulated disk."""

    def __init__(
        self, folder: Path, *, disk: SimulatedDisk, fingerprint: str, read_only: bool = False
    ) -> None:
        super().__init__(folder, fingerprint=fingerprint, read_only=read_only)
        self._disk = disk

    def write(self, keys: Sequence[bytes], rows: NDArray[np.uint8]) -> int:
        self._disk.before_write()
        before = set(self._folder.glob("*.kv"))
        num_bytes = super().write(keys, rows)
        for path in set(self._folder.glob("*.kv")) - before:
            self._disk.after_write(path)
        return num_bytes
