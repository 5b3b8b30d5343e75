"""Rows: a matrix that is read some rows at a time, so that a large one need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from genserve.kernels.packing import PANEL

T = TypeVar("T", bound=np.generic)

_PART = 1 << 22     # numbers of a part; quantizing them takes some ten times as many bytes


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """A matrix, whose rows are read when they are needed; each call reads them again."""

    shape: tuple[int, int]                      # rows and columns
    read: Callable[[int, int], NDArray[T]]      # returns the rows from the first up to the second number

    @staticmethod
    def of(matrix: NDArray[T]) -> Rows[T]:
        """Return the rows of a matrix in memory."""
        return Rows((matrix.shape[0], matrix.shape[1]), lambda start, stop: matrix[start:stop])

    def taken(self, order: NDArray[np.int64]) -> Rows[T]:
        """Return some of the rows, in another order: row i of the result is row `order[i]`."""

        def read(start: int, stop: int) -> NDArray[T]:
            wanted = order[start:stop]
            first, last = int(wanted.min()), int(wanted.max())
            found = self.read(first, last + 1)
            in_order = np.array_equal(wanted, np.arange(first, last + 1))
            return found if in_order else found[wanted - first]

        return Rows((len(order), self.shape[1]), read)

    def mapped(self, change: Callable[[NDArray[T]], NDArray[T]]) -> Rows[T]:
        """Return the rows after a change of each, which keeps their number and that of the columns."""
        return Rows(self.shape, lambda start, stop: change(self.read(start, stop)))

    def whole(self) -> NDArray[T]:
        """Return all rows."""
        return self.read(0, self.shape[0])

    def parts(self, *, gated: bool = False, size: int | None = None) -> Iterator[NDArray[T]]:
        """Yield all rows in parts of whole panels; `gated`: each part has gates, and then their values.

        `size` is the numbers that a part has at most, if they are a whole panel.
        """
        height = PANEL // 2 if gated else PANEL
        count, columns = self.shape[0] // (2 if gated else 1), self.shape[1]
        step = max((size or _PART) // columns // PANEL, 1) * height
        for start in range(0, count, step):
            stop = min(start + step, count)
            part = self.read(start, stop)
            yield np.concatenate([part, self.read(count + start, count + stop)]) if gated else part


def joined_rows(parts: Sequence[Rows[T]]) -> Rows[T]:
    """Return the rows of several matrices with the same number of columns, one after the other."""
    if len(parts) == 1:
        return parts[0]
    ends = list(accumulate(part.shape[0] for part in parts))
    starts = [0, *ends[:-1]]

    def read(start: int, stop: int) -> NDArray[T]:
        found: list[NDArray[Any]] = [
            part.read(max(start - first, 0), min(stop, end) - first)
            for part, first, end in zip(parts, starts, ends, strict=True)
            if start < end and first < stop
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)

    return Rows((ends[-1], parts[0].shape[1]), read)
