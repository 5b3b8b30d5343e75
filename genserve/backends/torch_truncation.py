"""Torch truncation: which tokens of rows a draw is made from, where the logits lie; pure.

The twin of `generation.truncation`, of many rows at once: what they do not keep goes to -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genserve.generation.truncation import LOWEST_EXPONENT

__all__ = [
    "entropies",
    "eta_level",
    "exponentials",
    "keep_above",
    "keep_probable",
    "keep_typical",
    "kept_level",
    "sigma_level",
    "truncated",
]


def truncated(scaled: torch.Tensor, rules: Sequence[torch.Tensor], *, used: Sequence[bool]) -> torch.Tensor:
    """Send what the rows do not keep to -inf; a rule that no row uses costs nothing.

    Args:
        scaled: [R, V] float32, logits less the best one, divided by the temperature.
        rules: the fields of `Truncation`, in their order: [R, 1] float64.
        used: which of them some row uses.
    """
    sigma, top_k, top_p, min_p, typical_p, epsilon, eta = rules
    by_sigma, by_k, by_p, by_min_p, by_typical, by_epsilon, by_eta = used
    if by_sigma:
        scaled = keep_above(scaled, sigma_level(scaled, sigma))
    if by_k or by_p:
        num_tokens = scaled.shape[1]
        count = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens)
        scaled = keep_above(scaled, kept_level(scaled, top_p=top_p, last=count.long() - 1))
    if by_min_p:
        scaled = keep_above(scaled, min_p.log())
    if by_typical:
        scaled = keep_typical(scaled, typical_p)
    if by_epsilon:
        scaled = keep_probable(scaled, epsilon)
    if by_eta:
        scaled = keep_probable(scaled, eta_level(scaled, eta))
    return scaled


def keep_above(scaled: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Keep what reaches the level of its row: [R, V] and [R, 1] -> [R, V]."""
    return torch.where(scaled >= level, scaled, -torch.inf)


def sigma_level(scaled: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the level that top-n-sigma keeps, of rows whose best is 0: [R, V] and [R, 1] -> [R, 1]."""
    finite = scaled > -torch.inf
    count = finite.sum(dim=1, keepdim=True)
    values = torch.where(finite, scaled, 0.0).double()
    mean = values.sum(dim=1, keepdim=True) / count
    squares = torch.where(finite, values - mean, 0.0).square().sum(dim=1, keepdim=True)
    return torch.where(sigma > 0, -sigma * (squares / count).sqrt(), -torch.inf)


def keep_typical(scaled: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Keep those nearest to the entropy that reach the share: [R, V] and [R, 1] -> [R, V]."""
    log_shares = scaled.double().log_softmax(dim=1)
    distance = (log_shares + entropies(log_shares)).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    reached = torch.searchsorted(log_shares.exp().gather(1, order).cumsum(1), share)
    level = ordered.gather(1, reached.clamp(max=scaled.shape[1] - 1))
    return torch.where((distance <= level) | (share >= 1.0), scaled, -torch.inf)


def keep_probable(scaled: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Keep what has the least probability, and the best: [R, V] and [R, 1] -> [R, V]."""
    shares = scaled.double().softmax(dim=1)
    keep = (shares >= least) | (scaled == scaled.amax(dim=1, keepdim=True))
    return torch.where(keep, scaled, -torch.inf)


def eta_level(scaled: torch.Tensor, eta: torch.Tensor) -> torch.Tensor:
    """Return the least probability that the eta cutoff asks for: [R, V] and [R, 1] -> [R, 1]."""
    return torch.minimum(eta, eta.sqrt() * (-entropies(scaled.double().log_softmax(dim=1))).exp())


def entropies(log_shares: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row, in nats: [R, V] float64 -> [R, 1] float64."""
    parts = torch.where(log_shares > -torch.inf, log_shares.exp() * log_shares, 0.0)
    return -parts.sum(dim=1, keepdim=True)


def kept_level(scaled: torch.Tensor, *, top_p: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the smallest value that each row keeps: [R, 1]. `last` is the rank of the last by top-k."""
    ordered = scaled.sort(dim=1, descending=True).values
    cumulative = exponentials(ordered).cumsum(1, dtype=torch.float64)
    reached = torch.searchsorted(cumulative, top_p * cumulative.gather(1, last))
    rank = torch.where(top_p < 1.0, torch.minimum(reached, last), last)
    return ordered.gather(1, rank)


def exponentials(scaled: torch.Tensor) -> torch.Tensor:
    """Return e to the power of each, and next to nothing for -inf."""
    return scaled.clamp(min=LOWEST_EXPONENT).exp()
