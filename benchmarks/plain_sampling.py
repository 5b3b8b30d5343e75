"""Plain sampling: implements the sampling methods in plain torch, vectorized over rows, by sorting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genserve.sampling.sampling_params import SamplingParams

__all__ = ["plain_pick"]


def plain_pick(
    logits: torch.Tensor,
    params: SamplingParams,
    histories: Sequence[Sequence[int]],
    *,
    num_prompt_tokens: int,
) -> tuple[list[int], list[list[float]]]:
    """Sample one token per row, and return it with the requested log-probabilities, its own first.

    Args:
        logits: [R, V] float32; overwritten.
        params: the sampling parameters of all rows.
        histories: the tokens of each row, prompt and answer; all rows have the same length.
        num_prompt_tokens: the number of prompt tokens in each row.
    """
    raw = logits.log_softmax(dim=-1) if params.logprobs and params.logprobs_mode == "raw" else None
    logits = _penalised(logits, params, torch.tensor(histories), num_prompt_tokens=num_prompt_tokens)
    if params.no_repeat_ngram_size:
        _ban_ngrams(logits, histories, size=params.no_repeat_ngram_size)
    if params.temperature == 0:
        token_ids = logits.argmax(dim=-1)
    else:
        logits = _truncated(logits / params.temperature, params)
        token_ids = torch.multinomial(logits.softmax(dim=-1), 1)[:, 0]
    if not params.logprobs:
        return token_ids.tolist(), []
    levels = raw if raw is not None else logits.log_softmax(dim=-1)
    logprobs = [levels.gather(1, token_ids[:, None]), levels.topk(params.top_logprobs, dim=-1).values]
    return token_ids.tolist(), torch.cat(logprobs, dim=1).tolist()


def _penalised(
    logits: torch.Tensor, params: SamplingParams, tokens: torch.Tensor, *, num_prompt_tokens: int
) -> torch.Tensor:
    for token_id, bias in params.logit_bias.items():
        logits[:, token_id] += bias
    if params.repetition_penalty != 1:
        seen = logits.gather(1, tokens)
        penalty = params.repetition_penalty
        logits.scatter_(1, tokens, torch.where(seen < 0, seen * penalty, seen / penalty))
    if params.frequency_penalty or params.presence_penalty:
        answers = tokens[:, num_prompt_tokens:]
        counts = torch.zeros_like(logits).scatter_add_(1, answers, torch.ones(answers.shape))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return logits


def _ban_ngrams(logits: torch.Tensor, histories: Sequence[Sequence[int]], *, size: int) -> None:
    for row, history in enumerate(histories):
        begun = tuple(history[len(history) + 1 - size :])
        ngrams = zip(*(history[first:] for first in range(size)), strict=False)
        banned = [last for *before, last in ngrams if tuple(before) == begun]
        logits[row, banned] = -torch.inf


def _truncated(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.top_n_sigma:
        best, sigma = logits.amax(dim=-1, keepdim=True), logits.std(dim=-1, keepdim=True)
        logits = logits.masked_fill(logits < best - params.top_n_sigma * sigma, -torch.inf)
    if params.top_k:
        worst = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < worst, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        late = shares.cumsum(dim=-1) - shares > params.top_p
        logits = logits.masked_fill(late.scatter(1, order, late), -torch.inf)
    if params.min_p:
        shares = logits.softmax(dim=-1)
        least = params.min_p * shares.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(shares < least, -torch.inf)
    if params.typical_p < 1:
        logits = _typical(logits, params.typical_p)
    if params.epsilon_cutoff:
        logits = logits.masked_fill(logits.softmax(dim=-1) < params.epsilon_cutoff, -torch.inf)
    if params.eta_cutoff:
        entropy = _entropy(logits.log_softmax(dim=-1))
        eta = torch.tensor(params.eta_cutoff)
        least = torch.minimum(eta, eta.sqrt() * (-entropy).exp())
        logits = logits.masked_fill(logits.softmax(dim=-1) < least, -torch.inf)
    return logits


def _typical(logits: torch.Tensor, share: float) -> torch.Tensor:
    levels = logits.log_softmax(dim=-1)
    surprise = (-levels - _entropy(levels)).abs()
    _, order = surprise.sort(dim=-1)
    shares = logits.gather(1, order).softmax(dim=-1)
    late = shares.cumsum(dim=-1) - shares > share
    return logits.masked_fill(late.scatter(1, order, late), -torch.inf)


def _entropy(levels: torch.Tensor) -> torch.Tensor:
    return -(levels.exp() * levels).nansum(dim=-1, keepdim=True)
