"""Sampling kernels: compute the best ids, the log-sum-exp and samples of rows of logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.kernels import library

# How to sample one row. The draw inverts `uniform`, a number in [0, 1). top_p 1, top_k 0 and log_min_p -inf
# keep all tokens; temperature 0 picks the best token.
SAMPLING_RULE = np.dtype(
    [("uniform", "f8"), ("top_p", "f8"), ("top_k", "i8"), ("temperature", "f4"), ("log_min_p", "f4")]
)

# The result of one row. `best` is the largest logit, or NaN if the row has a NaN. token_id is valid only if
# `best` is finite. The candidates of the draw were the tokens with (logit - best) / temperature >= level.
SAMPLED_ROW = np.dtype([("token_id", "i8"), ("best", "f4"), ("level", "f4")])


class LogitsScan(NamedTuple):
    """The result of a scan of logits [R, V]."""

    token_ids: NDArray[np.int64]
    """[R], the best tokens; of equal ones the lowest id."""

    best: NDArray[np.float32]
    """[R], their logits; NaN if the row has a NaN, and then its other results are undefined."""

    top_ids: NDArray[np.int64]
    """[R, top_k], the best first, of equal ones the lower id; -1 if fewer tokens are above -inf."""

    log_sum_exp: NDArray[np.float64]
    """[R], or [0] if not requested; the error is at most 1e-6."""


def scan_logits(logits: NDArray[np.float32], *, top_k: int = 0, log_sum_exp: bool = False) -> LogitsScan:
    """Scan rows of logits [R, V], C-contiguous float32; releases the GIL.

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
    if not library().genserve_scan_logits(logits.ctypes.data, rows, size, top_k, *arrays):
        raise MemoryError
    return scan


def sample_logits(logits: NDArray[np.float32], rules: NDArray[np.void]) -> NDArray[np.void]:
    """Sample a token for each row of logits [R, V], C-contiguous float32, V > 0; releases the GIL.

    Top-k comes first, and keeps all logits that equal the k-th. Top-p is a share of the probability of the
    remaining tokens, min-p a share of the best token's probability. The draw inverts the cumulative
    distribution in the order of ids. The result of a row depends only on its logits and its rule.

    `rules` are [R] SAMPLING_RULE, the result is [R] SAMPLED_ROW.

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
    if not library().genserve_sample_logits(logits.ctypes.data, rows, size, *arrays):
        raise MemoryError
    return sampled


def _check_layout(logits: NDArray[np.float32]) -> None:
    if logits.ndim != 2 or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        msg = f"logits are {logits.dtype} {logits.shape}, not contiguous float32 [R, V]"
        raise ValueError(msg)
