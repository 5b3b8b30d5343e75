"""KV cache manager: which blocks of the KV cache hold the tokens of which request.

A block with a reference count above 0 is held by requests. The other blocks are in the free queue, the least
recently used first. A free block stays in the prefix cache until it is allocated again, which evicts it.

A block is cached as soon as it is full and computed, while its request still runs, and is never written
again. The last block of a request that leaves is cached with the tokens that it holds; a request that
continues these tokens reuses the block and appends to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from genserve.generation.engine_request import Request
from genserve.generation.prefix_cache import PrefixCache, block_key, root_key


def max_tokens_per_sequence(
    num_sequences: int, *, num_blocks: int, block_size: int, max_length: int
) -> int:
    """Return up to which length `num_sequences` sequences always fit into `num_blocks` blocks together."""
    return min(max_length, num_blocks // num_sequences * block_size)


class BlockTable:
    """The blocks of one request.

    Attributes:
        block_ids: in the order of its tokens.
        keys: of its first full blocks, computed or not; added when they are needed.
        num_cached: how many of its blocks were put into the prefix cache because they are full and computed.
        num_rewrites: counts the changes of `block_ids` other than appending.
    """

    __slots__ = ("block_ids", "keys", "num_cached", "num_rewrites")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.num_cached = 0
        self.num_rewrites = 0


class KVCacheManager:
    """Allocates blocks to requests and frees them. Belongs to the engine's thread.

    Attributes:
        block_size: tokens of a block.
        copies: pairs (source, target) of blocks to copy, in this order, before the next forward.
    """

    def __init__(self, *, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        """Start with all blocks free; without `prefix_cache`, only logits requests share blocks."""
        self.block_size = block_size
        self.copies: list[tuple[int, int]] = []
        self._shares_blocks = prefix_cache
        self._prefix_cache = PrefixCache()
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._tables: dict[Request, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of the blocks that requests hold, 0 to 1."""
        return 1 - len(self._free) / len(self._ref_counts)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of this length needs."""
        return -(-num_tokens // self.block_size)

    def table(self, request: Request) -> BlockTable:
        """Return the blocks of a request; an empty table for a new request."""
        found = self._tables.get(request)
        if found is None:
            found = self._tables[request] = BlockTable()
        return found

    def allocate(self, request: Request, *, num_spare: int) -> bool:
        """Allocate blocks for all tokens of a waiting request, cached blocks where possible.

        Sets its `num_computed_tokens`. `num_spare` blocks must stay free.

        Returns:
            False: there are too few free blocks; nothing has changed.
        """
        table = self.table(request)
        block_ids, num_computed = self._cached_prefix(request, table)
        num_new = self.num_blocks_for(len(request.token_ids)) - len(block_ids)
        num_reused = sum(not self._ref_counts[block] for block in block_ids)
        if len(self._free) - num_reused - num_new < num_spare:
            return False
        for block in block_ids:
            self._hold(block)
        table.num_cached = num_computed // self.block_size
        for block in block_ids[table.num_cached :]:
            self._prefix_cache.evict(block)     # the request will write it
        table.block_ids = [*block_ids, *(self._new_block() for _ in range(num_new))]
        table.num_rewrites += 1
        request.num_computed_tokens = num_computed
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the next tokens of a running request; shared ones that it writes are copied.

        Returns:
            False: there are too few free blocks; blocks already allocated are kept.
        """
        table, num_computed = self._tables[request], request.num_computed_tokens
        block_ids = table.block_ids
        index = num_computed // self.block_size
        if index < len(block_ids) and self._ref_counts[block_ids[index]] > 1:
            if not self._free:
                return False
            self._ref_counts[block_ids[index]] -= 1
            target = self._new_block()
            self.copies.append((block_ids[index], target))
            block_ids[index] = target
            table.num_rewrites += 1
        while len(block_ids) * self.block_size < num_computed + num_tokens:
            if not self._free:
                return False
            block_ids.append(self._new_block())
        return True

    def cache_blocks(self, request: Request) -> None:
        """Put the full and computed blocks of a request into the prefix cache."""
        table = self._tables[request]
        num_full = request.num_computed_tokens // self.block_size
        if num_full > table.num_cached and self._uses_prefix_cache(request):
            for index in range(table.num_cached, num_full):
                self._prefix_cache.insert(table.block_ids[index], self._key(request, table, index))
            table.num_cached = num_full

    def fork(self, source: Request, target: Request) -> None:
        """Have `target` hold the computed blocks of `source`; whichever writes first gets a copy."""
        self.cache_blocks(source)
        table, own = self._tables[source], self.table(target)
        block_ids = table.block_ids[: self.num_blocks_for(source.num_computed_tokens)]
        for block in block_ids:
            self._hold(block)
        self._release(own.block_ids)
        own.block_ids, own.keys, own.num_cached = block_ids, table.keys[: table.num_cached], table.num_cached
        own.num_rewrites += 1
        target.num_computed_tokens = source.num_computed_tokens

    def free(self, request: Request) -> None:
        """Free the blocks of a request; its computed tokens stay cached until they are evicted."""
        if request not in self._tables:
            return
        if self._tables[request].block_ids:
            self.cache_blocks(request)
            self._cache_last_block(request)
        self._release(self._tables.pop(request).block_ids)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are cached."""
        return self._cached_prefix(request, self.table(request))[1]

    def key_at(self, request: Request, num_computed_tokens: int) -> bytes | None:
        """Return the key of the first block that is not computed; None: the request does not fill it."""
        index = num_computed_tokens // self.block_size
        if not self._uses_prefix_cache(request) or (index + 1) * self.block_size > len(request.token_ids):
            return None
        return self._key(request, self.table(request), index)

    def max_tokens_per_sequence(self, num_sequences: int, *, max_length: int) -> int:
        """Return up to which length `num_sequences` sequences always fit into the cache together."""
        return max_tokens_per_sequence(
            num_sequences,
            num_blocks=len(self._ref_counts),
            block_size=self.block_size,
            max_length=max_length,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the blocks are in a state that must not occur; for tests."""
        held = [0] * len(self._ref_counts)
        for block in chain.from_iterable(table.block_ids for table in self._tables.values()):
            held[block] += 1
        assert held == self._ref_counts, "a block is counted for requests that do not hold it"
        free = [block for block, count in enumerate(held) if not count]
        assert sorted(self._free) == free, "the free queue differs from the blocks that no request holds"
        self._prefix_cache.check_integrity()
        for request, table in self._tables.items():
            assert len(set(table.block_ids)) == len(table.block_ids), "a request holds a block twice"
            num_held = len(table.block_ids) * self.block_size
            assert request.num_computed_tokens <= num_held, "computed tokens are in no block"
            for block in table.block_ids[request.num_computed_tokens // self.block_size :]:
                assert block not in self._prefix_cache, "a block that is still written is cached"

    def _uses_prefix_cache(self, request: Request) -> bool:
        return self._shares_blocks or request.always_shares_blocks

    def _cached_prefix(self, request: Request, table: BlockTable) -> tuple[list[int], int]:
        """Return the cached blocks that a request starts with, and how many of its tokens they hold.

        At least one token is left to compute, since the request needs the logits after it. So a last block
        that is cached whole, or with some of the tokens that follow, is reused and written if it is free.
        """
        block_ids: list[int] = []
        if request.skip_reading_prefix_cache or not self._uses_prefix_cache(request):
            return block_ids, 0
        num_tokens, size = len(request.token_ids), self.block_size
        for index in range(num_tokens // size):
            block = self._prefix_cache.find(self._key(request, table, index))
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
            tokens = request.token_ids[num_cached : num_cached + size]
            found = self._prefix_cache.find_partial(parent, tokens)
            if found is not None:
                num_shared, block = found
                return [*block_ids, block], min(num_cached + num_shared, num_tokens - 1)
        return block_ids, num_cached

    def _cache_last_block(self, request: Request) -> None:
        """Cache the partly filled last block of a request that leaves."""
        table, num_computed = self._tables[request], request.num_computed_tokens
        index, num_last = divmod(num_computed, self.block_size)
        if num_last and self._uses_prefix_cache(request) and self._ref_counts[table.block_ids[index]] == 1:
            parent = self._parent(request, table, index)
            tokens = request.token_ids[num_computed - num_last : num_computed]
            self._prefix_cache.insert_partial(table.block_ids[index], parent, tokens)

    def _key(self, request: Request, table: BlockTable, index: int) -> bytes:
        """Return the key of a block that the request fills."""
        keys, size = table.keys, self.block_size
        while len(keys) <= index:
            first = len(keys) * size
            parent = self._parent(request, table, len(keys))
            keys.append(block_key(parent, request.token_ids[first : first + size]))
        return keys[index]

    def _parent(self, request: Request, table: BlockTable, index: int) -> bytes:
        return self._key(request, table, index - 1) if index else root_key(request.cache_salt)

    def _hold(self, block: int) -> None:
        if not self._ref_counts[block]:
            del self._free[block]
        self._ref_counts[block] += 1

    def _new_block(self) -> int:
        """Take the least recently used free block, and evict its tokens from the prefix cache."""
        block, _ = self._free.popitem(last=False)
        self._prefix_cache.evict(block)
        self._ref_counts[block] = 1
        return block

    def _release(self, block_ids: Sequence[int]) -> None:
        """Release blocks; a request's last blocks are reused before its first, uncached ones before all."""
        for block in reversed(block_ids):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free[block] = None
                if block not in self._prefix_cache:
                    self._free.move_to_end(block, last=False)
