"""Likelihood: how likely tokens are after a row of logits; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genserve.generation.logits_model import LogitsArray, on_host
from genserve.kernels.logits import scan_logits
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
    logits: LogitsArray, token_id: int, *, num_top: int = 0, named: Sequence[int] = ()
) -> TokenLogprob:
    """Return the log-probability of a token, and of others: the best first, of equals the lowest id.

    Args:
        logits: [V] float32, on any device; not modified. With a NaN in it, so has what is returned.
        token_id: below V.
        num_top: so many of the most likely ones; one that cannot be is not among them.
        named: these, instead.
    """
    row = on_host(logits)
    scan = scan_logits(row[None], top_k=min(num_top, row.size), log_sum_exp=True)
    others = [i for i in scan.top_ids[0].tolist() if i >= 0] if num_top else list(named)
    level, *levels = np.maximum(row[[token_id, *others]] - scan.log_sum_exp, LOWEST).tolist()
    top = sorted(zip(others, levels, strict=True), key=lambda one: (-one[1], one[0]))
    return TokenLogprob(logprob=level, top=tuple(top))
