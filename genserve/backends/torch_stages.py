"""Torch stages: what a row goes through whose draw is made otherwise, where the logits lie; pure.

The twin of `generation.stages`. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch

from genserve.backends.torch_truncation import entropies, keep_above, truncated
from genserve.generation.stages import COLDEST, NUM_BEST, Stages, dynamic_temperature, zipf_count, zipf_steps
from genserve.sampling.params import SamplingParams

__all__ = ["left_by"]


def left_by(row: torch.Tensor, stages: Stages, *, chance: float) -> torch.Tensor:
    """Return what a token is drawn from. See `generation.stages.left_by`.

    Args:
        row: [1, V] float32; not modified.
        stages: it goes through these.
        chance: a number in [0, 1) that decides whether XTC acts.

    Returns:
        [1, V] float32 whose maximum is 0; -inf is what is not left.
    """
    left = _from_best(row)
    for name in stages.order:
        if name == "temperature":
            left = left / _temperature(left, stages.params).clamp(min=COLDEST).float()
        else:
            left = _kept(name, left, stages, chance=chance)
        left = _from_best(left)
    return left


def _from_best(row: torch.Tensor) -> torch.Tensor:
    return row - row.amax(dim=1, keepdim=True)


def _temperature(left: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if not params.dynatemp_range:
        return _of(params.temperature, left)
    count = (left > -torch.inf).sum(dim=1, keepdim=True)
    entropy = entropies(left.double().log_softmax(dim=1))
    # Of a single token the entropy is 0, and so is the largest.
    temperature: torch.Tensor = dynamic_temperature(params, entropy / count.clamp(min=2).log())
    return temperature


def _kept(name: str, left: torch.Tensor, stages: Stages, *, chance: float) -> torch.Tensor:
    """Return what the stage keeps of a row whose best is 0."""
    params = stages.params
    match name:
        case "top_h":
            return keep_above(left, _top_h_level(left, params.top_h))
        case "xtc":
            return _without_likely(left, stages) if chance < params.xtc_probability else left
        case "mirostat":
            return keep_above(left, _mirostat_level(left, stages))
        case _:
            return truncated(left, {name: _of(getattr(params, name), left)})


def _of(value: float, row: torch.Tensor) -> torch.Tensor:
    return torch.full((1, 1), value, dtype=torch.float64, device=row.device)


def _without_likely(left: torch.Tensor, stages: Stages) -> torch.Tensor:
    likely = (left.double().softmax(dim=1) >= stages.params.xtc_threshold) & (left > -torch.inf)
    keep = left <= torch.where(likely, left, torch.inf).amin(dim=1, keepdim=True)
    if stages.spared_ids:
        keep = keep | ~keep[:, list(stages.spared_ids)].all(dim=1, keepdim=True)
    return torch.where(keep, left, -torch.inf)


def _top_h_level(left: torch.Tensor, share: float) -> torch.Tensor:
    best = _best(left)
    log_shares = best.double().log_softmax(dim=1)
    parts = torch.where(log_shares > -torch.inf, -log_shares.exp() * log_shares, 0.0)
    entropy = parts.cumsum(1)
    count = (entropy <= share * entropy[:, -1:]).sum(dim=1, keepdim=True)
    return best.gather(1, count.clamp(min=1) - 1)


def _mirostat_level(left: torch.Tensor, stages: Stages) -> torch.Tensor:
    if stages.params.mirostat_mode == 2:
        best_share = left.double().log_softmax(dim=1).amax(dim=1, keepdim=True)
        return (-stages.most_bits * math.log(2) - best_share).clamp(max=0.0)
    best = _best(left).double()
    steps = torch.from_numpy(zipf_steps(best.shape[1])).to(left.device, non_blocking=True)[None]
    steps = torch.where(best[:, 1:] > -torch.inf, steps, 0.0)
    falls = torch.where(steps > 0, best[:, :-1] - best[:, 1:], 0.0)
    exponent = (steps * falls).sum(dim=1, keepdim=True) / steps.square().sum(dim=1, keepdim=True)
    count = zipf_count(exponent, bits=stages.most_bits, vocab_size=left.shape[1])
    rank = count.nan_to_num(nan=1.0, posinf=left.shape[1]).clamp(1, left.shape[1]).long() - 1
    return left.sort(dim=1, descending=True).values.gather(1, rank)


def _best(left: torch.Tensor) -> torch.Tensor:
    return left.topk(min(NUM_BEST, left.shape[1]), dim=1).values
