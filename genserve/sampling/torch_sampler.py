"""Torch sampler: rows of logits to token ids in one pass on the device of the logits; pure.

It applies the rules of `sampling.sampler` in the same order: a request's text does not depend on which of the
two samples it, except for draws that fall on a border between two tokens to the last digits of a float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genserve.completion import TokenLogprob
from genserve.sampling.logits_edits import LogitsEdits, apply_edits
from genserve.sampling.sampler import LOWEST, Asked, SamplerOutput, SamplingMetadata, uniforms
from genserve.sampling.sampling_params import SamplingParams
from genserve.sampling.staged_sampler import (
    COLDEST,
    LOWEST_EXPONENT,
    NUM_BEST,
    Stages,
    Truncation,
    dynamic_temperature,
    zipf_count,
    zipf_steps,
)

__all__ = ["entropies", "exponentials", "keep_above", "left_by", "sample_rows", "truncated"]


def truncated(scaled: torch.Tensor, rules: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Send what the rows do not keep to -inf.

    Args:
        scaled: [R, V] float32, logits less the best one, divided by the temperature.
        rules: those that some row uses, by the field of `Truncation`: [R, 1] float64.
    """
    if (sigma := rules.get("top_n_sigma")) is not None:
        scaled = keep_above(scaled, _sigma_level(scaled, sigma))
    top_k, top_p = rules.get("top_k"), rules.get("top_p")
    if top_k is not None or top_p is not None:
        scaled = keep_above(scaled, _kept_level(scaled, top_k=top_k, top_p=top_p))
    if (share := rules.get("min_p")) is not None:
        scaled = keep_above(scaled, share.log())
    if (mass := rules.get("typical_p")) is not None:
        scaled = _keep_typical(scaled, mass)
    if (epsilon := rules.get("epsilon_cutoff")) is not None:
        scaled = _keep_probable(scaled, epsilon)
    if (eta := rules.get("eta_cutoff")) is not None:
        scaled = _keep_probable(scaled, _eta_level(scaled, eta))
    return scaled


def keep_above(scaled: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Keep what reaches the level of its row: [R, V] and [R, 1] -> [R, V]."""
    return torch.where(scaled >= level, scaled, -torch.inf)


def _sigma_level(scaled: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the level that top-n-sigma keeps, of rows whose best is 0: [R, V] and [R, 1] -> [R, 1]."""
    finite = scaled > -torch.inf
    count = finite.sum(dim=1, keepdim=True)
    values = torch.where(finite, scaled, 0.0).double()
    mean = values.sum(dim=1, keepdim=True) / count
    squares = torch.where(finite, values - mean, 0.0).square().sum(dim=1, keepdim=True)
    return torch.where(sigma > 0, -sigma * (squares / count).sqrt(), -torch.inf)


def _keep_typical(scaled: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Keep those nearest to the entropy that reach the share: [R, V] and [R, 1] -> [R, V]."""
    log_shares = scaled.double().log_softmax(dim=1)
    distance = (log_shares + entropies(log_shares)).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    reached = torch.searchsorted(log_shares.exp().gather(1, order).cumsum(1), share)
    level = ordered.gather(1, reached.clamp(max=scaled.shape[1] - 1))
    return torch.where((distance <= level) | (share >= 1.0), scaled, -torch.inf)


def _keep_probable(scaled: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Keep what has the least probability, and the best: [R, V] and [R, 1] -> [R, V]."""
    shares = scaled.double().softmax(dim=1)
    keep = (shares >= least) | (scaled == scaled.amax(dim=1, keepdim=True))
    return torch.where(keep, scaled, -torch.inf)


def _eta_level(scaled: torch.Tensor, eta: torch.Tensor) -> torch.Tensor:
    """Return the least probability that the eta cutoff asks for: [R, V] and [R, 1] -> [R, 1]."""
    return torch.minimum(eta, eta.sqrt() * (-entropies(scaled.double().log_softmax(dim=1))).exp())


def entropies(log_shares: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row, in nats: [R, V] float64 -> [R, 1] float64."""
    parts = torch.where(log_shares > -torch.inf, log_shares.exp() * log_shares, 0.0)
    return -parts.sum(dim=1, keepdim=True)


def _kept_level(
    scaled: torch.Tensor, *, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Return the smallest value that each row keeps: [R, 1]."""
    num_rows, num_tokens = scaled.shape
    ordered = scaled.sort(dim=1, descending=True).values
    if top_k is None:
        rank = torch.full((num_rows, 1), num_tokens - 1, device=scaled.device)
    else:
        rank = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens).long() - 1
    if top_p is not None:
        cumulative = exponentials(ordered).cumsum(1, dtype=torch.float64)
        reached = torch.searchsorted(cumulative, top_p * cumulative.gather(1, rank))
        rank = torch.where(top_p < 1.0, torch.minimum(reached, rank), rank)
    return ordered.gather(1, rank)


def exponentials(scaled: torch.Tensor) -> torch.Tensor:
    """Return e to the power of each, and next to nothing for -inf."""
    return scaled.clamp(min=LOWEST_EXPONENT).exp()


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


_NAMES = [rule.name for rule in fields(Truncation)]
_RULES = attrgetter(*_NAMES)
# Of a row that does not draw: whether it does, its temperature, the number that it draws by, what it keeps.
_NEUTRAL = np.array([0.0, 1.0, 0.0, *_RULES(Truncation())])


def sample_rows(
    logits: torch.Tensor,
    *,
    drawing: Sequence[int],
    rules: SamplingMetadata,
    asking: Sequence[Asked],
    edits: LogitsEdits | None = None,
) -> SamplerOutput:
    """Pick one token per row: the best one, or a draw. See `generation.sampler.sample_rows`.

    Only ids, flags and log-probabilities come back from the device, in one copy; nothing else waits for it.

    Args:
        logits: [R, V] float32, on any device; `edits` are written into it, nothing else is.
        drawing: the rows that draw, ascending.
        rules: their parameters.
        asking: which log-probabilities are wanted.
        edits: what is to be changed of the logits first.
    """
    rows = [asked.row for asked in asking]
    raw = logits[rows] if rows else logits  # a copy
    if edits is not None:
        _apply(logits, edits)
    token_ids = logits.argmax(dim=1)  # ties go to the lowest id, and NaN is above all numbers
    best = logits.gather(1, token_ids[:, None])
    scaled = logits - best
    if drawing:
        token_ids, scaled = _draw(scaled, token_ids, drawing=drawing, rules=rules)
    # A float64 holds any token id.
    picked = [token_ids.double(), best[:, 0].isfinite().double()]
    if asking:
        after = torch.tensor([[asked.processed] for asked in asking], device=logits.device)
        picked += _levels(torch.where(after, scaled[rows], raw), token_ids[rows], asking)
    sizes = [part.numel() for part in picked]
    token_row, finite_row, *levels = np.split(torch.cat(picked).cpu().numpy(), np.cumsum(sizes)[:-1])
    return SamplerOutput(
        token_ids=token_row.astype(np.int64),
        finite=finite_row.astype(np.bool_),
        logprobs=_logprobs(asking, *levels) if asking else (),
    )


def _apply(logits: torch.Tensor, edits: LogitsEdits) -> None:
    def place(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device, non_blocking=True)

    with torch.inference_mode():  # what a model made in this mode can be overwritten in it alone
        apply_edits(logits, edits, place=place)


def _draw(
    shifted: torch.Tensor, token_ids: torch.Tensor, *, drawing: Sequence[int], rules: SamplingMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw for those rows; the others keep their token. Returns also what was drawn from: [R, V]."""
    num_rows, num_tokens = shifted.shape
    columns = _columns(num_rows, drawing=drawing, rules=rules)
    uploaded = torch.from_numpy(columns).to(shifted.device, non_blocking=True)
    draws, temperature, uniform, *kept = uploaded[:, :, None].unbind()
    used = (columns != _NEUTRAL[:, None]).any(axis=1)[-len(kept) :]
    rules_used = dict(compress(zip(_NAMES, kept, strict=True), used))
    scaled = truncated(shifted / temperature.float(), rules_used)
    for index, stages in enumerate(rules.stages):
        if stages is not None:
            row = slice(drawing[index], drawing[index] + 1)
            scaled[row] = left_by(shifted[row], stages, chance=rules.chance(index))
    weights = torch.where(scaled == -torch.inf, 0.0, exponentials(scaled))
    cumulative = weights.cumsum(1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return torch.where(draws[:, 0] > 0, drawn[:, 0].clamp(max=num_tokens - 1), token_ids), scaled


def _columns(num_rows: int, *, drawing: Sequence[int], rules: SamplingMetadata) -> NDArray[np.float64]:
    """Return, for all rows, what `_draw` and `truncated` unpack; one that does not draw keeps all."""
    columns = np.repeat(_NEUTRAL[:, None], num_rows, axis=1)
    uniform = uniforms(rules.seed, rules.step)
    kept = np.array([_RULES(truncation) for truncation in rules.truncations])
    columns[:, list(drawing)] = np.stack([np.ones_like(uniform), rules.temperature, uniform, *kept.T])
    return columns


def _levels(
    rows: torch.Tensor, token_ids: torch.Tensor, asking: Sequence[Asked]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, flat, the level of each row's token, and ids and levels of the others that are asked for.

    There are as many others for each row as `_num_others`, whatever it asks for.
    """
    shifted = rows - rows.amax(dim=1, keepdim=True)
    total = exponentials(shifted).sum(dim=1, keepdim=True, dtype=torch.float64).log()
    others = torch.zeros((len(asking), _num_others(asking)), dtype=torch.int64)
    for index, asked in enumerate(asking):
        others[index, : len(asked.named)] = torch.tensor(asked.named, dtype=torch.int64)
    ids = others.to(rows.device)
    num_top = min(max(asked.num_top for asked in asking), rows.shape[1])
    if num_top:
        tops = torch.tensor([[asked.num_top > 0] for asked in asking], device=rows.device)
        ids[:, :num_top] = torch.where(tops, shifted.topk(num_top, dim=1).indices, ids[:, :num_top])
    own = shifted.gather(1, token_ids[:, None]) - total
    return own.flatten(), ids.flatten().double(), (shifted.gather(1, ids) - total).flatten()


def _num_others(asking: Sequence[Asked]) -> int:
    return max(max(asked.num_top, len(asked.named)) for asked in asking)


def _logprobs(
    asking: Sequence[Asked], own: NDArray[np.float64], ids: NDArray[np.float64], levels: NDArray[np.float64]
) -> tuple[TokenLogprob, ...]:
    """Return what `_levels` found, for each row what it asked for."""
    others = np.stack([ids, levels], axis=1).reshape(len(asking), -1, 2)
    found = []
    for index, asked in enumerate(asking):
        pairs = others[index, : asked.num_top or len(asked.named)].tolist()
        top = [(int(i), max(level, LOWEST)) for i, level in pairs if asked.named or level > -np.inf]
        top.sort(key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(logprob=max(float(own[index]), LOWEST), top=tuple(top)))
    return tuple(found)
