"""Packed tokens: what a runtime without paged attention does with the tokens of a forward."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import ForwardBatch, IndexArray, TokenArray

__all__ = ["part_of", "rows_per_run", "sequence_of_tokens", "token_slots"]

_MAX_LOGITS_BYTES = 2**28  # of a run that gives the logits of every position

_Indices = NDArray[np.integer[Any]]


def part_of(batch: ForwardBatch, sequences: _Indices) -> tuple[ForwardBatch, _Indices]:
    """Return some sequences of a batch, by their ascending numbers, as one of its own.

    Returns:
        The part; and which rows of the whole batch's logits are those of the part.
    """
    tokens = np.flatnonzero(np.isin(sequence_of_tokens(batch), sequences))
    rows = np.flatnonzero(np.isin(batch.logits_indices, tokens))
    counts = np.diff(batch.query_start_loc)[sequences]
    part = ForwardBatch(
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        query_start_loc=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        num_computed_tokens=batch.num_computed_tokens[sequences],
        block_table=batch.block_table[sequences],
        logits_indices=np.searchsorted(tokens, batch.logits_indices[rows]),
    )
    return part, rows


def sequence_of_tokens(batch: ForwardBatch) -> TokenArray:
    """Return which sequence of a batch each of its tokens is of: [T]."""
    return np.repeat(np.arange(len(batch.num_computed_tokens)), np.diff(batch.query_start_loc))


def token_slots(
    block_table: IndexArray, sequences: _Indices, positions: _Indices, *, block_size: int
) -> TokenArray:
    """Return where tokens lie in a cache whose blocks are one line of slots.

    Args:
        block_table: [B, max_blocks].
        sequences: of each token, its row of the table.
        positions: of each token in its sequence; its shape and that of `sequences` broadcast.
        block_size: tokens of a block.
    """
    blocks = block_table[sequences, positions // block_size].astype(np.int64)
    slots: TokenArray = blocks * block_size + positions % block_size
    return slots


def rows_per_run(num_tokens: int, vocab_size: int) -> int:
    """Return how many rows of so many tokens share a run of a graph that gives the logits of every one."""
    return max(1, _MAX_LOGITS_BYTES // max(1, num_tokens * vocab_size * 4))
