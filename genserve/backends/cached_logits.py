"""Cached logits: what all logits models with a KV cache have in common."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from genserve.backends.kv_cache import KvCache, Layers
from genserve.backends.logits_memory import LogitsMemory
from genserve.errors import RepositoryError
from genserve.generation.logits_model import TokenArray

__all__ = ["CachedLogits", "padded", "slot_length"]

logger = logging.getLogger(__name__)


class CachedLogits:
    """A `LogitsModel` but for its forwards: a cache, its limits, and what is done to it between them.

    Attributes:
        cache: the keys and values of its slots.
        num_slots: see `LogitsModel.num_slots`.
        max_length: see `LogitsModel.max_length`.
        max_cached_tokens: see `LogitsModel.max_cached_tokens`.
        kv_cache_bytes: bytes that the cache takes at the most.
    """

    def __init__(
        self,
        memory: LogitsMemory,
        layers: Layers,
        *,
        path: Path,
        num_slots: int,
        max_length: int,
        cache_bytes: int | None,
    ) -> None:
        """Reserve the cache.

        Args:
            memory: where.
            layers: what it holds of each token.
            path: of the model, for errors.
            num_slots: how many token sequences may run together; fewer, if the memory has no room for them.
            max_length: tokens per slot; less, if the cache holds less.
            cache_bytes: what the cache may hold of all slots together; None: all of it.

        Raises:
            RepositoryError: there is no room for so much, or `cache_bytes` is too little for one page.
        """
        try:
            cache = memory.cache(layers, num_slots=num_slots, max_length=max_length, cache_bytes=cache_bytes)
        except (OSError, OverflowError) as error:
            raise RepositoryError(
                f"{path}: {num_slots} slots of {max_length} tokens cannot be reserved: {error}",
                remedy="lower max_batch_size or max_sequence_length in the logits stage's config.pbtxt",
            ) from error
        num_tokens = _num_tokens(cache, path, cache_bytes)
        if num_tokens < max_length:
            logger.warning(
                "%s: prompt and answer have %d tokens at the most, not %d: no more fit into the KV cache's "
                "%d bytes (kv_cache_bytes; without it, half of the memory that is free)",
                path, num_tokens, max_length, num_tokens * cache.token_bytes,
            )
        self.cache = cache
        self.num_slots = cache.num_slots
        self.max_length = min(max_length, num_tokens)
        self.max_cached_tokens = num_tokens
        self.kv_cache_bytes = num_tokens * cache.token_bytes

    @property
    def page_tokens(self) -> int:
        """See `LogitsModel.page_tokens`."""
        return self.cache.page_tokens

    def move(self, *, source: int, target: int, length: int) -> None:
        """See `LogitsModel.move`."""
        self.cache.move(source=source, target=target, length=length)

    def give_back(self, slot: int, *, length: int) -> None:
        """See `LogitsModel.give_back`."""
        self.cache.give_back(slot, length=length)


def slot_length(max_sequence_length: int | None, *, context_length: int, path: Path) -> int:
    """Return how many tokens a slot holds: what the config says, or the graph's whole context.

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


def padded(chunks: Sequence[Sequence[int]], *, width: int | None = None) -> tuple[TokenArray, TokenArray]:
    """Return chunks as one array, padded on the right.

    Args:
        chunks: token ids, at least one each.
        width: of the array; None: as wide as the longest.

    Returns:
        [chunks, width]: the ids; and [chunks]: where the last of each lies in the array as one line.
    """
    lengths = np.array([len(chunk) for chunk in chunks])
    input_ids = np.zeros((len(chunks), width or lengths.max()), dtype=np.int64)
    for row, chunk in zip(input_ids, chunks, strict=True):
        row[: len(chunk)] = chunk
    return input_ids, np.arange(len(chunks)) * input_ids.shape[1] + lengths - 1


def _num_tokens(cache: KvCache, path: Path, cache_bytes: int | None) -> int:
    if cache_bytes is None or cache_bytes >= cache.nbytes:
        return cache.nbytes // cache.token_bytes
    page_bytes = cache.page_tokens * cache.token_bytes
    if cache_bytes < page_bytes:
        raise RepositoryError(
            f"{path}: a KV cache of {cache_bytes} bytes holds nothing; "
            f"{cache.page_tokens} tokens take {page_bytes}",
            remedy="raise kv_cache_bytes in the logits stage's config.pbtxt",
        )
    return cache_bytes // page_bytes * cache.page_tokens
