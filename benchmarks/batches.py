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
    counts = [len(tokens) for tokens in token_ids]
    width = -(-length // model.block_size)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return ForwardBatch(
        token_ids=np.concatenate([np.asarray(tokens, np.int64) for tokens in token_ids]),
        positions=np.concatenate([np.arange(p, p + n) for p, n in zip(past, counts, strict=True)]),
        query_start_loc=starts.astype(np.int32),
        num_computed_tokens=np.asarray(past, np.int32),
        block_table=np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width),
        logits_indices=starts[1:] - 1,
    )
