"""Truncation: which tokens of a row a draw is made from; pure.

Nearly always these are the ones above some level of the row's logits. Top-k finds it among the tokens that
block maxima leave, top-p in the one bin of a histogram where the mass reaches p; no row is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray

__all__ = ["BLOCK", "LOWEST_EXPONENT", "Truncation", "exponentials", "kept"]

BLOCK = 64              # tokens, whose maxima or sums are looked at first
NEAR = 8.0              # from the best logit: nearly always, what top-p keeps is not further away
BINS_PER_UNIT = 32      # of a row's logits by their distance from the best
NUM_BINS = 2560
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
        level = -rules.top_n_sigma * float(scaled[scaled >= _LOWEST].std(dtype=np.float64))
        scaled = np.where(scaled >= level, scaled, np.float32(-np.inf))
    if rules.top_k:
        level = max(level, _kept_level(_best(scaled, rules.top_k), top_p=rules.top_p))
    elif rules.top_p < 1.0:
        level = max(level, _nucleus_level(scaled, top_p=rules.top_p))
    if rules.min_p:
        level = max(level, math.log(rules.min_p))
    ids = np.flatnonzero(scaled >= level)
    if rules.typical_p < 1.0:
        ids = ids[_typical(scaled[ids], share=rules.typical_p)]
    if rules.epsilon_cutoff:
        ids = ids[_probable(scaled[ids], lambda _: rules.epsilon_cutoff)]
    if rules.eta_cutoff:
        ids = ids[_probable(scaled[ids], lambda entropy: _eta(rules.eta_cutoff, entropy))]
    return ids


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
    cumulative = before + np.cumsum(exponentials(best), dtype=np.float64)
    wanted = top_p * (cumulative[-1] if total is None else total)
    count = int(np.searchsorted(cumulative, wanted, side="left")) if top_p < 1.0 else len(best)
    return float(best[min(count, len(best) - 1)])


def _nucleus_level(scaled: FloatArray, *, top_p: float) -> float:
    """Return the smallest value that top-p keeps of a whole row."""
    total = float(exponentials(scaled).sum())
    near = scaled[scaled >= -NEAR]
    if exponentials(near).sum() < top_p * total:
        near = scaled
    bins = np.minimum(near * -BINS_PER_UNIT, NUM_BINS - 1).astype(np.int64)  # the highest values first
    cumulative = np.cumsum(np.bincount(bins, weights=exponentials(near), minlength=NUM_BINS))
    # The total was rounded in another order: a share near 1 may lie behind the last.
    reaching = min(int(np.searchsorted(cumulative, top_p * total, side="left")), int(bins.max()))
    return _kept_level(
        np.sort(near[bins == reaching])[::-1],
        top_p=top_p,
        before=float(cumulative[reaching - 1]) if reaching else 0.0,
        total=total,
    )


def _typical(scaled: FloatArray, *, share: float) -> NDArray[np.bool_]:
    """Return whether each is among those nearest to the entropy that reach the share."""
    log_shares = _log_shares(scaled)
    shares = np.exp(log_shares)
    distance = np.abs(log_shares - (shares * log_shares).sum())
    order = np.argsort(distance, kind="stable")
    reached = int(np.searchsorted(np.cumsum(shares[order]), share, side="left"))
    keep: NDArray[np.bool_] = distance <= distance[order[min(reached, len(order) - 1)]]
    return keep


def _probable(scaled: FloatArray, least: Callable[[float], float]) -> NDArray[np.bool_]:
    """Return whether each has the least probability, which may depend on the entropy, or is the best."""
    log_shares = _log_shares(scaled)
    shares = np.exp(log_shares)
    keep: NDArray[np.bool_] = shares >= least(-float((shares * log_shares).sum()))
    keep |= scaled == scaled.max()
    return keep


def _eta(cutoff: float, entropy: float) -> float:
    return min(cutoff, math.sqrt(cutoff) * math.exp(-entropy))


def _log_shares(scaled: FloatArray) -> NDArray[np.float64]:
    values = scaled.astype(np.float64)
    shifted: NDArray[np.float64] = values - values.max()
    return shifted - math.log(np.exp(shifted).sum())


def exponentials(scaled: FloatArray) -> FloatArray:
    """Return e to the power of each; 0 for -inf."""
    lowest = scaled.min()
    weights: FloatArray
    if lowest >= LOWEST_EXPONENT:
        weights = np.exp(scaled)
        return weights
    weights = np.exp(np.maximum(scaled, LOWEST_EXPONENT))
    if lowest == -np.inf:
        weights[scaled == -np.inf] = 0.0
    return weights
