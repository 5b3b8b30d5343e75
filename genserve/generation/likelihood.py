"""Likelihood: how likely tokens are after a row of logits; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genserve.generation.logits_model import FloatArray, LogitsArray, TokenArray, on_host
from genserve.generation.truncation import best_ids, exponentials
from genserve.request import TokenLogprob

__all__ = ["LOWEST", "Asked", "likelihood"]

LOWEST = -9999.0    # of a token that cannot be, since JSON has no infinity; vLLM's figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one row is asked for beside its token: how likely that was, and how likely which others."""

    row: int
    num_top: int = 0                # so many of the most likely ones
    named: tuple[int, ...] = ()     # or these
    processed: bool = False         # after all sampling rules; False: as the model has it


def likelihood(
    logits: LogitsArray,
    token_id: int,
    *,
    num_top: int = 0,
    named: Sequence[int] = (),
    ids: TokenArray | None = None,
) -> TokenLogprob:
    """Return the log-probability of a token, and of others: the best first, of equals the lowest id.

    Args:
        logits: [V] float32, on any device; not modified. With a NaN in it, so has what is returned.
        token_id: below V, or one of `ids`.
        num_top: so many of the most likely ones; one that cannot be is not among them.
        named: these, instead.
        ids: [V], ascending, of which tokens the logits are: no other can be. None: of 0 to V - 1.
    """
    row = on_host(logits)
    shifted = row - row.max()
    total = exponentials(shifted).sum(dtype=np.float64)
    others = list(named)
    if num_top:
        # Scoring asks for one.
        best = best_ids(shifted, num_top) if num_top > 1 else np.array([shifted.argmax()])
        others = (best if ids is None else ids[best]).tolist()
    found = _at(shifted, [token_id, *others], ids)
    level, *levels = np.maximum(found - np.float32(np.log(total)), LOWEST).tolist()
    top = sorted(zip(others, levels, strict=True), key=lambda one: (-one[1], one[0]))
    return TokenLogprob(logprob=level, top=tuple(top))


def _at(row: FloatArray, token_ids: Sequence[int], ids: TokenArray | None) -> FloatArray:
    if ids is None:
        return row[token_ids]
    places = np.searchsorted(ids, token_ids).clip(max=ids.size - 1)
    return np.where(ids[places] == token_ids, row[places], np.float32(-np.inf))
