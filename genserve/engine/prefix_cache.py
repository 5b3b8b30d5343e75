"""Prefix cache: finds the block that already holds the keys and values of some tokens.

A full block is found by its key, a digest of the cache salt and of all tokens up to the end of the block, so
blocks with equal keys hold equal keys and values. A partly filled block, the last one of a request that has
left, is found by the key of the block before it and its own tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, takewhile
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_tokens_of = itemgetter(0)


class CachedTokens(NamedTuple):
    """What a cached block holds."""

    key: bytes                  # of the block; empty: it is partly filled
    parent: bytes               # the key of the block before it, or `root_key`
    token_ids: Sequence[int]
    owner: str                  # the name of the API key whose request computed it


class Nearest(NamedTuple):
    """What a cached block and some tokens have in common."""

    num_common: int
    goes_on: bool               # the block holds more tokens behind these
    rest: tuple[int, ...]       # these tokens; empty: another key's request computed the block
    key: bytes                  # of the block; empty: it is partly filled


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """Blocks of a prompt that were read from files.

    Attributes:
        token_ids: the prompt.
        parents: the key of what is before each full block of the prompt.
        keys: the key of each full block of the prompt.
        owner: the name of the API key of the request.
        indices: which of the prompt's blocks these are, ascending.
        rows: [len(indices), block_bytes], their contents.
        state: [state_bytes], the recurrent state at the end of a block, which is the last of these or is
            cached; None: none was read.
        state_index: which of the prompt's blocks that is.
    """

    token_ids: Sequence[int]
    parents: Sequence[bytes]
    keys: Sequence[bytes]
    owner: str
    indices: Sequence[int]
    rows: NDArray[np.uint8]
    state: NDArray[np.uint8] | None = None
    state_index: int = 0


class PrefixCache:
    """The blocks that hold known tokens. Belongs to the engine's thread.

    A block is never written while it is cached. `KVCacheManager` chooses which block to evict: the free one
    that was used least recently.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}     # key -> block
        self._full: dict[int, CachedTokens] = {}        # by block
        self._partial: dict[int, CachedTokens] = {}     # by partly filled block
        self._partial_after: dict[bytes, list[tuple[list[int], int]]] = {}  # key before -> sorted

    def __contains__(self, block: int) -> bool:
        return block in self._full or block in self._partial

    def is_partial(self, block: int) -> bool:
        """Whether it is a partly filled block."""
        return block in self._partial

    def find(self, key: bytes) -> int | None:
        """Return the full block with this key."""
        return self._blocks.get(key)

    def find_partial(self, parent: bytes, token_ids: list[int]) -> tuple[int, int] | None:
        """Return the partly filled block after `parent` that holds the longest prefix of `token_ids`.

        Returns:
            How many tokens it holds, and the block; None: no such block.
        """
        candidates = self._partial_after.get(parent)
        while candidates and token_ids:
            index = bisect_right(candidates, token_ids, key=_tokens_of)
            if not index:
                return None
            tokens, block = candidates[index - 1]
            if token_ids[: len(tokens)] == tokens:
                return len(tokens), block
            # It sorts before `token_ids` but is no prefix of it: prefixes end within their common part.
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, token_ids, strict=False))
            token_ids = [token_id for token_id, _ in shared]
        return None

    def nearest(self, parent: bytes, token_ids: Sequence[int], *, owner: str) -> Nearest | None:
        """Return the block after `parent` that has most tokens in common with `token_ids`; None: no block.

        Of several, one that goes on behind them comes first, then one that `owner` may read. Takes time in
        proportion to the whole cache.
        """
        blocks = chain(self._full.values(), self._partial.values())
        found = [_nearness(cached, token_ids, owner) for cached in blocks if cached.parent == parent]
        return max(found, default=None)

    def insert(self, block: int, key: bytes, *, parent: bytes, token_ids: Sequence[int], owner: str) -> bool:
        """Cache a full block; False: it is cached already, or another block has the same key."""
        if block in self._full or key in self._blocks:
            return False
        self._blocks[key] = block
        self._full[block] = CachedTokens(key, parent, array("q", token_ids), owner)
        return True

    def insert_partial(self, block: int, parent: bytes, token_ids: list[int], *, owner: str) -> None:
        """Cache a block that holds `token_ids`, unless another block after `parent` holds the same tokens."""
        candidates = self._partial_after.setdefault(parent, [])
        index = bisect_left(candidates, token_ids, key=_tokens_of)
        if index == len(candidates) or candidates[index][0] != token_ids:
            candidates.insert(index, (token_ids, block))
            self._partial[block] = CachedTokens(b"", parent, token_ids, owner)

    def evict(self, block: int) -> None:
        """Forget a block, which is about to be written; does nothing if it is not cached."""
        cached = self._full.pop(block, None)
        if cached is not None:
            del self._blocks[cached.key]
        elif block in self._partial:
            _, parent, token_ids, _ = self._partial.pop(block)
            candidates = self._partial_after[parent]
            del candidates[bisect_left(candidates, list(token_ids), key=_tokens_of)]
            if not candidates:
                del self._partial_after[parent]

    def check_integrity(self) -> None:
        """Raise AssertionError if the indices disagree; for tests."""
        keys = {block: cached.key for block, cached in self._full.items()}
        assert {block: key for key, block in self._blocks.items()} == keys, "keys and blocks disagree"
        partial = {
            block: (parent, token_ids)
            for parent, candidates in self._partial_after.items()
            for token_ids, block in candidates
        }
        held = {block: (cached.parent, cached.token_ids) for block, cached in self._partial.items()}
        assert partial == held, "partly filled blocks are lost, or indexed under other tokens"
        for candidates in self._partial_after.values():
            assert candidates, "an empty list was left behind"
            assert candidates == sorted(candidates), "partly filled blocks are not sorted"


def _nearness(cached: CachedTokens, token_ids: Sequence[int], owner: str) -> Nearest:
    held = cached.token_ids
    pairs = enumerate(zip(held, token_ids, strict=False))
    common = next((index for index, (a, b) in pairs if a != b), min(len(held), len(token_ids)))
    rest = tuple(held[common:]) if cached.owner == owner else ()
    return Nearest(common, common < len(held), rest, cached.key)


def root_key(cache_salt: str | None, *, adapter: str | None = None) -> bytes:
    """Return the parent of a request's first block; requests with other adapters have other ones."""
    salted = b"" if cache_salt is None else blake2b(cache_salt.encode()).digest()
    return salted if adapter is None else blake2b(salted + adapter.encode(), person=b"adapter").digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block, 32 bytes; `parent` is the key of the block before it, or `root_key`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


def block_keys(token_ids: Sequence[int], *, block_size: int, root: bytes = b"") -> list[bytes]:
    """Return the keys of the full blocks of a prompt, in order; `root` is its `root_key`."""
    keys: list[bytes] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_key(parent, token_ids[end - block_size : end])
        keys.append(parent)
    return keys
