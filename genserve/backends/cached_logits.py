"""Cached logits: what all logits models with a KV cache in place have in common."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from genserve.backends.kv_cache import KVCache, TokenShapes, token_bytes
from genserve.backends.logits_memory import LogitsMemory
from genserve.errors import RepositoryError

__all__ = ["EXPORT_AGAIN", "CachedLogits", "resolve_max_length"]

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
