"""Cached rows: rows of tokens in the KV cache of a logits model, run the plain way, for checks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from genserve.export.checkpoint import FloatArray
from genserve.generation.logits_model import ForwardBatch, LogitsModel, on_host

__all__ = ["forward_rows"]


def forward_rows(
    model: LogitsModel, token_ids: NDArray[np.int64], *, past: Sequence[int], logits_indices: Sequence[int]
) -> FloatArray:
    """Run tokens [rows, length] behind the `past` tokens of each row; row b has the b-th part of the cache.

    Returns:
        [len(logits_indices), vocab_size]: the logits behind those of the rows * length tokens.
    """
    num_rows = len(token_ids)
    blocks_per_row = -(-model.max_length // model.block_size)
    batch = ForwardBatch.of(
        token_ids,
        num_computed_tokens=past,
        block_table=np.arange(num_rows * blocks_per_row).reshape(num_rows, -1),
        logits_indices=logits_indices,
    )
    return on_host(model.forward(batch)).copy()
