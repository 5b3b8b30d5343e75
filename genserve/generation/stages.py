"""Stages: what a row goes through whose draw is made otherwise than by temperature and truncation; pure.

That is a row with an order of its own, or with a stage that few ask for. It is taken by itself, stage after
stage; all the other rows know nothing of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray
from genserve.generation.truncation import Truncation, best_values, exponentials, kept, weighted_mean
from genserve.sampling.params import SamplingParams
from genserve.sampling.stages import STAGES, acting

__all__ = [
    "COLDEST",
    "NUM_BEST",
    "Stages",
    "dynamic_temperature",
    "left_by",
    "stages_of",
    "zipf_count",
    "zipf_steps",
]

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
