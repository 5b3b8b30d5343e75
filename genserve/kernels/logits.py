"""Logits: what the sampler asks of rows of logits, read once: the best, the k best, the log of the sum."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.kernels import library_path

__all__ = ["LogitsScan", "scan_logits"]


class LogitsScan(NamedTuple):
    """What was found in rows of logits [R, V]."""

    token_ids: NDArray[np.int64]
    """[R], the best; of equals the lowest."""

    best: NDArray[np.float32]
    """[R], its logit: NaN where the row has a NaN, and then the rest of the row's answers is void."""

    top_ids: NDArray[np.int64]
    """[R, top_k], from the best on; of equals the lower first; -1 where fewer are above -inf."""

    log_sum_exp: NDArray[np.float64] | None
    """[R], if it was asked for; off by 1e-6 at most."""


def scan_logits(logits: NDArray[np.float32], *, top_k: int = 0, log_sum_exp: bool = False) -> LogitsScan:
    """Scan rows of logits [R, V], which are C-contiguous float32 and not modified.

    It takes no lock of Python's.

    Raises:
        ValueError: the logits have another layout, or top_k is not between 0 and V.
        GenserveError: as `library_path`.
    """
    if logits.ndim != 2 or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        msg = f"logits are {logits.dtype} {logits.shape}, not contiguous float32 [R, V]"
        raise ValueError(msg)
    rows, size = logits.shape
    if not 0 <= top_k <= size or size == 0:
        msg = f"top_k is {top_k}, not between 0 and {size}"
        raise ValueError(msg)
    scan = LogitsScan(
        np.empty(rows, np.int64),
        np.empty(rows, np.float32),
        np.empty((rows, top_k), np.int64),
        np.empty(rows, np.float64) if log_sum_exp else None,
    )
    sums = None if scan.log_sum_exp is None else scan.log_sum_exp.ctypes.data
    arrays = (scan.token_ids.ctypes.data, scan.best.ctypes.data, scan.top_ids.ctypes.data, sums)
    if not _function(str(library_path()))(logits.ctypes.data, rows, size, top_k, *arrays):
        raise MemoryError
    return scan


@functools.cache
def _function(path: str) -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(path).genserve_scan_logits
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (pointer, size, size, size, pointer, pointer, pointer, pointer)
    return function
