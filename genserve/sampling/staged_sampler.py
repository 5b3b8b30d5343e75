"""Staged sampler: single rows with a custom order of stages, or with a rarely used stage; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray
from genserve.kernels.logits import SAMPLING_RULE, sample_logits, scan_logits
from genserve.sampling.param_table import STAGES, acting
from genserve.sampling.sampling_params import SamplingParams

__all__ = [
    "COLDEST",
    "LOWEST_EXPONENT",
    "NUM_BEST",
    "Stages",
    "Truncation",
    "best_ids",
    "best_values",
    "dynamic_temperature",
    "exponentials",
    "kept",
    "left_by",
    "stages_of",
    "weighted_mean",
    "zipf_count",
    "zipf_steps",
]


NEAR = 8.0              # from the mean: nearly always, what typical keeps is not further away
SMALL = 4               # part of a row, one by so many: worth to be taken out
FEW = 1024              # values that are sorted rather than counted into bins
BINS_PER_UNIT = 32      # of a row's logits by their distance from the mean
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

    @property
    def by_level(self) -> bool:
        """Whether all that it keeps is above a level that `sample_logits` finds."""
        others = (self.top_n_sigma, self.typical_p, self.epsilon_cutoff, self.eta_cutoff)
        return others == (0.0, 1.0, 0.0, 0.0)

    def sampling_rule(self, *, temperature: float = 1.0, uniform: float = 0.0) -> tuple[float, ...]:
        """Return the fields of a SAMPLING_RULE with its top-k, top-p and min-p."""
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        return uniform, self.top_p, self.top_k, temperature, log_min_p

    @staticmethod
    def of(params: SamplingParams) -> Truncation:
        """Return what a request asks for."""
        return Truncation(**{rule.name: getattr(params, rule.name) for rule in fields(Truncation)})


def kept(scaled: FloatArray, rules: Truncation) -> NDArray[np.int64]:
    """Return the ids that a row keeps, ascending.

    Args:
        scaled: [V] float32, logits less the best one, divided by the temperature; not modified.
        rules: of the row.

    Source: top-n-sigma is Tang et al., "Top-nσ: Not All Logits Are You Need" (2024), over the finite logits;
    top-p is Holtzman et al. (2020), min-p Nguyen et al. (2024), typical Meister et al. (2022), epsilon and
    eta Hewitt et al. (2022), all as transformers has them.
    """
    level = _LOWEST
    if rules.top_n_sigma:
        finite = scaled if scaled.min() >= _LOWEST else scaled[scaled >= _LOWEST]
        level = -rules.top_n_sigma * float(finite.std(dtype=np.float64))
        scaled = np.where(scaled >= level, scaled, np.float32(-np.inf))
    if rules.top_k or rules.top_p < 1.0 or rules.min_p:
        sampled = sample_logits(scaled[None], np.array([rules.sampling_rule()], SAMPLING_RULE))
        level = max(level, float(sampled["level"][0]))
    ids = (scaled >= level).nonzero()[0]
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
    """Return the `count` highest values of a row [V] above -inf, or all, sorted downwards."""
    return row[best_ids(row, count)]


def best_ids(row: FloatArray, count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` highest values of a row [V], the best first, of equals the lowest id.

    Of fewer, where the rest is -inf.
    """
    ids: NDArray[np.int64] = scan_logits(row[None], top_k=min(count, row.size)).top_ids[0]
    return ids if ids[-1] >= 0 else ids[ids >= 0]


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


# At this temperature and below a draw is greedy: no two float32 logits are nearer than this divides.
COLDEST = 1e-6
NUM_BEST = 100  # tokens that top-h chooses from, and from which mirostat 1 tells how a row falls off


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of one token sequence's next draw."""

    order: tuple[str, ...]              # the ones that act: names of STAGES, "mirostat"
    params: SamplingParams
    spared_ids: tuple[int, ...] = ()    # where one of these would be taken away, XTC takes none
    most_bits: float = 0.0              # mirostat's mu: what surprises more is cut off

    @property
    def learns(self) -> bool:
        """Whether the next draw depends on how surprising this one is."""
        return bool(self.params.mirostat_mode)

    def after(self, surprise_bits: float) -> Stages:
        """Return what the next draw goes through, after one of a token with that surprise."""
        error = surprise_bits - self.params.mirostat_tau
        return replace(self, most_bits=self.most_bits - self.params.mirostat_eta * error)

    def truncation(self, name: str) -> Truncation:
        """Return that stage, one of `Truncation`'s, alone."""
        return Truncation(**{name: getattr(self.params, name)})


def stages_of(params: SamplingParams, *, spared_ids: tuple[int, ...]) -> Stages | None:
    """Return the stages before the first draw; None for temperature and truncation in their default order.

    Args:
        params: of the request.
        spared_ids: of the tokens without which an answer or a line does not end.
    """
    if params.mirostat_mode:
        order = (*_acting_stages(params, ("temperature",)), "mirostat")
        return Stages(order=order, params=params, most_bits=2 * params.mirostat_tau)
    rare = params.top_h or params.xtc_probability or params.dynatemp_range
    if not rare and not params.samplers:
        return None
    usual = _acting_stages(params, tuple(STAGES))
    order = _acting_stages(params, params.samplers or tuple(STAGES))
    return Stages(order=order, params=params, spared_ids=spared_ids) if rare or order != usual else None


def left_by(row: FloatArray, stages: Stages, *, chance: float) -> tuple[NDArray[np.int64], FloatArray]:
    """Return the ids that the stages leave, ascending, and what a token is drawn from.

    Args:
        row: [V] float32 with a finite maximum; not modified.
        stages: it goes through these.
        chance: a number in [0, 1) that decides whether XTC acts.

    Returns:
        [K] int64, and [K] float32 whose maximum is 0.

    Source: XTC is p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335; dynamic temperature
    kalomaze, as llama.cpp has it; top-h Potraghloo et al. (NeurIPS 2025), as transformers has it; mirostat
    Basu et al. (ICLR 2021), and its second version as llama.cpp has it.
    """
    ids, values = _finite(np.arange(row.size), row - row.max())
    for name in stages.order:
        if name == "temperature":
            ids, values = _finite(ids, _tempered(values, stages.params))
        else:
            keep = _keep(name, ids, values, stages, chance=chance, vocab_size=row.size)
            ids, values = ids[keep], values[keep]
            values = values - values.max()
    return ids, values


def dynamic_temperature(params: SamplingParams, entropy_share: Any) -> Any:
    """Return the temperature of a row whose entropy is that share of the largest there could be.

    Args:
        params: of the request.
        entropy_share: a number, or an array or tensor of such.
    """
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    return low + (high - low) * entropy_share**params.dynatemp_exponent


def zipf_steps(num_tokens: int) -> NDArray[np.float64]:
    """Return how much less likely, in logarithms, each token is than the one before, were the exponent 1."""
    ranks = np.arange(1, num_tokens)
    return np.log((ranks + 1) / ranks)


def zipf_count(exponent: Any, *, bits: float, vocab_size: int) -> Any:
    """Return how many tokens of a Zipf distribution surprise by no more than so many bits.

    Args:
        exponent: of the distribution: a number of numpy, or a tensor.
        bits: at the most.
        vocab_size: tokens that there are.

    Returns:
        Of the kind of the exponent, and not rounded; NaN where the formula has no value.
    """
    excess = exponent - 1
    return (excess * 2.0 ** min(bits, 1000.0) / (1 - vocab_size**-excess)) ** (1 / exponent)


def _acting_stages(params: SamplingParams, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if any(acting(params, [name])))


def _finite(ids: NDArray[np.int64], values: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
    if values.min() > -np.inf:
        return ids, values
    keep = values > -np.inf
    return ids[keep], values[keep]


def _tempered(values: FloatArray, params: SamplingParams) -> FloatArray:
    temperature = params.temperature
    if params.dynatemp_range and values.size > 1:
        weights = exponentials(values)
        entropy = math.log(weights.sum(dtype=np.float64)) - weighted_mean(values, weights)
        temperature = dynamic_temperature(params, max(entropy, 0.0) / math.log(values.size))
    with np.errstate(over="ignore"):  # all but the best go to -inf, as they should
        tempered: FloatArray = values / np.float32(max(temperature, COLDEST))
    return tempered


def _keep(
    name: str,
    ids: NDArray[np.int64],
    values: FloatArray,
    stages: Stages,
    *,
    chance: float,
    vocab_size: int,
) -> Any:
    """Return an index of those values, of which the best is 0, that the stage keeps."""
    match name:
        case "xtc":
            acts = chance < stages.params.xtc_probability
            return _without_likely(ids, values, stages) if acts else slice(None)
        case "top_h":
            return values >= _top_h_level(values, stages.params.top_h)
        case "mirostat":
            return values >= _mirostat_level(values, stages, vocab_size=vocab_size)
        case _:
            return kept(values, stages.truncation(name))


def _without_likely(ids: NDArray[np.int64], values: FloatArray, stages: Stages) -> NDArray[np.bool_]:
    """Keep the least of the likely ones, and what is no more likely than it."""
    threshold = stages.params.xtc_threshold * float(exponentials(values).sum(dtype=np.float64))
    likely = values[values >= math.log(threshold)] if threshold else values
    level = likely.min() if likely.size else np.inf
    keep: NDArray[np.bool_] = values <= level
    return keep if not np.isin(ids[~keep], stages.spared_ids).any() else np.ones_like(keep)


def _top_h_level(values: FloatArray, share: float) -> float:
    best = best_values(values, NUM_BEST).astype(np.float64)
    log_shares = best - math.log(np.exp(best).sum())
    entropy = np.cumsum(-np.exp(log_shares) * log_shares)
    count = int((entropy <= share * entropy[-1]).sum())
    return float(best[max(count, 1) - 1])


def _mirostat_level(values: FloatArray, stages: Stages, *, vocab_size: int) -> float:
    if stages.params.mirostat_mode == 2:
        total = float(exponentials(values).sum(dtype=np.float64))
        return min(0.0, math.log(total) - stages.most_bits * math.log(2))
    best = best_values(values, NUM_BEST)
    if best.size < 2:
        return 0.0
    steps = zipf_steps(best.size)
    exponent = np.float64((steps * -np.diff(best.astype(np.float64))).sum() / (steps**2).sum())
    with np.errstate(all="ignore"):
        count = zipf_count(exponent, bits=stages.most_bits, vocab_size=vocab_size)
    return float(best_values(values, 1 if np.isnan(count) else int(np.clip(count, 1, vocab_size)))[-1])
