"""KV cache manager: which blocks of the KV cache hold the tokens of which request.

    block pool     ref_count > 0: some requests hold it
                   ref_count = 0: in the free queue, the least recently used first; what it holds stays
                                  cached until the block is given to somebody else
    prefix cache   key of a full block -> block; the key is a digest of the salt and of all tokens up to the
                   block's end, so that equal keys mean equal keys and values
                   key of a block -> the blocks behind it that are not full, with the tokens that they have

A block is cached as soon as it is full and computed, also while its request runs, and is never written again.
The last block of a request that leaves is cached with as many tokens as it has; who goes on behind just these
takes it over and writes on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain, takewhile
from operator import itemgetter

from genserve.generation.engine_request import Request

__all__ = ["BlockTable", "KVCacheManager"]

_of_tokens = itemgetter(0)


class BlockTable:
    """The blocks of one request.

    Attributes:
        block_ids: in the order of its tokens.
        keys: of its first full blocks, computed or not, as far as they were asked for.
        num_cached: how many of its blocks are full, computed, and were put into the prefix cache.
        num_rewrites: counts the changes of `block_ids` other than at the end.
    """

    __slots__ = ("block_ids", "keys", "num_cached", "num_rewrites")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_cached = 0
        self.num_rewrites = 0


class KVCacheManager:
    """Gives blocks to requests and takes them back. Belongs to the engine's thread.

    Attributes:
        block_size: tokens of a block.
        copies: pairs (source, target) of blocks to be copied, in this order, before the next forward.
    """

    def __init__(self, *, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        """Begin with free blocks.

        Args:
            num_blocks: of the model's KV cache.
            block_size: tokens of a block.
            prefix_cache: whether requests share blocks; those that `always_shares` do in any case.
        """
        self.block_size = block_size
        self.copies: list[tuple[int, int]] = []
        self._prefix_cache = prefix_cache
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks    # of the full ones in the prefix cache
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[bytes, int] = {}
        # Of those that are cached and not full: the key of the block before, and the tokens.
        self._parts: dict[int, tuple[bytes, list[int]]] = {}
        self._parts_behind: dict[bytes, list[tuple[list[int], int]]] = {}   # by that key, tokens in order
        self._tables: dict[Request, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; what they cache is lost when they are needed."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of the blocks that requests hold."""
        return 1 - len(self._free) / len(self._ref_counts)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> BlockTable:
        """Return the blocks of a request; empty ones of a new request."""
        found = self._tables.get(request)
        if found is None:
            found = self._tables[request] = BlockTable()
        return found

    def begin(self, request: Request, *, num_spare: int) -> bool:
        """Give a request that holds no block those for all its tokens, cached ones where there are some.

        Sets its `num_computed_tokens`.

        Args:
            request: that waits.
            num_spare: blocks that must be left free.

        Returns:
            False: there are too few blocks; nothing was changed.
        """
        table = self.table(request)
        block_ids, num_computed = self._cached_prefix(request, table)
        num_new = self.num_blocks_for(len(request.token_ids)) - len(block_ids)
        num_reused = sum(not self._ref_counts[block] for block in block_ids)
        if len(self._free) - num_reused - num_new < num_spare:
            return False
        for block in block_ids:
            self._take(block)
        table.num_cached = num_computed // self.block_size
        for block in block_ids[table.num_cached :]:
            self._forget(block)     # it is written again
        table.block_ids = [*block_ids, *(self._new_block() for _ in range(num_new))]
        table.num_rewrites += 1
        request.num_computed_tokens = num_computed
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Make sure that a request's next tokens can be written, with new blocks and copies of shared ones.

        Args:
            request: that runs.
            num_tokens: behind those that are computed.

        Returns:
            False: there are too few free blocks; what was given so far is kept.
        """
        table, num_computed = self._tables[request], request.num_computed_tokens
        block_ids = table.block_ids
        place = num_computed // self.block_size
        if place < len(block_ids) and self._ref_counts[block_ids[place]] > 1:
            if not self._free:
                return False
            self._ref_counts[block_ids[place]] -= 1
            target = self._new_block()
            self.copies.append((block_ids[place], target))
            block_ids[place] = target
            table.num_rewrites += 1
        while len(block_ids) * self.block_size < num_computed + num_tokens:
            if not self._free:
                return False
            block_ids.append(self._new_block())
        return True

    def cache_blocks(self, request: Request) -> None:
        """Put the blocks of a request that are full and computed into the prefix cache."""
        table = self._tables[request]
        num_full = request.num_computed_tokens // self.block_size
        if num_full > table.num_cached and self._shares(request):
            for place in range(table.num_cached, num_full):
                self._cache(table.block_ids[place], self._key(request, table, place))
            table.num_cached = num_full

    def fork(self, source: Request, target: Request) -> None:
        """Have a request hold what another has computed: the same blocks, until one of them writes."""
        self.cache_blocks(source)
        table, own = self._tables[source], self.table(target)
        block_ids = table.block_ids[: self.num_blocks_for(source.num_computed_tokens)]
        for block in block_ids:
            self._take(block)
        self._give_back(own.block_ids)
        own.block_ids, own.keys, own.num_cached = block_ids, table.keys[: table.num_cached], table.num_cached
        own.num_rewrites += 1
        target.num_computed_tokens = source.num_computed_tokens

    def free(self, request: Request) -> None:
        """Take back the blocks of a request that leaves; what it has computed stays cached."""
        if request not in self._tables:
            return
        if self._tables[request].block_ids:
            self.cache_blocks(request)
            self._cache_last_block(request)
        self._give_back(self._tables.pop(request).block_ids)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens a request that waits would not have to compute."""
        return self._cached_prefix(request, self.table(request))[1]

    def key_at(self, request: Request, num_computed_tokens: int) -> bytes | None:
        """Return the key of the block that is computed behind so many tokens; None: it is not to be full."""
        place = num_computed_tokens // self.block_size
        if not self._shares(request) or (place + 1) * self.block_size > len(request.token_ids):
            return None
        return self._key(request, self.table(request), place)

    def longest(self, num_sequences: int, *, max_length: int) -> int:
        """Return how many tokens each of so many sequences may have, so that they can always run together."""
        return min(max_length, len(self._ref_counts) // num_sequences * self.block_size)

    def check_integrity(self) -> None:
        """Raise AssertionError where the blocks are in a state that must not be; for tests."""
        held = [0] * len(self._ref_counts)
        for block in chain.from_iterable(table.block_ids for table in self._tables.values()):
            held[block] += 1
        assert held == self._ref_counts, "a block is counted for requests that do not hold it"
        free = [block for block, count in enumerate(held) if not count]
        assert sorted(self._free) == free, "the free queue has not just the blocks that nobody holds"
        keys = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert {block: key for key, block in self._cached.items()} == keys, "keys and blocks disagree"
        parts = {
            block: (parent, tokens)
            for parent, behind in self._parts_behind.items()
            for tokens, block in behind
        }
        assert parts == self._parts, "blocks that are not full are lost, or found by other tokens"
        assert all(behind == sorted(behind) and behind for behind in self._parts_behind.values())
        for request, table in self._tables.items():
            assert len(set(table.block_ids)) == len(table.block_ids), "a request has a block twice"
            num_held = len(table.block_ids) * self.block_size
            assert request.num_computed_tokens <= num_held, "computed tokens lie in no block"
            for block in table.block_ids[request.num_computed_tokens // self.block_size :]:
                assert not self._is_cached(block), "a block that is still written is in the prefix cache"

    def _shares(self, request: Request) -> bool:
        return self._prefix_cache or request.always_shares

    def _cached_prefix(self, request: Request, table: BlockTable) -> tuple[list[int], int]:
        """Return the cached blocks that a request begins with, and how many of its tokens they save.

        At least one token is left to be computed, for the logits behind it. So a last block that is cached
        whole, or with part of the tokens that follow, is taken over and written, if nobody holds it.
        """
        block_ids: list[int] = []
        if not (self._shares(request) and request.reads_prefix_cache):
            return block_ids, 0
        num_tokens, size = len(request.token_ids), self.block_size
        for place in range(num_tokens // size):
            block = self._cached.get(self._key(request, table, place))
            if block is None:
                break
            block_ids.append(block)
        num_cached = len(block_ids) * size
        if num_cached == num_tokens:
            if not self._ref_counts[block_ids[-1]]:
                return block_ids, num_tokens - 1
            return block_ids[:-1], num_cached - size
        if num_cached < num_tokens - 1:
            parent = self._parent(request, table, len(block_ids))
            found = self._longest_part(parent, request.token_ids[num_cached : num_cached + size])
            if found is not None:
                tokens, block = found
                return [*block_ids, block], min(num_cached + len(tokens), num_tokens - 1)
        return block_ids, num_cached

    def _longest_part(self, parent: bytes, token_ids: list[int]) -> tuple[list[int], int] | None:
        """Return the most tokens that these begin with and a block behind the parent has, and that block."""
        behind = self._parts_behind.get(parent)
        while behind and token_ids:
            place = bisect_right(behind, token_ids, key=_of_tokens)
            if not place:
                return None
            tokens, block = behind[place - 1]
            if token_ids[: len(tokens)] == tokens:
                return tokens, block
            # It comes behind what is looked for, with which it begins too.
            same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, token_ids, strict=False))
            token_ids = [token_id for token_id, _ in same]
        return None

    def _cache_last_block(self, request: Request) -> None:
        """Cache the last block of a request that leaves, with the tokens that it has."""
        table, num_computed = self._tables[request], request.num_computed_tokens
        place, num_last = divmod(num_computed, self.block_size)
        if num_last and self._shares(request) and self._ref_counts[table.block_ids[place]] == 1:
            parent = self._parent(request, table, place)
            tokens = request.token_ids[num_computed - num_last : num_computed]
            behind = self._parts_behind.setdefault(parent, [])
            at = bisect_left(behind, tokens, key=_of_tokens)
            if at == len(behind) or behind[at][0] != tokens:
                behind.insert(at, (tokens, table.block_ids[place]))
                self._parts[table.block_ids[place]] = parent, tokens

    def _key(self, request: Request, table: BlockTable, place: int) -> bytes:
        """Return the key of a block that the request's tokens fill."""
        keys, size = table.keys, self.block_size
        while len(keys) <= place:
            first = len(keys) * size
            parent = self._parent(request, table, len(keys))
            keys.append(_key(parent, request.token_ids[first : first + size]))
        return keys[place]

    def _parent(self, request: Request, table: BlockTable, place: int) -> bytes:
        if place:
            return self._key(request, table, place - 1)
        return b"" if request.cache_salt is None else blake2b(request.cache_salt.encode()).digest()

    def _cache(self, block: int, key: bytes) -> None:
        """Cache a block; if the same tokens lie in another one, that stays the one to be found."""
        if self._keys[block] is None and key not in self._cached:
            self._cached[key] = block
            self._keys[block] = key

    def _is_cached(self, block: int) -> bool:
        return self._keys[block] is not None or block in self._parts

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None
        elif block in self._parts:
            parent, tokens = self._parts.pop(block)
            behind = self._parts_behind[parent]
            del behind[bisect_left(behind, tokens, key=_of_tokens)]
            if not behind:
                del self._parts_behind[parent]

    def _take(self, block: int) -> None:
        if not self._ref_counts[block]:
            del self._free[block]
        self._ref_counts[block] += 1

    def _new_block(self) -> int:
        """Take the free block that was used least recently."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._ref_counts[block] = 1
        return block

    def _give_back(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks; the last ones are needed least, and those that cache nothing go first."""
        for block in reversed(block_ids):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free[block] = None
                if not self._is_cached(block):
                    self._free.move_to_end(block, last=False)


def _key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()
