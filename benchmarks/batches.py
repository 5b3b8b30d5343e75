"""Batches: the forwards that benchmarks time, over sequences whose blocks lie one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.generation.logits_model import ForwardBatch, LogitsModel

__all__ = ["TOKEN_ID", "forward_batch"]

TOKEN_ID = 5  # any will do: its value does not change the cost


def forward_batch(
    model: LogitsModel, token_ids: Sequence[Sequence[int]], *, past: Sequence[int], length: int
) -> ForwardBatch:
    """Tokens of some sequences behind `past` ones each, of which the last has logits.

    Args:
        model: that runs it.
        token_ids: of each sequence.
        past: of each sequence, how many tokens it has in the KV cache.
        length: tokens that a sequence may come to have; it decides which blocks are whose.
    """
    width = -(-length // model.block_size)
    block_table = np.arange(len(token_ids) * width).reshape(len(token_ids), width)
    return ForwardBatch.of(token_ids, num_computed_tokens=past, block_table=block_table)
