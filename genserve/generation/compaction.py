"""Compaction: the moves that bring those that run to the front of the slots; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Move", "compaction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slot `target` takes over what slot `source` holds."""

    source: int
    target: int


def compaction(front: Sequence[bool]) -> list[Move]:
    """Return the moves, in order, that leave no gap among those in front.

    Args:
        front: by slot, whether it holds one that belongs there.
    """
    num_front = sum(front)
    holes = [slot for slot in range(num_front) if not front[slot]]
    behind = [slot for slot in range(num_front, len(front)) if front[slot]]
    return [Move(source=source, target=target) for source, target in zip(behind, holes, strict=True)]
