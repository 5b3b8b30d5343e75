"""Cache room: the KV cache of a logits model, and how much of it may be used."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from genserve.backends.logits_memory import Layers, LogitsMemory, SlotCache
from genserve.errors import RepositoryError

__all__ = ["CacheRoom"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """A cache and its limits."""

    cache: SlotCache
    max_length: int             # tokens of a slot
    max_cached_tokens: int      # of all slots together, in whole pages

    @classmethod
    def reserve(
        cls,
        memory: LogitsMemory,
        layers: Layers,
        *,
        path: Path,
        num_slots: int,
        max_length: int,
        cache_bytes: int | None,
    ) -> CacheRoom:
        """Reserve a cache.

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
        return cls(cache=cache, max_length=min(max_length, num_tokens), max_cached_tokens=num_tokens)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that the cache takes at the most."""
        return self.max_cached_tokens * self.cache.token_bytes


def _num_tokens(cache: SlotCache, path: Path, cache_bytes: int | None) -> int:
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
