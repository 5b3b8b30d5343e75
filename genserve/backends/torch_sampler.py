"""Torch sampler: rows of logits to token ids where the logits lie, in one pass on their device; pure.

The twin of `generation.sampler` for logits that are a torch tensor: the same rules in the same order, so that
a request's text does not depend on which of the two picked it, but for draws that fall on a border between
two tokens to the last digits of a float32. Where numpy avoids to sort, a GPU just sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genserve.generation.logit_edits import LogitEdits, apply_edits
from genserve.generation.sampler import PickedRows, SamplingRows, uniforms
from genserve.generation.truncation import LOWEST_EXPONENT

__all__ = ["pick_rows"]


def pick_rows(
    logits: torch.Tensor,
    *,
    drawing: Sequence[int],
    rules: SamplingRows,
    asking: Sequence[int],
    edits: LogitEdits | None = None,
) -> PickedRows:
    """Pick one token per row: the best one, or a draw. See `generation.sampler.pick_rows`.

    Only ids, flags and log-probabilities come back from the device, in one copy; nothing else waits for it.

    Args:
        logits: [R, V] float32, on any device; `edits` are written into it, nothing else is.
        drawing: the rows that draw, ascending.
        rules: their parameters.
        asking: the rows whose log-probability is wanted, ascending.
        edits: what is to be changed of the logits first; log-probabilities are those before it.
    """
    raw = logits
    if edits is not None:
        raw = logits.clone() if asking else logits
        _apply(logits, edits)
    token_ids = logits.argmax(dim=1)  # ties go to the lowest id, and NaN is above all numbers
    best = logits.gather(1, token_ids[:, None])
    if drawing:
        token_ids = _draw(logits - best, token_ids, drawing=drawing, rules=rules)
    picked = [token_ids.double(), best[:, 0].isfinite().double()]  # a float64 holds any token id
    if asking:
        picked.append(_log_probabilities(raw - raw.amax(dim=1, keepdim=True), token_ids))
    token_row, finite_row, *logprob_rows = torch.stack(picked).cpu().numpy()
    return PickedRows(
        token_ids=token_row.astype(np.int64),
        finite=finite_row.astype(np.bool_),
        logprobs=np.concatenate([row[list(asking)] for row in logprob_rows] or [[]]).astype(np.float32),
    )


def _apply(logits: torch.Tensor, edits: LogitEdits) -> None:
    def place(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device, non_blocking=True)

    with torch.inference_mode():  # what a model made in this mode can be overwritten in it alone
        apply_edits(logits, edits, place=place)


def _draw(
    shifted: torch.Tensor, token_ids: torch.Tensor, *, drawing: Sequence[int], rules: SamplingRows
) -> torch.Tensor:
    """Draw for those rows; the others keep their token."""
    num_rows, num_tokens = shifted.shape
    columns = _columns(num_rows, num_tokens, drawing=drawing, rules=rules)
    uploaded = torch.from_numpy(columns).to(shifted.device, non_blocking=True)
    draws, temperature, uniform, *kept = uploaded[:, :, None].unbind()
    scaled = _truncated(shifted / temperature.float(), kept, rules=rules)
    weights = torch.where(scaled == -torch.inf, 0.0, _exp(scaled))
    cumulative = weights.cumsum(1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return torch.where(draws[:, 0] > 0, drawn[:, 0].clamp(max=num_tokens - 1), token_ids)


def _truncated(scaled: torch.Tensor, kept: Sequence[torch.Tensor], *, rules: SamplingRows) -> torch.Tensor:
    """Send what the rows do not keep to -inf; a rule that no row uses costs nothing."""
    top_p, last, min_p, typical_p, epsilon, eta, sigma = kept
    if rules.top_n_sigma.any():
        scaled = _above(scaled, _sigma_level(scaled, sigma))
    if (rules.top_k > 0).any() or (rules.top_p < 1.0).any():
        scaled = _above(scaled, _kept_level(scaled, top_p=top_p, last=last.long()))
    if rules.min_p.any():
        scaled = _above(scaled, min_p.log())
    if (rules.typical_p < 1.0).any():
        scaled = _typical(scaled, typical_p)
    if rules.epsilon_cutoff.any():
        scaled = _probable(scaled, epsilon)
    if rules.eta_cutoff.any():
        scaled = _probable(scaled, torch.minimum(eta, eta.sqrt() * (-_entropy(scaled)).exp()))
    return scaled


def _above(scaled: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    return torch.where(scaled >= level, scaled, -torch.inf)


def _sigma_level(scaled: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    finite = scaled > -torch.inf
    count = finite.sum(dim=1, keepdim=True)
    values = torch.where(finite, scaled, 0.0).double()
    mean = values.sum(dim=1, keepdim=True) / count
    squares = torch.where(finite, values - mean, 0.0).square().sum(dim=1, keepdim=True)
    return torch.where(sigma > 0, -sigma * (squares / count).sqrt(), -torch.inf)


def _typical(scaled: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    log_shares = scaled.double().log_softmax(dim=1)
    distance = (log_shares + _entropy(scaled)).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    reached = torch.searchsorted(log_shares.exp().gather(1, order).cumsum(1), share)
    level = ordered.gather(1, reached.clamp(max=scaled.shape[1] - 1))
    return torch.where((distance <= level) | (share >= 1.0), scaled, -torch.inf)


def _probable(scaled: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    shares = scaled.double().softmax(dim=1)
    keep = (shares >= least) | (scaled == scaled.amax(dim=1, keepdim=True))
    return torch.where(keep, scaled, -torch.inf)


def _entropy(scaled: torch.Tensor) -> torch.Tensor:
    log_shares = scaled.double().log_softmax(dim=1)
    parts = torch.where(log_shares > -torch.inf, log_shares.exp() * log_shares, 0.0)
    return -parts.sum(dim=1, keepdim=True)


def _columns(
    num_rows: int, num_tokens: int, *, drawing: Sequence[int], rules: SamplingRows
) -> NDArray[np.float64]:
    """Return, for all rows, what `_draw` and `_truncated` unpack; one that does not draw keeps all."""
    neutral = [0.0, 1.0, 0.0, 1.0, num_tokens - 1, 0.0, 1.0, 0.0, 0.0, 0.0]
    columns = np.repeat(np.array(neutral)[:, None], num_rows, axis=1)
    top_k = np.where((rules.top_k > 0) & (rules.top_k < num_tokens), rules.top_k, num_tokens)
    uniform = uniforms(rules.seed, rules.step)
    ones = np.ones_like(uniform)
    kept = [rules.top_p, top_k - 1, rules.min_p, rules.typical_p, rules.epsilon_cutoff, rules.eta_cutoff]
    columns[:, list(drawing)] = np.stack([ones, rules.temperature, uniform, *kept, rules.top_n_sigma])
    return columns


def _kept_level(scaled: torch.Tensor, *, top_p: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the smallest value that each row keeps: [R, 1]. `last` is the rank of the last by top-k."""
    ordered = scaled.sort(dim=1, descending=True).values
    cumulative = _exp(ordered).cumsum(1, dtype=torch.float64)
    reached = torch.searchsorted(cumulative, top_p * cumulative.gather(1, last))
    rank = torch.where(top_p < 1.0, torch.minimum(reached, last), last)
    return ordered.gather(1, rank)


def _log_probabilities(shifted: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    total = _exp(shifted).sum(dim=1, dtype=torch.float64)
    return shifted.gather(1, token_ids[:, None])[:, 0] - total.log()


def _exp(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(min=LOWEST_EXPONENT).exp()
