"""Truncation: which tokens of a row a draw is made from; pure.

Nearly always these are the ones above some level of the row's logits. Top-k finds it among the tokens that
block maxima leave, top-p and typical in the one bin of a histogram that reaches the mass; no row is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray
from genserve.sampling.params import SamplingParams

__all__ = [
    "BLOCK",
    "LOWEST_EXPONENT",
    "Truncation",
    "best_ids",
    "best_values",
    "block_maxima",
    "exponentials",
    "kept",
    "level_of_best",
    "top_candidates",
    "weighted_mean",
]

BLOCK = 96              # tokens, whose maxima or sums are looked at first
NEAR = 8.0              # from the best logit, or the mean: nearly always, what is kept is not further away
FARTHER = 12.0          # the same for a top-p near 1
SMALL = 4               # part of a row, one by so many: worth to be taken out
FEW = 1024              # values that are sorted rather than counted into bins
BINS_PER_UNIT = 32      # of a row's logits by their distance from the best
NUM_BINS = 2560
PART = 8192             # values that are counted at once: what is made of more is asked of the system anew
# exp of less underflows to a denormal float32, and arithmetic on those is a hundred times slower.
LOWEST_EXPONENT = -80.0
# What is below was ruled out before.
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What one row keeps, rule after rule, each of what the one before it has left."""

    top_n_sigma: float = 0.0    # within so many standard deviations of the best logit; 0: all
    top_k: int = 0              # the k best; 0: all
    top_p: float = 1.0          # of those the best that reach this share; 1: all
    min_p: float = 0.0          # at least this share of the best one's probability; 0: all
    typical_p: float = 1.0      # those nearest to the row's entropy that reach this share; 1: all
    epsilon_cutoff: float = 0.0     # at least this probability, or the best; 0: all
    eta_cutoff: float = 0.0     # the same, but less where the entropy is high; 0: all

    @staticmethod
    def of(params: SamplingParams) -> Truncation:
        """Return what a request asks for."""
        return Truncation(**{rule.name: getattr(params, rule.name) for rule in fields(Truncation)})

    @property
    def is_simple(self) -> bool:
        """Whether it is a top-k, with a top-p and a min-p at the most."""
        rare = self.top_n_sigma or self.typical_p < 1.0 or self.epsilon_cutoff or self.eta_cutoff
        return bool(self.top_k) and not rare


_ALL = Truncation()


def kept(scaled: FloatArray, rules: Truncation) -> NDArray[np.int64] | None:
    """Return the ids that a row keeps, ascending; None if no rule is in use.

    Args:
        scaled: [V] float32, logits less the best one, divided by the temperature; not modified.
        rules: of the row.

    Source: top-n-sigma is Tang et al., "Top-nσ: Not All Logits Are You Need" (2024), over the finite logits;
    top-p is Holtzman et al. (2020), min-p Nguyen et al. (2024), typical Meister et al. (2022), epsilon and
    eta Hewitt et al. (2022), all as transformers has them.
    """
    if rules == _ALL:
        return None
    level = _LOWEST
    if rules.top_n_sigma:
        finite = scaled if scaled.min() >= _LOWEST else scaled[scaled >= _LOWEST]
        level = -rules.top_n_sigma * float(finite.std(dtype=np.float64))
        scaled = np.where(scaled >= level, scaled, np.float32(-np.inf))
    level = max(level, math.log(rules.min_p)) if rules.min_p else level
    if rules.top_k:
        level = max(level, _kept_level(best_values(scaled, rules.top_k), top_p=rules.top_p))
    if rules.top_k or rules.top_p == 1.0:
        ids = (scaled >= level).nonzero()[0]
    else:
        ids = _nucleus(scaled, top_p=rules.top_p)
        ids = ids[scaled[ids] >= level]
    if rules.typical_p < 1.0:
        ids = ids[_typical(_among(scaled, ids), share=rules.typical_p)]
    if rules.epsilon_cutoff:
        ids = ids[_probable(_among(scaled, ids), cutoff=rules.epsilon_cutoff)]
    if rules.eta_cutoff:
        ids = ids[_probable(_among(scaled, ids), cutoff=rules.eta_cutoff, by_entropy=True)]
    return ids


def _among(scaled: FloatArray, ids: NDArray[np.int64]) -> FloatArray:
    return scaled if ids.size == scaled.size else scaled[ids]


def best_values(row: FloatArray, count: int) -> FloatArray:
    """Return the `count` highest values of a row [V], or all, sorted downwards."""
    few = count * BLOCK > row.size
    best = row.copy() if few else row[row >= level_of_best(block_maxima(row), count)]
    best.sort()
    return best[::-1][:count]


def best_ids(row: FloatArray, count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` highest values of a row [V], the best first, of equals the lowest id.

    Of fewer, where the rest is -inf.
    """
    ids = (row >= max(level_of_best(block_maxima(row), count), _LOWEST)).nonzero()[0]
    return ids[np.argsort(-row[ids], kind="stable")][:count]


def top_candidates(
    logits: FloatArray, rows: Sequence[int], counts: Sequence[int] | NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], FloatArray]]:
    """Return ids, ascending, and values of each row: the highest so many, and seldom many more.

    Args:
        logits: [R, V] float32; not modified.
        rows: of these.
        counts: one for each row, above 0.

    Returns:
        For each row [K] int64 and [K] float32; where its maximum is not finite, that alone.
    """
    found = []
    for row, count in zip(rows, counts, strict=True):
        values = logits[row]
        maxima = block_maxima(values)
        if math.isfinite(best := float(maxima.max())):
            ids = (values >= level_of_best(maxima, int(count))).nonzero()[0]
            found.append((ids, values[ids]))
        else:
            found.append((np.zeros(1, dtype=np.int64), np.full(1, best, dtype=np.float32)))
    return found


def block_maxima(row: FloatArray) -> FloatArray:
    """Return the maxima of the blocks of a row [V], that of one with a NaN is NaN."""
    num_blocks = row.size // BLOCK
    # A block is every so-manieth value; the last few values are one more.
    maxima: FloatArray = row[: num_blocks * BLOCK].reshape(BLOCK, num_blocks).max(axis=0)
    last = row[num_blocks * BLOCK :]
    return np.append(maxima, last.max()) if last.size else maxima


def level_of_best(maxima: FloatArray, count: int) -> float:
    """Return a value that at least `count` of a row reach, and seldom many more; -inf: all do.

    Args:
        maxima: [N] of the row's blocks, so many of which have a value that reaches it; reordered.
        count: above 0.
    """
    first = maxima.size - count
    if first < 0:
        return -math.inf
    maxima.partition(first)
    return float(maxima[first])


def _kept_level(best: FloatArray, *, top_p: float) -> float:
    """Return the value with which the mass of sorted ones reaches its share of all of theirs."""
    if top_p == 1.0:
        return float(best[-1])
    cumulative = exponentials(best).cumsum(dtype=np.float64)
    return float(best[min(int(cumulative.searchsorted(top_p * cumulative[-1])), len(best) - 1)])


def _nucleus(scaled: FloatArray, *, top_p: float) -> NDArray[np.int64]:
    """Return the ids that top-p keeps of a whole row, ascending."""
    weights = exponentials(scaled)
    # numpy adds pairwise: a float32 is as good as its weights.
    wanted = top_p * float(weights.sum())
    near = _few(scaled >= -NEAR, weights, wanted)
    if near is None:
        near = _few(scaled >= -FARTHER, weights, wanted)
    if near is None:
        return (scaled >= -_reaching(-scaled, weights, wanted)).nonzero()[0]
    values = scaled[near]
    return near[values >= -_reaching(-values, weights[near], wanted)]


def _few(near: NDArray[np.bool_], weights: FloatArray, wanted: float) -> NDArray[np.int64] | None:
    """Return where a row is near, if that is a small part of it and has the weight that is wanted."""
    if np.count_nonzero(near) * SMALL > near.size:
        return None
    places = near.nonzero()[0]
    return places if weights[places].sum(dtype=np.float64) >= wanted else None


def _typical(scaled: FloatArray, *, share: float) -> NDArray[np.bool_]:
    """Return whether each is among those nearest to the entropy that reach the share."""
    weights = exponentials(scaled)
    total = float(weights.sum(dtype=np.float64))
    # How far the log of a share is from its mean, the entropy, is how far its logit is from the logits' mean.
    mean = weighted_mean(scaled, weights)
    near = _few((scaled >= mean - NEAR) & (scaled <= mean + NEAR), weights, share * total)
    if near is None:
        distance = np.abs(scaled - np.float64(mean))
        kept: NDArray[np.bool_] = distance <= _reaching(distance, weights, share * total)
        return kept
    distance = np.abs(scaled[near] - np.float64(mean))
    keep = np.zeros(scaled.size, dtype=np.bool_)
    keep[near[distance <= _reaching(distance, weights[near], share * total)]] = True
    return keep


def _reaching(keys: NDArray[Any], weights: FloatArray, wanted: float) -> float:
    """Return the smallest key that, with all smaller ones, has the weight that is wanted.

    Args:
        keys: 0 or more.
        weights: of each.
        wanted: at most all of it, but for the rounding of a sum in another order.
    """
    before = 0.0
    if keys.size > FEW:
        bins, masses = _histogram(keys, weights)
        sums = np.cumsum(masses)
        reaching = min(int(sums.searchsorted(wanted)), int(bins.max()))
        before = float(sums[reaching - 1]) if reaching else 0.0
        keys, weights = keys[bins == reaching], weights[bins == reaching]
    order = np.argsort(keys)
    cumulative = before + weights[order].cumsum(dtype=np.float64)
    return float(keys[order[min(int(cumulative.searchsorted(wanted)), order.size - 1)]])


def _histogram(keys: NDArray[Any], weights: FloatArray) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Return the bin of each key, and the weight of each bin."""
    bins = np.empty(keys.size, dtype=np.int16)
    masses = np.zeros(NUM_BINS)
    for first in range(0, keys.size, PART):
        part = slice(first, first + PART)
        bins[part] = np.minimum(keys[part], (NUM_BINS - 1) / BINS_PER_UNIT) * BINS_PER_UNIT
        masses += np.bincount(bins[part], weights=weights[part], minlength=NUM_BINS)
    return bins, masses


def _probable(scaled: FloatArray, *, cutoff: float, by_entropy: bool = False) -> NDArray[np.bool_]:
    """Return whether each has the least probability, or is the best. A high entropy may lower the cutoff."""
    weights = exponentials(scaled)
    total = float(weights.sum(dtype=np.float64))
    if by_entropy:
        entropy = math.log(total) - weighted_mean(scaled, weights)
        cutoff = min(cutoff, math.sqrt(cutoff) * math.exp(-entropy))
    keep: NDArray[np.bool_] = scaled >= min(math.log(cutoff * total), float(scaled.max()))
    return keep


def weighted_mean(scaled: FloatArray, weights: FloatArray) -> float:
    """Return the mean of a row's values, each as often as its weight, which is its exponential.

    What is so low that it weighs next to nothing counts for nothing: -1e38 would weigh more than all others.
    """
    weighted = weights * np.maximum(scaled, LOWEST_EXPONENT)
    return float(weighted.sum(dtype=np.float64) / weights.sum(dtype=np.float64))


def exponentials(scaled: FloatArray) -> FloatArray:
    """Return e to the power of each; 0 for -inf."""
    weights: FloatArray
    # Of few, what underflows costs nothing.
    if scaled.size <= FEW or (lowest := scaled.min()) >= LOWEST_EXPONENT:
        weights = np.exp(scaled)
        return weights
    weights = np.exp(np.maximum(scaled, LOWEST_EXPONENT))
    if lowest == -np.inf:
        weights[scaled == -np.inf] = 0.0
    return weights
