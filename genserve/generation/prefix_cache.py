"""Prefix cache: finds the block that already holds the keys and values of some tokens.

A full block is found by its key, a digest of the cache salt and of all tokens up to the end of the block, so
blocks with equal keys hold equal keys and values. A partly filled block, the last one of a request that has
left, is found by the key of the block before it and its own tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from operator import itemgetter

_tokens_of = itemgetter(0)


class PrefixCache:
    """The blocks that hold known tokens. Belongs to the engine's thread.

    A block is never written while it is cached. `KVCacheManager` chooses which block to evict: the free one
    that was used least recently.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}     # by key
        self._keys: dict[int, bytes] = {}       # by block
        # Partly filled blocks: the key of the block before each, and the tokens that it holds.
        self._partial: dict[int, tuple[bytes, list[int]]] = {}
        self._partial_after: dict[bytes, list[tuple[list[int], int]]] = {}  # by that key, sorted by tokens

    def __contains__(self, block: int) -> bool:
        return block in self._keys or block in self._partial

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

    def insert(self, block: int, key: bytes) -> None:
        """Cache a full block, unless it is cached already or another block has the same key."""
        if block not in self._keys and key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def insert_partial(self, block: int, parent: bytes, token_ids: list[int]) -> None:
        """Cache a block that holds `token_ids`, unless another block after `parent` holds the same ones."""
        candidates = self._partial_after.setdefault(parent, [])
        index = bisect_left(candidates, token_ids, key=_tokens_of)
        if index == len(candidates) or candidates[index][0] != token_ids:
            candidates.insert(index, (token_ids, block))
            self._partial[block] = parent, token_ids

    def evict(self, block: int) -> None:
        """Forget a block, which is about to be written; does nothing if it is not cached."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
        elif block in self._partial:
            parent, token_ids = self._partial.pop(block)
            candidates = self._partial_after[parent]
            del candidates[bisect_left(candidates, token_ids, key=_tokens_of)]
            if not candidates:
                del self._partial_after[parent]

    def check_integrity(self) -> None:
        """Raise AssertionError if the indices disagree; for tests."""
        assert {block: key for key, block in self._blocks.items()} == self._keys, "keys and blocks disagree"
        partial = {
            block: (parent, token_ids)
            for parent, candidates in self._partial_after.items()
            for token_ids, block in candidates
        }
        assert partial == self._partial, "partly filled blocks are lost, or indexed under other tokens"
        for candidates in self._partial_after.values():
            assert candidates, "an empty list was left behind"
            assert candidates == sorted(candidates), "partly filled blocks are not sorted"


def root_key(cache_salt: str | None) -> bytes:
    """Return the parent of a request's first block."""
    return b"" if cache_salt is None else blake2b(cache_salt.encode()).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block, 32 bytes; `parent` is the key of the block before it, or `root_key`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


def block_keys(token_ids: Sequence[int], *, block_size: int, cache_salt: str | None = None) -> list[bytes]:
    """Return the keys of the full blocks of a prompt, in order."""
    keys: list[bytes] = []
    parent = root_key(cache_salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_key(parent, token_ids[end - block_size : end])
        keys.append(parent)
    return keys
