"""Likelihood: how likely tokens are after a row of logits; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from genserve.generation.logits_model import FloatArray, LogitsArray, TokenArray
from genserve.generation.truncation import exponentials, level_of_best
from genserve.request import TokenLogprob

__all__ = ["LOWEST", "Asked", "likelihood"]

LOWEST = -9999.0    # of a token that cannot be, since JSON has no infinity; vLLM's figure
_LOWEST_LOGIT = float(np.finfo(np.float32).min)     # of one that can be


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one row is asked for beside its token: how likely that was, and how likely which others."""

    row: int
    num_top: int = 0                # so many of the most likely ones
    named: tuple[int, ...] = ()     # or these
    processed: bool = False         # after all sampling rules; False: as the model has it


def likelihood(
    logits: LogitsArray, token_id: int, *, num_top: int = 0, named: Sequence[int] = ()
) -> TokenLogprob:
    """Return the log-probability of a token, and of others: the best first, of equals the lowest id.

    Args:
        logits: [V] float32, on any device; not modified. With a NaN in it, so has what is returned.
        token_id: below V.
        num_top: so many of the most likely ones; one that cannot be is not among them.
        named: these, instead.
    """
    row: FloatArray = np.asarray(logits.cpu() if hasattr(logits, "cpu") else logits)
    shifted = row - row.max()
    total = exponentials(shifted).sum(dtype=np.float64)
    ids: Iterable[int] = named
    if num_top:
        ids = _best(shifted, num_top).tolist()
    level, *levels = np.maximum(shifted[[token_id, *ids]] - np.float32(np.log(total)), LOWEST).tolist()
    top = sorted(zip(ids, levels, strict=True), key=lambda one: (-one[1], one[0]))
    return TokenLogprob(logprob=level, top=tuple(top))


def _best(row: FloatArray, count: int) -> TokenArray:
    """Return the ids of the `count` highest values, or of fewer where the rest is -inf."""
    if count == 1:  # what scoring asks for
        return np.array([row.argmax()])
    ids = np.flatnonzero(row >= max(level_of_best(row, count), _LOWEST_LOGIT))
    best: TokenArray = ids[np.argsort(-row[ids], kind="stable")][:count]
    return best
