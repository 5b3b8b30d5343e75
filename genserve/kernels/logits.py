"""Logits: what is asked of rows of logits: the best ids, the log of the sum, or a token by a rule."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.kernels import instruction_set, library_path

__all__ = ["SAMPLED_ROW", "SAMPLING_RULE", "LogitsScan", "sample_logits", "scan_logits"]

# How one row is sampled: `uniform` in [0, 1) is the number that the draw inverts; top_p 1, top_k 0 and
# log_min_p -inf keep all; at the temperature 0 the best token is taken.
SAMPLING_RULE = np.dtype(
    [("uniform", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("temperature", "f4"), ("log_min_p", "f4")]
)

# What was found: `best` is the largest logit, NaN where the row has one; where it is not finite, token_id is
# void. Tokens with (logit - best) / temperature >= level could be drawn.
SAMPLED_ROW = np.dtype([("token_id", "i8"), ("best", "f4"), ("level", "f4")])


class LogitsScan(NamedTuple):
    """What was found in rows of logits [R, V]."""

    token_ids: NDArray[np.int64]
    """[R], the best; of equals the lowest."""

    best: NDArray[np.float32]
    """[R], its logit: NaN where the row has a NaN, and then the rest of the row's answers is void."""

    top_ids: NDArray[np.int64]
    """[R, top_k], from the best on; of equals the lower first; -1 where fewer are above -inf."""

    log_sum_exp: NDArray[np.float64]
    """[R], or [0] if it was not asked for; off by 1e-6 at most."""


def scan_logits(logits: NDArray[np.float32], *, top_k: int = 0, log_sum_exp: bool = False) -> LogitsScan:
    """Scan rows of logits [R, V], which are C-contiguous float32 and not modified.

    It takes no lock of Python's.

    Raises:
        ValueError: the logits have another layout, or top_k is not between 0 and V.
        GenserveError: as `library_path`.
    """
    _check_layout(logits)
    rows, size = logits.shape
    if not 0 <= top_k <= size or size == 0:
        msg = f"top_k is {top_k}, not between 0 and {size}"
        raise ValueError(msg)
    scan = LogitsScan(
        np.empty(rows, np.int64),
        np.empty(rows, np.float32),
        np.empty((rows, top_k), np.int64),
        np.empty(rows if log_sum_exp else 0, np.float64),
    )
    sums = scan.log_sum_exp.ctypes.data if log_sum_exp else None
    arrays = (scan.token_ids.ctypes.data, scan.best.ctypes.data, scan.top_ids.ctypes.data, sums)
    if not _library(instruction_set()).genserve_scan_logits(logits.ctypes.data, rows, size, top_k, *arrays):
        raise MemoryError
    return scan


def sample_logits(logits: NDArray[np.float32], rules: NDArray[np.void]) -> NDArray[np.void]:
    """Pick a token for each row of logits [R, V], which are C-contiguous float32 and not modified.

    Top-k comes first and keeps what equals the k-th value; top-p is a share of the k best, or of all; min-p a
    share of the best one's probability. The draw inverts the cumulative distribution in order of ids. A row's
    answer depends on its logits and its rule alone. It takes no lock of Python's.

    Args:
        logits: V is above 0.
        rules: [R] SAMPLING_RULE.

    Returns:
        [R] SAMPLED_ROW.

    Raises:
        ValueError: the logits or the rules have another layout.
        GenserveError: as `library_path`.
    """
    _check_layout(logits)
    rows, size = logits.shape
    if rules.dtype != SAMPLING_RULE or rules.shape != (rows,) or not rules.flags.c_contiguous or size == 0:
        msg = f"rules are {rules.dtype} {rules.shape}, not SAMPLING_RULE [R] for logits {logits.shape}"
        raise ValueError(msg)
    sampled = np.empty(rows, SAMPLED_ROW)
    arrays = (rules.ctypes.data, sampled.ctypes.data)
    if not _library(instruction_set()).genserve_sample_logits(logits.ctypes.data, rows, size, *arrays):
        raise MemoryError
    return sampled


def _check_layout(logits: NDArray[np.float32]) -> None:
    if logits.ndim != 2 or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        msg = f"logits are {logits.dtype} {logits.shape}, not contiguous float32 [R, V]"
        raise ValueError(msg)


@functools.cache
def _library(_instruction_set: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.genserve_scan_logits.argtypes = (pointer, size, size, size, pointer, pointer, pointer, pointer)
    library.genserve_sample_logits.argtypes = (pointer, size, size, pointer, pointer)
    return library
