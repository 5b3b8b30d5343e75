"""Sampler: rows of logits to token ids, in one vectorised pass; pure.

Nothing is sorted that need not be: the kept tokens of a row (top-k, then top-p) are the ones above
some level of its logits, and that level is found among the few hundred highest. Only where
those do not reach far enough is the whole row sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray, TokenArray

__all__ = [
    "LOWEST_EXPONENT",
    "PickedRows",
    "SamplingRows",
    "greedy",
    "log_probabilities",
    "pick_rows",
    "sample",
    "select_rows",
    "uniforms",
]

# The block maxima tell a level that at least HEAD tokens reach, without looking at every token twice.
BLOCK = 64
HEAD = 256
# exp of less underflows to a denormal float32, and arithmetic on those is a hundred times slower.
LOWEST_EXPONENT = -80.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The parameters of R rows, one array each."""

    temperature: FloatArray             # [R], above 0
    top_k: NDArray[np.int64]            # [R], 0: all
    top_p: FloatArray                   # [R], in (0, 1]
    seed: NDArray[np.uint64]            # [R]
    step: NDArray[np.uint64]            # [R], how many tokens the answer has

    def chosen(self, rows: NDArray[np.bool_]) -> SamplingRows:
        """Return the parameters of those rows alone."""
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seed=self.seed[rows],
            step=self.step[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedRows:
    """What was picked for R rows, in the memory of the host."""

    token_ids: TokenArray               # [R]
    finite: NDArray[np.bool_]           # [R]; False: a NaN or no finite maximum, the token is void
    logprobs: FloatArray                # [rows that asked], natural logs, before any sampling rule


def pick_rows(
    logits: FloatArray, *, drawing: Sequence[int], rules: SamplingRows, asking: Sequence[int]
) -> PickedRows:
    """Pick one token per row: the best one, or a draw.

    Args:
        logits: [R, V] float32; not modified.
        drawing: the rows that draw, ascending.
        rules: their parameters.
        asking: the rows whose log-probability is wanted, ascending.
    """
    # The maximum of a row with a NaN is NaN, and argmax points at it: one look tells.
    token_ids = greedy(logits)
    finite = np.isfinite(logits[np.arange(len(token_ids)), token_ids])
    drawn = np.asarray(drawing, dtype=np.int64)
    if not finite.all():
        rules, drawn = rules.chosen(finite[drawn]), drawn[finite[drawn]]
    if drawn.size:
        token_ids[drawn] = sample(select_rows(logits, drawn), rules)
    logprobs = np.empty(0, dtype=np.float32)
    if asking:
        with np.errstate(invalid="ignore"):  # the rows that are not finite get a NaN
            logprobs = log_probabilities(select_rows(logits, asking), token_ids[list(asking)])
    return PickedRows(token_ids=token_ids, finite=finite, logprobs=logprobs)


def select_rows(array: FloatArray, rows: Sequence[int] | NDArray[np.int64]) -> FloatArray:
    """Return those rows of an array [R, V], which are distinct and ascending.

    Nearly always all are asked for: then it is the array itself, and nothing is copied.
    """
    return array if len(rows) == len(array) else array[rows]


def greedy(logits: FloatArray) -> TokenArray:
    """Return the best token of each row; ties go to the lowest id. [R, V] float32 -> [R] int64."""
    best: TokenArray = np.argmax(logits, axis=1)
    return best


def sample(logits: FloatArray, rows: SamplingRows) -> TokenArray:
    """Draw one token per row: temperature, then top-k, then top-p of what is left.

    A row's token depends on its logits, its parameters, its seed and its step, and on nothing else.

    Args:
        logits: [R, V] float32; not modified.
        rows: the parameters of the R rows.

    Returns:
        [R] int64.

    Source: top-p is nucleus sampling, Holtzman et al., "The Curious Case of Neural Text
    Degeneration" (ICLR 2020); the draw inverts the cumulative distribution in order of ids.
    """
    scaled = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to -inf, as it should
        scaled /= rows.temperature[:, None]
    weights = _exp(scaled)
    uniform = uniforms(rows.seed, rows.step)
    filtered = (rows.top_k > 0) | (rows.top_p < 1.0)
    token_ids = np.empty(len(scaled), dtype=np.int64)
    whole = np.flatnonzero(~filtered)
    if whole.size:
        token_ids[whole] = _draw_from_all(select_rows(weights, whole), uniform[whole])
    reduced = np.flatnonzero(filtered)
    if reduced.size:
        totals = select_rows(weights, reduced).sum(axis=1)
        heads = _heads(select_rows(scaled, reduced))
        for index, total, head in zip(reduced, totals, heads, strict=True):
            keep = _Keep(
                top_k=min(int(rows.top_k[index]), scaled.shape[1]),
                top_p=float(rows.top_p[index]),
                total=float(total),
            )
            kept = np.flatnonzero(scaled[index] >= _kept_level(scaled[index], head, keep))
            cumulative = np.cumsum(weights[index, kept], dtype=np.float64)
            token_ids[index] = kept[_invert(cumulative, uniform[index])]
    return token_ids


def log_probabilities(logits: FloatArray, token_ids: TokenArray) -> FloatArray:
    """Return the natural log of the probability of one token per row, before any sampling rule.

    Args:
        logits: [R, V] float32.
        token_ids: [R] int64.

    Returns:
        [R] float32.
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(shifted, token_ids[:, None], axis=1)[:, 0]
    total = np.exp(np.maximum(shifted, LOWEST_EXPONENT)).sum(axis=1, dtype=np.float64)
    logprobs: FloatArray = (chosen - np.log(total)).astype(np.float32)
    return logprobs


def uniforms(seed: NDArray[np.uint64], step: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per row, a function of (seed, step) alone.

    Counter-based, so that no generator has a state that the order of a batch could disturb.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators" (OOPSLA 2014), applied to the seed and then to seed and step.
    """
    mixed = _mix(_mix(seed) + step * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _exp(scaled: FloatArray) -> FloatArray:
    return np.exp(np.maximum(scaled, LOWEST_EXPONENT))


def _invert(cumulative: NDArray[np.float64], uniform: float) -> int:
    """Return the first index whose share of the total exceeds `uniform`."""
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def _draw_from_all(weights: FloatArray, uniform: NDArray[np.float64]) -> TokenArray:
    """Draw from whole rows in two levels, a block and then a token in it. [R, V], [R] -> [R]."""
    starts = np.arange(0, weights.shape[1], BLOCK)
    cumulative = np.cumsum(np.add.reduceat(weights, starts, axis=1), axis=1, dtype=np.float64)
    token_ids = np.empty(len(weights), dtype=np.int64)
    for index, row in enumerate(cumulative):
        block = _invert(row, uniform[index])
        inside = np.cumsum(weights[index, starts[block] : starts[block] + BLOCK], dtype=np.float64)
        before = row[block - 1] if block else 0.0
        rest = (uniform[index] * row[-1] - before) / inside[-1]
        # The block's own sum was rounded in another order: rest may touch 1.
        token_ids[index] = starts[block] + min(_invert(inside, rest), len(inside) - 1)
    return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keep:
    """What one row keeps: the `top_k` best (0: all), of those the best that reach `top_p`."""

    top_k: int
    top_p: float
    total: float            # the weights of the whole row, summed


def _heads(scaled: FloatArray) -> list[FloatArray]:
    """Return the highest values of each row, sorted downwards, none left out; at least HEAD of them."""
    starts = np.arange(0, scaled.shape[1], BLOCK)
    if len(starts) <= HEAD:
        return list(np.sort(scaled, axis=1)[:, ::-1])
    maxima = np.maximum.reduceat(scaled, starts, axis=1)
    reached = np.partition(maxima, len(starts) - HEAD, axis=1)[:, len(starts) - HEAD]
    return [np.sort(row[row >= value])[::-1] for row, value in zip(scaled, reached, strict=True)]


def _kept_level(row: FloatArray, head: FloatArray, keep: _Keep) -> float:
    """Return the smallest value of `row` that is kept."""
    level = _level_within(head, keep)
    if level is None and len(head) < len(row):
        head = np.sort(row)[::-1]
        level = _level_within(head, keep)
    return float(head[-1]) if level is None else level


def _level_within(head: FloatArray, keep: _Keep) -> float | None:
    """Return the smallest value kept, or None where that is not in `head`."""
    if keep.top_k > len(head):
        return None
    best = head[: keep.top_k] if keep.top_k else head
    if keep.top_p == 1.0:
        return float(best[-1])
    cumulative = np.cumsum(_exp(best), dtype=np.float64)
    total = cumulative[-1] if keep.top_k else keep.total
    count = int(np.searchsorted(cumulative, keep.top_p * total, side="left"))
    if count < len(best):
        return float(best[count])
    return float(best[-1]) if keep.top_k else None
