"""Sampler: rows of logits to token ids; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.generation.draw import SamplingRows, draw
from genserve.generation.likelihood import Asked, likelihood
from genserve.generation.logit_edits import LogitEdits, apply_edits
from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.kernels.logits import sample_logits
from genserve.request import TokenLogprob

__all__ = ["PickedRows", "pick_rows", "select_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedRows:
    """What was picked for R rows, in the memory of the host."""

    token_ids: TokenArray               # [R]
    finite: NDArray[np.bool_]           # [R]; False: a NaN or no finite maximum, the token is void
    logprobs: tuple[TokenLogprob, ...]  # one for each that asked


def pick_rows(
    logits: FloatArray,
    *,
    drawing: Sequence[int],
    rules: SamplingRows,
    asking: Sequence[Asked],
    edits: LogitEdits | None = None,
) -> PickedRows:
    """Pick one token per row: the best one, or a draw.

    Args:
        logits: [R, V] float32; `edits` are written into it, nothing else is.
        drawing: the rows that draw, ascending.
        rules: their parameters.
        asking: which log-probabilities are wanted.
        edits: what is to be changed of the logits first.
    """
    raw = {asked.row: logits[asked.row] for asked in asking if not asked.processed}
    if edits is not None:
        raw = {row: own.copy() for row, own in raw.items()}
        apply_edits(logits, edits)
    table = rules.table(drawing, num_rows=len(logits))
    sampled = sample_logits(logits, table)
    token_ids, finite = sampled["token_id"], np.isfinite(sampled["best"])
    processed = {asked.row for asked in asking if asked.processed}
    left: dict[int, FloatArray] = {}
    # What a temperature near 0 divides goes to -inf, as it should; rows that are not finite get NaNs.
    with np.errstate(over="ignore", invalid="ignore"):
        for index, row in enumerate(drawing):
            if rules.alone(index) and finite[row]:
                uniform = table["uniform"][row]
                token_ids[row], left[row] = draw(logits[row], rules, index=index, uniform=uniform)
            elif row in processed:
                left[row] = logits[row] - sampled["best"][row]
                left[row] /= rules.temperature[index]
                left[row][left[row] < sampled["level"][row]] = -np.inf
    logprobs = []
    for asked in asking:
        values = left.get(asked.row, logits[asked.row]) if asked.processed else raw[asked.row]
        token_id = int(token_ids[asked.row])
        logprobs.append(likelihood(values, token_id, num_top=asked.num_top, named=asked.named))
    return PickedRows(token_ids=token_ids, finite=finite, logprobs=tuple(logprobs))


def select_rows(array: FloatArray, rows: Sequence[int] | NDArray[np.int64]) -> FloatArray:
    """Return those rows of an array [R, V], which are distinct and ascending.

    Nearly always all are asked for: then it is the array itself, and nothing is copied.
    """
    return array if len(rows) == len(array) else array[rows]
