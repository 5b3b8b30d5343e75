"""Logits array: logits in the memory of the host or of a device, as numpy or torch has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32]
TokenArray: TypeAlias = NDArray[np.int64]
# float32: a numpy array, or a torch tensor on the device of its model. Both are indexed alike and have
# `__dlpack__`.
LogitsArray: TypeAlias = Any


def on_host(logits: LogitsArray) -> FloatArray:
    """Return logits in host memory; logits that are there already are not copied."""
    return np.asarray(logits.cpu() if hasattr(logits, "cpu") else logits)


def select_rows(array: FloatArray, rows: Sequence[int] | NDArray[np.int64]) -> FloatArray:
    """Return rows of an array [R, V], given distinct and ascending; the array itself if these are all."""
    return array if len(rows) == len(array) else array[rows]
