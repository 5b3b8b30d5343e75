"""Torch truncation: which tokens of rows a draw is made from, where the logits lie; pure.

The twin of `generation.truncation`, of many rows at once: what they do not keep goes to -inf.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from genserve.generation.truncation import LOWEST_EXPONENT

__all__ = ["entropies", "exponentials", "keep_above", "truncated"]


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
