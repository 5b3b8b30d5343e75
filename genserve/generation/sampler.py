"""Sampler: rows of logits to token ids; pure.

Row after row, since what is made of one row stays in the processor's cache. Arrays of all rows are
megabytes, which are asked of the system anew at each step: that alone took most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.generation.likelihood import Asked, likelihood
from genserve.generation.logit_edits import LogitEdits, apply_edits
from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.generation.stages import Stages, left_by
from genserve.generation.truncation import BLOCK, Truncation, exponentials, kept, level_of_best
from genserve.request import TokenLogprob

__all__ = [
    "PickedRows",
    "SamplingRows",
    "draws",
    "greedy",
    "pick_rows",
    "sample",
    "select_rows",
    "uniforms",
]

# What a token is drawn from: logits after all rules, and of which ids; None: of all.
Left: TypeAlias = tuple[FloatArray, TokenArray | None]

FEW = 4096  # weights that are summed up one by one
# Makes of a seed another one, for a second number per step.
ASIDE = np.uint64(0xD1B54A32D192ED03)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How each of R rows draws."""

    temperature: FloatArray             # [R], above 0
    truncations: tuple[Truncation, ...]     # R of them
    stages: tuple[Stages | None, ...]       # R of them; where there are some, the two above are not used
    seed: NDArray[np.uint64]            # [R]
    step: NDArray[np.uint64]            # [R], how many tokens the answer has

    def chosen(self, rows: NDArray[np.bool_]) -> SamplingRows:
        """Return those rows alone."""
        return SamplingRows(
            temperature=self.temperature[rows],
            truncations=tuple(compress(self.truncations, rows)),
            stages=tuple(compress(self.stages, rows)),
            seed=self.seed[rows],
            step=self.step[rows],
        )

    def chance(self, index: int) -> float:
        """Return a number in [0, 1) of one row that has nothing to do with the one it draws by."""
        one = slice(index, index + 1)
        return float(uniforms(self.seed[one] ^ ASIDE, self.step[one])[0])


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
    # The maximum of a row with a NaN is NaN, and argmax points at it: one look tells.
    token_ids = greedy(logits)
    finite = np.isfinite(logits[np.arange(len(token_ids)), token_ids])
    drawn = np.asarray(drawing, dtype=np.int64)
    if not finite.all():
        rules, drawn = rules.chosen(finite[drawn]), drawn[finite[drawn]]
    wanted = {asked.row for asked in asking if asked.processed}
    left: dict[int, Left] = {}
    for row, (token_id, values) in zip(
        drawn.tolist(), draws(select_rows(logits, drawn), rules), strict=True
    ):
        token_ids[row] = token_id
        if row in wanted:
            left[row] = values
    logprobs = []
    with np.errstate(invalid="ignore"):  # the rows that are not finite get a NaN
        for asked in asking:
            unchanged = logits[asked.row] if asked.processed else raw[asked.row], None
            values, ids = left.get(asked.row, unchanged) if asked.processed else unchanged
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


def sample(logits: FloatArray, rows: SamplingRows) -> TokenArray:
    """Draw one token per row: [R, V] float32 -> [R] int64. See `draws`."""
    return np.fromiter((token_id for token_id, _ in draws(logits, rows)), np.int64, count=len(logits))


def draws(logits: FloatArray, rows: SamplingRows) -> Iterator[tuple[int, Left]]:
    """Yield the token that each row draws, and what it was drawn from: temperature, then `Truncation`.

    A row's token depends on its logits, its parameters, its seed and its step, and on nothing else.

    Args:
        logits: [R, V] float32; not modified.
        rows: the parameters of the R rows.

    The draw inverts the cumulative distribution in order of ids.
    """
    uniform = uniforms(rows.seed, rows.step)
    for index, row in enumerate(logits):
        values, ids = _left(row, rows, index=index)
        place = _draw(exponentials(values), uniform[index])
        yield place if ids is None else int(ids[place]), (values, ids)


def _left(row: FloatArray, rules: SamplingRows, *, index: int) -> Left:
    """Return what a token is drawn from: logits after all rules, and of which ids; None: of all.

    Args:
        row: [V] float32; not modified.
        rules: of several rows.
        index: of this one among them.
    """
    if (stages := rules.stages[index]) is not None:
        ids, values = left_by(row, stages, chance=rules.chance(index))
        return values, ids
    truncation, left = rules.truncations[index], None
    if truncation.top_k and not truncation.top_n_sigma:
        # What comes before top-k keeps the order: all the rest of the row needs no temperature.
        left = np.flatnonzero(row >= level_of_best(row, truncation.top_k))
        row = row[left]
    scaled = _scaled(row, rules.temperature[index])
    places = kept(scaled, truncation)
    if places is None:
        return scaled, None
    return scaled[places], places if left is None else left[places]


def _scaled(row: FloatArray, temperature: np.float32) -> FloatArray:
    scaled: FloatArray = row - row.max()
    with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to -inf, as it should
        scaled /= temperature
    return scaled


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


def _draw(weights: FloatArray, uniform: float) -> int:
    """Draw a place, of many in two levels: a block and then a place in it."""
    if weights.size <= FEW:
        return _invert(np.cumsum(weights, dtype=np.float64), uniform)
    starts = np.arange(0, weights.size, BLOCK)
    cumulative = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    block = _invert(cumulative, uniform)
    inside = np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    before = cumulative[block - 1] if block else 0.0
    rest = (uniform * cumulative[-1] - before) / inside[-1]
    # The block's own sum was rounded in another order: rest may touch 1. What weighs nothing is not drawn.
    last = int(np.searchsorted(inside, inside[-1], side="left"))
    return int(starts[block]) + min(_invert(inside, rest), last)


def _invert(cumulative: NDArray[np.float64], uniform: float) -> int:
    """Return the first index whose share of the total exceeds `uniform`."""
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, cumulative.size - 1)  # just below 1, the product may round to the total
