"""Batches: makes batches for forwards, of sequences with contiguous blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.engine.logits_model import ForwardBatch, LogitsModel

__all__ = ["TOKEN_ID", "forward_batch"]

TOKEN_ID = 5  # arbitrary; the cost does not depend on it


def forward_batch(
    model: LogitsModel, token_ids: Sequence[Sequence[int]], *, past: Sequence[int], length: int
) -> ForwardBatch:
    """Return a batch with new tokens of some sequences, and logits for the last token of each.

    Args:
        model: runs the batch.
        token_ids: the new tokens of each sequence.
        past: the number of cached tokens of each sequence.
        length: the maximum length of a sequence, which determines its blocks.
    """
    width = -(-length // model.block_size)
    block_table = np.arange(len(token_ids) * width).reshape(len(token_ids), width)
    return ForwardBatch.of(token_ids, num_computed_tokens=past, block_table=block_table)
