"""Draw: a token from a row of logits; pure.

Row after row, since what is made of one row stays in the processor's cache. Arrays of all rows are
megabytes, which are asked of the system anew at each step: that alone took most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.generation.stages import Stages, left_by
from genserve.generation.truncation import (
    Truncation,
    block_maxima,
    exponentials,
    kept,
    level_of_best,
    top_candidates,
)

__all__ = ["Drawn", "SamplingRows", "draw", "draw_together", "uniforms"]

FEW = 4096      # weights that are summed up one by one
PART = 256      # of many: those that are summed up first
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

    def chance(self, index: int) -> float:
        """Return a number in [0, 1) of one row that has nothing to do with the one it draws by."""
        one = slice(index, index + 1)
        return float(uniforms(self.seed[one] ^ ASIDE, self.step[one])[0])


class Drawn(NamedTuple):
    """One row's token, and what it was drawn from."""

    token_id: int
    left: FloatArray            # logits after all rules
    ids: TokenArray | None      # of which tokens, ascending; None: of all


def draw(row: FloatArray, rows: SamplingRows, *, index: int, uniform: float) -> Drawn | None:
    """Draw a row's token; None if the row has a NaN or no finite maximum.

    It depends on the row's logits, its parameters, its seed and its step, and on nothing else. The draw
    inverts the cumulative distribution in order of ids.

    Args:
        row: [V] float32; not modified.
        rows: the parameters of several rows.
        index: of this one among them.
        uniform: its number of `uniforms`.
    """
    truncation, stages, ids = rows.truncations[index], rows.stages[index], None
    if truncation.top_k and not truncation.top_n_sigma and stages is None:
        # What comes before top-k keeps the order: all the rest of the row needs no temperature.
        maxima = block_maxima(row)
        ids = (row >= level_of_best(maxima, truncation.top_k)).nonzero()[0]
        row = row[ids]
    # The maximum of a row with a NaN is NaN.
    best = (row if ids is None else maxima).max()
    if not math.isfinite(best):
        return None
    if stages is not None:
        ids, left = left_by(row, stages, chance=rows.chance(index))
    else:
        left = row - best
        left /= rows.temperature[index]
        if (places := kept(left, truncation)) is not None:
            left, ids = left[places], places if ids is None else ids[places]
    place = _place(exponentials(left), uniform)
    return Drawn(place if ids is None else int(ids[place]), left, ids)


def draw_together(
    logits: FloatArray, drawing: Sequence[int], rows: SamplingRows, uniform: NDArray[np.float64]
) -> dict[int, int]:
    """Draw the tokens of those rows that cut by top-k, and by top-p and min-p at the most, in one pass.

    Each is the token that `draw` draws.

    Args:
        logits: [R, V] float32; not modified.
        drawing: the rows that draw.
        rows: the parameters of these.
        uniform: a number of `uniforms` for each.

    Returns:
        The tokens by row; -1 where the row has a NaN or no finite maximum.
    """
    simple = [i for i, t in enumerate(rows.truncations) if t.is_simple and rows.stages[i] is None]
    if len(simple) < 2:
        return {}
    counts = np.array([rows.truncations[i].top_k for i in simple])
    top_p = np.array([rows.truncations[i].top_p for i in simple])
    # As `kept` has it: a float32 level.
    min_p = np.array([math.log(p) if (p := rows.truncations[i].min_p) else -np.inf for i in simple])
    candidates = top_candidates(logits, [drawing[i] for i in simple], counts)
    width = max(ids.size for ids, _ in candidates)
    places = np.arange(width)
    token_ids = np.zeros((len(simple), width), dtype=np.int64)
    left = np.full((len(simple), width), -np.inf, dtype=np.float32)
    for place, (ids, values) in enumerate(candidates):
        token_ids[place, : ids.size], left[place, : ids.size] = ids, values
    best = left.max(axis=1)
    left -= best[:, None]
    left /= rows.temperature[simple][:, None]
    counts = np.minimum(counts, [ids.size for ids, _ in candidates])
    descending = -np.sort(-left, axis=1)
    cumulative = np.where(places < counts[:, None], np.exp(descending), 0).cumsum(axis=1, dtype=np.float64)
    reaching = (cumulative < (top_p * cumulative[:, -1])[:, None]).sum(axis=1)
    reaching = np.where(top_p < 1.0, np.minimum(reaching, counts - 1), counts - 1)
    level = np.maximum(descending[np.arange(len(simple)), reaching], min_p.astype(np.float32))
    keep = (left >= np.maximum(level, np.finfo(np.float32).min)[:, None]) & (left > -np.inf)
    cumulative = np.where(keep, np.exp(left), 0).cumsum(axis=1, dtype=np.float64)
    drawn = (cumulative <= (uniform[simple] * cumulative[:, -1])[:, None]).sum(axis=1)
    last = width - 1 - keep[:, ::-1].argmax(axis=1)
    found = token_ids[np.arange(len(simple)), np.minimum(drawn, last)]
    found[~np.isfinite(best)] = -1
    return dict(zip((drawing[i] for i in simple), found.tolist(), strict=True))


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


def _place(weights: FloatArray, uniform: float) -> int:
    """Draw a place, of many in two levels: a block and then a place in it."""
    if weights.size <= FEW:
        return _invert(weights.cumsum(dtype=np.float64), uniform)
    starts = np.arange(0, weights.size, PART)
    cumulative = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    block = _invert(cumulative, uniform)
    inside = np.cumsum(weights[starts[block] : starts[block] + PART], dtype=np.float64)
    before = cumulative[block - 1] if block else 0.0
    rest = (uniform * cumulative[-1] - before) / inside[-1]
    # The block's own sum was rounded in another order: rest may touch 1. What weighs nothing is not drawn.
    last = int(inside.searchsorted(inside[-1], side="left"))
    return int(starts[block]) + min(_invert(inside, rest), last)


def _invert(cumulative: NDArray[np.float64], uniform: float) -> int:
    """Return the first index whose share of the total exceeds `uniform`."""
    index = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    return min(index, cumulative.size - 1)  # just below 1, the product may round to the total
