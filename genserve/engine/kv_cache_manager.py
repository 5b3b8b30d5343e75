"""KV cache manager: which blocks of the KV cache hold the tokens of which request.

A block with a reference count above 0 is held by requests. The other blocks are in the free queue, the least
recently used first. A free block stays in the prefix cache until it is allocated again, which evicts it.

A block is cached as soon as it is full and computed, while its request still runs, and is never written
again. The last block of a request that leaves is cached with the tokens that it holds; a request that
starts with the same tokens reuses the block and appends to it.

A model with recurrent states continues only where both the blocks and a snapshot of the state are cached
(`state_slots.py`). Snapshots are taken at the ends of cached blocks: of full ones where a prompt's chunk is
made to end, and of the last block of a request that leaves, which is cached only together with one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from genserve.completion import CacheMatch, CacheMatchEnd
from genserve.engine.engine_request import BlockTable, Request
from genserve.engine.logits_model import LogitsSizes
from genserve.engine.prefix_cache import PrefixCache, StoredBlocks, block_key
from genserve.engine.state_slots import NO_SLOT, SequenceState, StateSlots

_SHOWN_TOKENS = 16  # of each prompt, where they begin to differ
# A chunk that ends for a snapshot costs a forward, so a snapshot is to spare at least so many blocks, and
# there is one in so many blocks of a long prompt as long as slots are free: 64 and 1,024 tokens on the CPU.
_MIN_SPARED_BLOCKS = 4
_SNAPSHOT_BLOCKS = 64


def max_tokens_per_sequence(logits: LogitsSizes, num_sequences: int) -> int:
    """Return up to which length `num_sequences` sequences always fit into the KV cache together."""
    return min(logits.max_length, logits.num_blocks // num_sequences * logits.block_size)


class KVCacheManager:
    """Allocates blocks to requests and frees them. Belongs to the engine's thread.

    Attributes:
        block_size: tokens of a block.
        copies: pairs (source, target) of blocks to copy, in this order, before the next forward.
        filled: the blocks that were computed and cached, with their keys, for a `DiskCache` to store before
            they are written again; None: there is none.
        kept: the slots of the snapshots that were taken at the ends of full blocks, with the keys of these,
            for the same.
        states: the slots of recurrent states; none without them.
        has_states: whether the model has recurrent states.
        num_snapshot_hits: how many requests have started from a snapshot.
        num_recomputed_tokens: how many tokens with cached blocks had no snapshot to continue from.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_state_slots: int = 0,
        prefix_cache: bool = True,
        stores_blocks: bool = False,
    ) -> None:
        """Start with all blocks and slots free; without `prefix_cache`, only logits requests share blocks."""
        self.block_size = block_size
        self.copies: list[tuple[int, int]] = []
        self.filled: list[tuple[bytes, int]] | None = [] if stores_blocks else None
        self.kept: list[tuple[bytes, int]] = []
        self.states = StateSlots(num_state_slots)
        self.has_states = num_state_slots > 0
        self.num_snapshot_hits = 0
        self.num_recomputed_tokens = 0
        self._shares_blocks = prefix_cache
        self._prefix_cache = PrefixCache()
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

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

    def has_room(self, request: Request, *, num_spare: int) -> bool:
        """Whether `allocate` would allocate the blocks of a waiting request now."""
        block_ids, _ = self._cached_prefix(request)
        return self._has_room(request, block_ids, num_spare=num_spare)

    def _has_room(self, request: Request, cached: Sequence[int], *, num_spare: int) -> bool:
        num_new = self.num_blocks_for(len(request.token_ids)) - len(cached)
        num_reused = sum(not self._ref_counts[block] for block in cached)
        return len(self._free) - num_reused - num_new >= num_spare

    def allocate(self, request: Request, *, num_spare: int) -> bool:
        """Allocate blocks for all tokens of a waiting request, cached blocks where possible.

        Sets its `num_computed_tokens`. `num_spare` blocks must stay free.

        Returns:
            False: there are too few free blocks; nothing has changed.
        """
        table = request.block_table
        block_ids, num_computed = self._cached_prefix(request)
        if not self._has_room(request, block_ids, num_spare=num_spare):
            return False
        if request.wants_cache_match:
            request.cache_match = self._match(request)
        num_new = self.num_blocks_for(len(request.token_ids)) - len(block_ids)
        for block in block_ids:
            self._touch(block)
        if self.has_states:
            table.state = self._first_state(request, block_ids, num_computed)
        table.num_cached = num_computed // self.block_size
        for block in block_ids[table.num_cached :]:
            self._evict(block)  # the request will write it
        table.block_ids = [*block_ids, *(self._new_block() for _ in range(num_new))]
        table.num_rewrites += 1
        request.num_computed_tokens = num_computed
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the next tokens of a running request; shared ones that it writes are copied.

        Returns:
            False: there are too few free blocks; blocks already allocated are kept.
        """
        table, num_computed = request.block_table, request.num_computed_tokens
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

    def schedule_states(self, requests: Iterable[Request], drafts: Iterable[Sequence[int]]) -> None:
        """Choose the slots that the next forward writes; a request with a draft also keeps the one it has.

        The model must have states.
        """
        for request, draft in zip(requests, drafts, strict=True):
            state = request.block_table.state
            assert state is not None
            self._forget_partial(self.states.schedule(state, keep=bool(draft)))

    def _forget_partial(self, dropped: int | None) -> None:
        """Evict a partly filled block whose snapshot was dropped: nothing can continue there."""
        if dropped is not None and self._prefix_cache.is_partial(dropped):
            self._prefix_cache.evict(dropped)
            self._free.move_to_end(dropped, last=False)

    def go_back(self, request: Request) -> None:
        """Continue before the last forward, which has written a state after a wrong draft.

        The tokens that it has computed are pending again, and `num_replayed_tokens` counts them. The model
        must have states.
        """
        state = request.block_table.state
        assert state is not None
        self.states.go_back(state)
        request.num_replayed_tokens = request.num_computed_tokens - state.num_tokens
        request.num_computed_tokens = state.num_tokens

    def tokens_to_snapshot(self, request: Request) -> int:
        """Return the most tokens of the next chunk of a prompt: it ends where a snapshot is to be taken.

        That is the last border of blocks before the prompt's end, where other choices and other next turns
        continue; the junction with the blocks that were cached without a state, since a second request has
        come there; and borders at regular distances while slots are free.
        """
        state, num_computed = request.block_table.state, request.num_computed_tokens
        if state is None or not self._uses_prefix_cache(request):
            return request.num_pending
        last = (len(request.token_ids) - 1) // self.block_size * self.block_size
        lengths = [last, state.junction]
        if self.states.has_free:
            distance = _SNAPSHOT_BLOCKS * self.block_size
            lengths.append((num_computed // distance + 1) * distance)
        shortest = max(num_computed + 1, state.num_kept + _MIN_SPARED_BLOCKS * self.block_size)
        state.next_snapshot = min((n for n in lengths if shortest <= n <= last), default=0)
        return state.next_snapshot - num_computed if state.next_snapshot else request.num_pending

    def cache_blocks(self, request: Request) -> None:
        """Put the full and computed blocks of a request into the prefix cache; take over its new state."""
        table = request.block_table
        num_full = request.num_computed_tokens // self.block_size
        if num_full > table.num_cached and self._uses_prefix_cache(request):
            owner, size = request.group.share.name, self.block_size
            for index in range(table.num_cached, num_full):
                block, key = table.block_ids[index], self._key(request, index)
                is_new = self._prefix_cache.insert(
                    block,
                    key,
                    parent=self._parent(request, index),
                    token_ids=request.token_ids[index * size : (index + 1) * size],
                    owner=owner,
                )
                if is_new and self.filled is not None:
                    self.filled.append((key, block))
            table.num_cached = num_full
        if table.state is not None and table.state.target != NO_SLOT:
            self._take_over_state(request, table.state)

    def fork(self, source: Request, target: Request) -> None:
        """Have `target` hold the computed blocks of `source`; whichever writes first gets a copy."""
        self.cache_blocks(source)
        table, own = source.block_table, target.block_table
        block_ids = table.block_ids[: self.num_blocks_for(source.num_computed_tokens)]
        for block in block_ids:
            self._touch(block)
        self._free_blocks(own.block_ids)
        own.block_ids, own.keys, own.num_cached = block_ids, table.keys[: table.num_cached], table.num_cached
        own.num_rewrites += 1
        if table.state is not None:
            own.state = self.states.fork(table.state, own.state)
        target.num_computed_tokens = source.num_computed_tokens

    def free(self, request: Request) -> None:
        """Free the blocks of a request; its computed tokens stay cached until they are evicted.

        If its forward has failed, a state that this has overwritten is lost.
        """
        table, state = request.block_table, request.block_table.state
        if table.block_ids:
            if state is not None and state.target != NO_SLOT:
                self.states.go_back(state)
            self.cache_blocks(request)
            if state is None or state.slot != NO_SLOT:
                self._cache_last_block(request)
            if state is not None:
                self._keep_last_state(request, state)
                self.states.free(state)
                request.num_replayed_tokens = 0
            self._free_blocks(table.block_ids)
        request.block_table = BlockTable()

    def is_cached(self, key: bytes) -> bool:
        """Whether a full block is cached. Safe from any thread, where the answer may be true no more."""
        return self._prefix_cache.find(key) is not None

    def has_evicted_filled(self) -> bool:
        """Whether a block in `filled` was evicted, so that what is written next may overwrite it."""
        return any(self._prefix_cache.find(key) != block for key, block in self.filled or ())

    def has_snapshot(self, key: bytes) -> bool:
        """Whether there is a state at the end of a full block. Safe from any thread, as `is_cached`."""
        block = self._prefix_cache.find(key)
        return block is not None and block in self.states

    def restore(self, stored: StoredBlocks) -> tuple[list[int], list[int], int]:
        """Cache blocks of a prompt that come from files, in free blocks that the prompt does not have cached.

        Returns:
            Which of `stored.rows` have a block now, these blocks, and the slot of `stored.state` or NO_SLOT:
            blocks and slot are to be overwritten.
        """
        keys, size = stored.keys, self.block_size
        held = [self._prefix_cache.find(key) for key in keys]
        self._keep(held)
        num_free = len(self._free) - sum(block in self._free for block in held)
        missing = [(row, index) for row, index in enumerate(stored.indices) if held[index] is None]
        rows: list[int] = []
        for row, index in missing[:num_free]:
            block = self._evict_next()
            self._prefix_cache.insert(
                block,
                keys[index],
                parent=stored.parents[index],
                token_ids=stored.token_ids[index * size : (index + 1) * size],
                owner=stored.owner,
            )
            self._free[block] = None
            held[index] = block
            rows.append(row)
        self._keep(held)
        slot, last = NO_SLOT, None if stored.state is None else held[stored.state_index]
        if last is not None and last not in self.states:
            slot, dropped = self.states.restore(last)
            self._forget_partial(dropped)
        block_ids = [block for block in (held[stored.indices[row]] for row in rows) if block is not None]
        return rows, block_ids, slot

    def _keep(self, block_ids: Sequence[int | None]) -> None:
        """Have the free ones of a prompt's blocks count as used now, and its first block as used last."""
        for block in reversed(block_ids):
            if block is not None and block in self._free:
                self._free.move_to_end(block)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are cached."""
        return self._cached_prefix(request)[1]

    def key_at(self, request: Request, num_computed_tokens: int) -> bytes | None:
        """Return the key of the first block that is not computed; None: the request does not fill it."""
        index = num_computed_tokens // self.block_size
        if not self._uses_prefix_cache(request) or (index + 1) * self.block_size > len(request.token_ids):
            return None
        return self._key(request, index)

    def next_key(self, request: Request, num_computed_tokens: int) -> bytes | None:
        """Return the key of the first block that is not cached; None: the request does not fill it.

        `num_computed_tokens` are cached. Of a model with states, so may be more blocks, without a state.
        """
        if self.has_states:
            num_computed_tokens = max(num_computed_tokens, self._num_matched(request))
        return self.key_at(request, num_computed_tokens)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if the blocks are in a state that must not occur; for tests.

        Only `requests` may have blocks.
        """
        tables = [(request, request.block_table) for request in requests]
        held = [0] * len(self._ref_counts)
        for block in chain.from_iterable(table.block_ids for _, table in tables):
            held[block] += 1
        assert held == self._ref_counts, "a block is counted for requests that do not hold it"
        free = [block for block, count in enumerate(held) if not count]
        assert sorted(self._free) == free, "the free queue differs from the blocks that no request holds"
        self._prefix_cache.check_integrity()
        if self.has_states:
            self._check_states(tables)
        for request, table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), "a request holds a block twice"
            num_held = len(table.block_ids) * self.block_size
            assert request.num_computed_tokens <= num_held, "computed tokens are in no block"
            for block in table.block_ids[request.num_computed_tokens // self.block_size :]:
                assert block not in self._prefix_cache, "a block that is still written is cached"

    def _uses_prefix_cache(self, request: Request) -> bool:
        return self._shares_blocks or request.always_shares_blocks

    def _reads_prefix_cache(self, request: Request) -> bool:
        return self._uses_prefix_cache(request) and not request.skip_reading_prefix_cache

    def _cached_blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Return the cached blocks that the first tokens of a request fill, up to the first missing one."""
        block_ids: list[int] = []
        for index in range(num_tokens // self.block_size):
            block = self._prefix_cache.find(self._key(request, index))
            if block is None:
                break
            block_ids.append(block)
        return block_ids

    def _cached_prefix(self, request: Request) -> tuple[list[int], int]:
        """Return the cached blocks that a request starts with, and how many of its tokens they hold.

        At least one token is left to compute, since the request needs the logits after it. So a last block
        that is cached whole, or with some of the tokens that follow, is reused and written if it is free.
        """
        if not self._reads_prefix_cache(request):
            return [], 0
        if self.has_states:
            return self._cached_states(request)
        num_tokens, size = len(request.token_ids), self.block_size
        block_ids = self._cached_blocks(request, num_tokens)
        num_cached = len(block_ids) * size
        if num_cached == num_tokens:
            if not self._ref_counts[block_ids[-1]]:
                return block_ids, num_tokens - 1
            return block_ids[:-1], num_cached - size
        if num_cached < num_tokens - 1:
            parent = self._parent(request, len(block_ids))
            tokens = request.token_ids[num_cached : num_cached + size]
            found = self._prefix_cache.find_partial(parent, tokens)
            if found is not None:
                num_shared, block = found
                return [*block_ids, block], min(num_cached + num_shared, num_tokens - 1)
        return block_ids, num_cached

    def _cached_states(self, request: Request) -> tuple[list[int], int]:
        """Return the same of a model with states, which continues only from a snapshot."""
        size, longest = self.block_size, len(request.token_ids) - 1
        block_ids = self._cached_blocks(request, longest)
        while True:
            first = len(block_ids) * size
            tokens = request.token_ids[first : min(first + size, longest)]
            found = self._prefix_cache.find_partial(self._parent(request, len(block_ids)), tokens)
            if found is not None:
                return [*block_ids, found[1]], first + found[0]
            if not block_ids or block_ids[-1] in self.states:
                return block_ids, first
            block_ids.pop()

    def _num_matched(self, request: Request) -> int:
        """Return how many tokens of a request are in full cached blocks, with or without a state."""
        if not self._reads_prefix_cache(request):
            return 0
        return len(self._cached_blocks(request, len(request.token_ids) - 1)) * self.block_size

    def _first_state(self, request: Request, block_ids: Sequence[int], num_computed: int) -> SequenceState:
        """Return the state with which a request starts: the snapshot at the end of its cached blocks."""
        matched = self._num_matched(request)
        self.num_recomputed_tokens += max(0, matched - num_computed)
        state = SequenceState(num_tokens=num_computed, num_kept=num_computed, junction=matched)
        if block_ids:
            self.num_snapshot_hits += 1
            state.slot = self.states.share(block_ids[-1])
        return state

    def _take_over_state(self, request: Request, state: SequenceState) -> None:
        """Continue after the last forward of a request; keep a snapshot where one is planned."""
        self.states.advance(state, request.num_computed_tokens)
        request.num_replayed_tokens = 0
        if state.num_tokens == state.next_snapshot:
            self._keep_state(request, state)

    def _keep_state(self, request: Request, state: SequenceState) -> None:
        """Keep the state at the end of a full block as a snapshot, if the block is cached."""
        key = self._key(request, state.num_tokens // self.block_size - 1)
        block = self._prefix_cache.find(key)
        if block is not None:
            if self.filled is not None and block not in self.states:
                self.kept.append((key, state.slot))
            self.states.keep(block, state)

    def _keep_last_state(self, request: Request, state: SequenceState) -> None:
        """Keep the state of a request that leaves, at the end of its last block, if that is cached."""
        index, num_last = divmod(state.num_tokens, self.block_size)
        if state.slot == NO_SLOT or not self._uses_prefix_cache(request):
            return
        if not num_last:
            self._keep_state(request, state)
        elif self._prefix_cache.is_partial(request.block_table.block_ids[index]):
            self.states.keep(request.block_table.block_ids[index], state)

    def _check_states(self, tables: Sequence[tuple[Request, BlockTable]]) -> None:
        held = [(request, table.state) for request, table in tables if table.state is not None]
        self.states.check_integrity(state for _, state in held)
        for request, state in held:
            assert request.num_computed_tokens == state.num_tokens, "a state is behind other tokens"
            assert (state.slot == NO_SLOT) == (not state.num_tokens), "a state has no slot, or zero has one"
        for block in range(len(self._ref_counts)):
            if block in self.states:
                assert block in self._prefix_cache, "a snapshot outlived its block"
            else:
                assert not self._prefix_cache.is_partial(block), "a partly filled block has no snapshot"

    def _match(self, request: Request) -> CacheMatch:
        """Return how far the prompt of a waiting request is cached, and what is different there."""
        if not self._reads_prefix_cache(request):
            return CacheMatch(matched_tokens=0, end=CacheMatchEnd.OFF)
        prompt, owner = request.token_ids[: request.num_prompt_tokens], request.group.share.name
        num_blocks = len(self._cached_blocks(request, len(prompt)))
        at, parent = num_blocks * self.block_size, self._parent(request, num_blocks)
        nearest = self._prefix_cache.nearest(parent, prompt[at:], owner=owner) if at < len(prompt) else None
        at += nearest.num_common if nearest else 0
        if at == len(prompt):
            return CacheMatch(matched_tokens=at, end=CacheMatchEnd.COMPLETE)
        shown = tuple(prompt[at : at + _SHOWN_TOKENS])
        if nearest is None:
            return CacheMatch(matched_tokens=at, end=CacheMatchEnd.UNKNOWN, prompt_token_ids=shown)
        cached, following = nearest.rest, nearest
        while following.rest and following.key and len(cached) < _SHOWN_TOKENS:
            behind = self._prefix_cache.nearest(following.key, (), owner=owner)
            if behind is None:
                break
            cached, following = cached + behind.rest, behind
        return CacheMatch(
            matched_tokens=at,
            end=CacheMatchEnd.DIFFERENT if nearest.goes_on else CacheMatchEnd.UNKNOWN,
            prompt_token_ids=shown,
            cached_token_ids=cached[:_SHOWN_TOKENS],
        )

    def _cache_last_block(self, request: Request) -> None:
        """Cache the partly filled last block of a request that leaves."""
        table, num_computed = request.block_table, request.num_computed_tokens
        index, num_last = divmod(num_computed, self.block_size)
        if num_last and self._uses_prefix_cache(request) and self._ref_counts[table.block_ids[index]] == 1:
            parent = self._parent(request, index)
            tokens = request.token_ids[num_computed - num_last : num_computed]
            owner = request.group.share.name
            self._prefix_cache.insert_partial(table.block_ids[index], parent, tokens, owner=owner)

    def _key(self, request: Request, index: int) -> bytes:
        """Return the key of a block that the request fills."""
        keys, size = request.block_table.keys, self.block_size
        while len(keys) <= index:
            first = len(keys) * size
            parent = self._parent(request, len(keys))
            keys.append(block_key(parent, request.token_ids[first : first + size]))
        return keys[index]

    def _parent(self, request: Request, index: int) -> bytes:
        return self._key(request, index - 1) if index else request.cache_root

    def _touch(self, block: int) -> None:
        if not self._ref_counts[block]:
            del self._free[block]
        self._ref_counts[block] += 1

    def _new_block(self) -> int:
        block = self._evict_next()
        self._ref_counts[block] = 1
        return block

    def _evict_next(self) -> int:
        """Pop the least recently used free block, and evict it."""
        block, _ = self._free.popitem(last=False)
        self._evict(block)
        return block

    def _evict(self, block: int) -> None:
        """Evict the tokens of a block and its snapshot; does nothing if it is not cached."""
        self._prefix_cache.evict(block)
        self.states.drop(block)

    def _free_blocks(self, block_ids: Sequence[int]) -> None:
        """Release blocks; a request's last blocks are reused before its first, uncached ones before all."""
        for block in reversed(block_ids):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free[block] = None
                if block not in self._prefix_cache:
                    self._free.move_to_end(block, last=False)
