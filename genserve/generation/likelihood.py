"""Likelihood: how likely tokens are after a row of logits, before any sampling rule; pure."""

from __future__ import annotations

import numpy as np

from genserve.generation.logits_model import FloatArray, LogitsArray
from genserve.generation.truncation import LOWEST_EXPONENT
from genserve.request import TokenLogprob, TopTokens

__all__ = ["LOWEST", "likelihood", "top_tokens"]

LOWEST = -9999.0    # of a token that cannot be, since JSON has no infinity; vLLM's figure


def likelihood(logits: LogitsArray, token_id: int, *, num_top: int) -> TokenLogprob:
    """Return the log-probability of a token, and the `num_top` most likely ones.

    Args:
        logits: [V] float32, on any device; not modified.
        token_id: below V.
        num_top: 0 or more.
    """
    levels = _log_probabilities(logits)
    return TokenLogprob(logprob=float(levels[token_id]), top=_best(levels, num_top))


def top_tokens(logits: LogitsArray, num_top: int) -> TopTokens:
    """Return the `num_top` most likely tokens of a row [V] float32."""
    return _best(_log_probabilities(logits), num_top)


def _log_probabilities(logits: LogitsArray) -> FloatArray:
    row: FloatArray = np.asarray(logits.cpu() if hasattr(logits, "cpu") else logits)
    shifted = row - row.max()
    total = np.exp(np.maximum(shifted, LOWEST_EXPONENT)).sum(dtype=np.float64)
    levels: FloatArray = np.maximum(shifted - np.float32(np.log(total)), LOWEST)
    return levels


def _best(levels: FloatArray, num_top: int) -> TopTokens:
    if num_top == 0:
        return ()
    if num_top == 1:    # what scoring asks for; a partition takes ten times as long
        ids = [int(levels.argmax())]
    else:
        best = np.argpartition(-levels, min(num_top, levels.size) - 1)[:num_top]
        ids = sorted(best.tolist(), key=lambda token_id: (-levels[token_id], token_id))
    return tuple((token_id, float(levels[token_id])) for token_id in ids)
