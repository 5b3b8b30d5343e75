"""Cached logits: the base class of the runtimes with a KV cache, and operations on packed tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import RepositoryError
from genserve.generation.logits_model import ForwardBatch, IndexArray, TokenArray
from genserve.textmodel.runtimes.kv_cache_memory import KVCache, LogitsMemory, TokenShapes, token_bytes

__all__ = [
    "EXPORT_AGAIN",
    "CachedLogits",
    "part_of",
    "resolve_max_length",
    "rows_per_run",
    "sequence_of_tokens",
    "token_slots",
]


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


logger = logging.getLogger(__name__)

# The remedy for a file of `genserve export` that this genserve does not run.
EXPORT_AGAIN = "export it again with `genserve export --overwrite`"


class CachedLogits:
    """A `LogitsModel` but for its forward: a KV cache in blocks, and its limits.

    Attributes:
        cache: the keys and values.
        max_num_seqs: see `LogitsModel.max_num_seqs`.
        max_length: see `LogitsModel.max_length`.
        block_size: see `LogitsModel.block_size`.
        num_blocks: see `LogitsModel.num_blocks`.
        kv_cache_bytes: bytes that the cache takes at the most.
    """

    def __init__(
        self,
        memory: LogitsMemory,
        shapes: TokenShapes,
        *,
        path: Path,
        max_num_seqs: int,
        max_length: int,
        kv_cache_bytes: int | None,
    ) -> None:
        """Reserve the cache: blocks for `max_num_seqs` sequences of `max_length` tokens, or as many as fit.

        Args:
            memory: where.
            shapes: what it holds of each token.
            path: of the model, for messages.
            max_num_seqs: how many sequences can share a forward.
            max_length: tokens of a sequence; less, if the cache holds less.
            kv_cache_bytes: what the cache may take; None: half of what is free.

        Raises:
            RepositoryError: there is no room for so much, or `kv_cache_bytes` is too little for one block.
        """
        self.max_num_seqs = max_num_seqs
        self.block_size = memory.block_size
        block_bytes = self.block_size * token_bytes(shapes)
        wanted = max_num_seqs * -(-max_length // self.block_size)
        self.num_blocks = min(wanted, _budget(memory, kv_cache_bytes, wanted * block_bytes) // block_bytes)
        if not self.num_blocks:
            raise RepositoryError(
                f"{path}: the KV cache has no room for one block: {self.block_size} tokens take "
                f"{block_bytes} bytes",
                remedy="raise kv_cache_bytes in the logits stage's config.pbtxt, or free memory",
            )
        try:
            self.cache = KVCache(
                {
                    name: memory.zeros((self.num_blocks, self.block_size, *shape), dtype)
                    for name, (shape, dtype) in shapes.items()
                }
            )
        except (OSError, OverflowError) as error:
            raise RepositoryError(
                f"{path}: a KV cache of {self.num_blocks * block_bytes} bytes cannot be reserved: {error}",
                remedy="lower kv_cache_bytes, max_batch_size or max_sequence_length in the logits stage's "
                "config.pbtxt",
            ) from error
        self.kv_cache_bytes = self.cache.nbytes
        self.max_length = min(max_length, self.num_blocks * self.block_size)
        if self.max_length < max_length:
            logger.warning(
                "%s: prompt and answer have %d tokens at the most, not %d: no more fit into the KV cache's "
                "%d bytes (kv_cache_bytes; without it, half of the memory that is free)",
                path, self.max_length, max_length, self.kv_cache_bytes,
            )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `LogitsModel.copy_blocks`."""
        self.cache.copy_blocks(pairs)


def resolve_max_length(max_sequence_length: int | None, *, context_length: int, path: Path) -> int:
    """Return how many tokens a sequence has at the most: what the config says, or the graph's whole context.

    Raises:
        RepositoryError: the config says more than the graph can; `field` is `parameters`.
    """
    if (max_sequence_length or 0) > context_length:
        raise RepositoryError(
            f"max_sequence_length is {max_sequence_length}; the context of {path.name} is {context_length}",
            remedy=f"write {context_length} at the most, or leave it out, in the logits stage's config.pbtxt",
            field="parameters",
        )
    return max_sequence_length or context_length


def _budget(memory: LogitsMemory, kv_cache_bytes: int | None, wanted_bytes: int) -> int:
    """Return how many bytes the cache may take."""
    free_bytes = memory.free_bytes()
    if free_bytes is None:
        return kv_cache_bytes or wanted_bytes
    if memory.is_lazy:
        return kv_cache_bytes or free_bytes // 2
    # All of it is taken at once, and a run needs memory of its own.
    return min(kv_cache_bytes or free_bytes // 2, free_bytes * 9 // 10)
