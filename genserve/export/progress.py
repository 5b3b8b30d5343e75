"""Progress: what an export tells the person who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

__all__ = ["Progress", "SilentProgress"]


class Progress(Protocol):
    """Where the stages of an export are shown."""

    def stage(
        self, name: str, *, total: int | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Open a stage of `total` units of work (None: unknown); the value advances it by some units."""


class SilentProgress:
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Open a stage that nobody sees."""
        del name, total
        yield lambda _units: None
