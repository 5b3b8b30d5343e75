"""Sampler: rows of logits to token ids; pure.

No row is sorted: the kept tokens of a row (top-k, then top-p) are the ones above some level of its
logits. Top-k finds it among the tokens that block maxima leave, top-p in the one bin of a histogram
where the mass reaches p.

Row after row, since what is made of one row stays in the processor's cache. Arrays of all rows are
megabytes, which are asked of the system anew at each step: that alone took most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logit_edits import LogitEdits, apply_edits
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

BLOCK = 64              # tokens, whose maxima or sums are looked at first
NEAR = 8.0              # from the best logit: nearly always, what top-p keeps is not further away
BINS_PER_UNIT = 32      # of a row's logits by their distance from the best
NUM_BINS = 2560
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
    logits: FloatArray,
    *,
    drawing: Sequence[int],
    rules: SamplingRows,
    asking: Sequence[int],
    edits: LogitEdits | None = None,
) -> PickedRows:
    """Pick one token per row: the best one, or a draw.

    Args:
        logits: [R, V] float32; `edits` are written into it, nothing else is.
        drawing: the rows that draw, ascending.
        rules: their parameters.
        asking: the rows whose log-probability is wanted, ascending.
        edits: what is to be changed of the logits first; log-probabilities are those before it.
    """
    asked = select_rows(logits, asking)
    if edits is not None:
        asked = asked.copy()
        apply_edits(logits, edits)
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
            logprobs = log_probabilities(asked, token_ids[list(asking)])
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
    uniform = uniforms(rows.seed, rows.step)
    token_ids = np.empty(len(logits), dtype=np.int64)
    for index, row in enumerate(logits):
        scaled = row - row.max()
        with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to -inf, as it should
            scaled /= rows.temperature[index]
        keep = _Keep(top_k=min(int(rows.top_k[index]), row.size), top_p=float(rows.top_p[index]))
        token_ids[index] = _draw(scaled, keep, uniform[index])
    return token_ids


def log_probabilities(logits: FloatArray, token_ids: TokenArray) -> FloatArray:
    """Return the natural log of the probability of one token per row, before any sampling rule.

    Args:
        logits: [R, V] float32.
        token_ids: [R] int64.

    Returns:
        [R] float32.
    """
    logprobs = np.empty(len(logits), dtype=np.float32)
    for index, (row, token_id) in enumerate(zip(logits, token_ids, strict=True)):
        shifted = row - row.max()
        logprobs[index] = shifted[token_id] - np.log(_exp(shifted).sum(dtype=np.float64))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keep:
    """What one row keeps: the `top_k` best (0: all), of those the best that reach `top_p`."""

    top_k: int
    top_p: float


def _draw(scaled: FloatArray, keep: _Keep, uniform: float) -> int:
    """Draw from what a row [V] keeps."""
    if keep.top_k:
        level = _kept_level(_best(scaled, keep.top_k), top_p=keep.top_p)
    elif keep.top_p < 1.0:
        level = _nucleus_level(scaled, top_p=keep.top_p)
    else:
        return _draw_from_all(_exp(scaled), uniform)
    kept = np.flatnonzero(scaled >= level)
    cumulative = np.cumsum(_exp(scaled[kept]), dtype=np.float64)
    return int(kept[_invert(cumulative, uniform)])


def _draw_from_all(weights: FloatArray, uniform: float) -> int:
    """Draw from a whole row in two levels, a block and then a token in it."""
    starts = np.arange(0, weights.size, BLOCK)
    cumulative = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    block = _invert(cumulative, uniform)
    inside = np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    before = cumulative[block - 1] if block else 0.0
    rest = (uniform * cumulative[-1] - before) / inside[-1]
    # The block's own sum was rounded in another order: rest may touch 1.
    return int(starts[block]) + min(_invert(inside, rest), len(inside) - 1)


def _best(scaled: FloatArray, count: int) -> FloatArray:
    """Return the `count` highest values of a row, sorted downwards."""
    starts = np.arange(0, scaled.size, BLOCK)
    if count < len(starts):
        maxima = np.maximum.reduceat(scaled, starts)
        # So many blocks have a value that reaches this.
        scaled = scaled[scaled >= np.partition(maxima, len(starts) - count)[len(starts) - count]]
    return np.sort(scaled)[::-1][:count]


def _kept_level(best: FloatArray, *, top_p: float, before: float = 0.0, total: float | None = None) -> float:
    """Return the value with which the mass of sorted ones, after a mass of `before`, reaches its share.

    `total` is what the share is of; None: of the mass of `best`.
    """
    cumulative = before + np.cumsum(_exp(best), dtype=np.float64)
    wanted = top_p * (cumulative[-1] if total is None else total)
    count = int(np.searchsorted(cumulative, wanted, side="left")) if top_p < 1.0 else len(best)
    return float(best[min(count, len(best) - 1)])


def _nucleus_level(scaled: FloatArray, *, top_p: float) -> float:
    """Return the smallest value that top-p keeps of a whole row."""
    total = float(_exp(scaled).sum())
    near = scaled[scaled >= -NEAR]
    if _exp(near).sum() < top_p * total:
        near = scaled
    bins = np.minimum(near * -BINS_PER_UNIT, NUM_BINS - 1).astype(np.int64)  # the highest values first
    cumulative = np.cumsum(np.bincount(bins, weights=_exp(near), minlength=NUM_BINS))
    # The total was rounded in another order: a share near 1 may lie behind the last.
    reaching = min(int(np.searchsorted(cumulative, top_p * total, side="left")), int(bins.max()))
    return _kept_level(
        np.sort(near[bins == reaching])[::-1],
        top_p=top_p,
        before=float(cumulative[reaching - 1]) if reaching else 0.0,
        total=total,
    )


def _exp(scaled: FloatArray) -> FloatArray:
    low = scaled.min() < LOWEST_EXPONENT
    weights: FloatArray = np.exp(np.maximum(scaled, LOWEST_EXPONENT) if low else scaled)
    return weights


def _invert(cumulative: NDArray[np.float64], uniform: float) -> int:
    """Return the first index whose share of the total exceeds `uniform`."""
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
