"""Sampler: rows of logits to token ids; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.generation.draw import Drawn, SamplingRows, draw, draw_together, uniforms
from genserve.generation.likelihood import Asked, likelihood
from genserve.generation.logit_edits import LogitEdits, apply_edits
from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.request import TokenLogprob

__all__ = ["PickedRows", "greedy", "pick_rows", "select_rows"]


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
    if drawing:
        among = set(drawing)
        best = [row for row in range(len(logits)) if row not in among]
        token_ids = np.zeros(len(logits), dtype=np.int64)
        if best:
            token_ids[best] = greedy(select_rows(logits, best))
    else:
        token_ids = greedy(logits)
    # The maximum of a row with a NaN is NaN, and argmax points at it: one look tells.
    finite = np.isfinite(logits[np.arange(len(logits)), token_ids])
    uniform = uniforms(rules.seed, rules.step)
    after_rules = {asked.row for asked in asking if asked.processed}
    drawn_from: dict[int, Drawn] = {}
    # What a temperature near 0 divides goes to -inf, as it should; rows that are not finite get NaNs.
    with np.errstate(over="ignore", invalid="ignore"):
        together = draw_together(logits, drawing, rules, uniform) if drawing and not asking else {}
        for row, token_id in together.items():
            token_ids[row], finite[row] = max(token_id, 0), token_id >= 0
        for index, row in enumerate(drawing):
            if row in together:
                continue
            drawn = draw(logits[row], rules, index=index, uniform=uniform[index])
            finite[row] = drawn is not None
            if drawn is None:
                continue
            token_ids[row] = drawn.token_id
            if row in after_rules:
                drawn_from[row] = drawn
        logprobs = []
        for asked in asking:
            values, ids = logits[asked.row] if asked.processed else raw[asked.row], None
            if asked.processed and asked.row in drawn_from:
                _, values, ids = drawn_from[asked.row]
            token_id = int(token_ids[asked.row])
            found = likelihood(values, token_id, num_top=asked.num_top, named=asked.named, ids=ids)
            logprobs.append(found)
    return PickedRows(token_ids=token_ids, finite=finite, logprobs=tuple(logprobs))


def select_rows(array: FloatArray, rows: Sequence[int] | NDArray[np.int64]) -> FloatArray:
    """Return those rows of an array [R, V], which are distinct and ascending.

    Nearly always all are asked for: then it is the array itself, and nothing is copied.
    """
    return array if len(rows) == len(array) else array[rows]


def greedy(logits: FloatArray) -> TokenArray:
    """Return the best token of each row; ties go to the lowest id. [R, V] float32 -> [R] int64."""
    best: TokenArray = np.argmax(logits, axis=1)
    return best
