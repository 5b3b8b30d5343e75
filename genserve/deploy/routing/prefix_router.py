"""Prefix router: chooses the replica for a prompt, by its cached blocks and the load of the replicas.

The router remembers which blocks it has sent to which replica, by the same keys as the replicas' own prefix
caches (`genserve/engine/prefix_cache.py`). Its memory of a replica holds as many keys as that replica's
KV cache has blocks and forgets the least recently used ones first, like the cache itself.

It has no clock, no threads and no I/O. `calls/routed_replicas.py` calls it; `genserve plan` simulates
with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from genserve.deploy.replica.replica_load import ReplicaLoad

ReplicaId = TypeVar("ReplicaId", bound=Hashable)


class PrefixRouter(Generic[ReplicaId]):
    """Chooses replicas for prompts.

    The cost of a replica is what a prompt adds to it and what the prompt waits for there, in prompt tokens:

        cost = new_weight x new + waiting_tokens + decode_tokens x (running + waiting)
               + blocked_weight x missing

    - `new`: tokens of the prompt's full blocks that the replica has not cached. They count more than waiting
      tokens, because they delay all later prompts too, not only this one;
    - `waiting_tokens`: tokens of the prompts in its queue, which are computed first;
    - `decode_tokens`: how many prompt tokens each of its sequences delays the replica by, with the tokens
      that it still generates;
    - `missing`: tokens of `new` and `waiting_tokens` for which its KV cache has no free blocks. They wait for
      sequences to end, hence the weight.

    The replica with the lowest cost is chosen. So a cached prefix attracts its prompts until the queue in
    front of them costs more than the prefix; then another replica computes the prefix once, and both share
    it. The default weights are the best that were found with the traces of benchmarks/routing.py.

    Prefill and decode work are added in one unit, as in NVIDIA Dynamo's KV router ("overlap weight x
    prefill blocks + decode blocks"). sglang-router's `cache_aware` and Ray's `PrefixCacheAffinityRouter`
    switch between the longest match and the shortest queue at thresholds of imbalance instead, and llm-d adds
    weighted scores of 0 to 1 that are relative to the other replicas; neither knows what a match saves.
    """

    def __init__(
        self,
        block_size: int,
        *,
        num_blocks: int,
        new_weight: float = 2.0,
        decode_tokens: float = 64.0,
        blocked_weight: float = 4.0,
    ) -> None:
        """Start with no replica known.

        Args:
            block_size: tokens of a block of the KV cache.
            num_blocks: blocks of the KV cache of a replica whose load does not have them.
            new_weight: the cost of a token that must be computed, as a multiple of a waiting token's cost.
            decode_tokens: prompt tokens that a sequence delays its replica by, while it waits or runs.
            blocked_weight: the additional cost of a token without a free block.
        """
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._new_weight = new_weight
        self._decode_tokens = decode_tokens
        self._blocked_weight = blocked_weight
        # A replica is a bit, so that one look-up for each key of a prompt finds all replicas that have it.
        self._bits: dict[ReplicaId, int] = {}
        self._holders: dict[bytes, int] = {}
        self._keys: dict[ReplicaId, OrderedDict[bytes, None]] = {}  # the least recently used first

    def choose(self, keys: Sequence[bytes], replicas: Mapping[ReplicaId, ReplicaLoad]) -> ReplicaId:
        """Return the replica with the lowest cost.

        Args:
            keys: the keys of the prompt's full blocks, in order.
            replicas: the load of each replica that may be chosen; at least one.
        """
        return self.rank(keys, replicas)[0]

    def rank(self, keys: Sequence[bytes], replicas: Mapping[ReplicaId, ReplicaLoad]) -> list[ReplicaId]:
        """Return all `replicas`, the one with the lowest cost first.

        Among replicas with the same cost, the one that was sent the fewest blocks is first.
        """
        cached = self.cached_tokens(keys, replicas)
        prompt_tokens = len(keys) * self._block_size
        costs = {
            replica: (self._cost(prompt_tokens - cached[replica], load), self._num_keys(replica))
            for replica, load in replicas.items()
        }
        return sorted(costs, key=costs.__getitem__)

    def cached_tokens(self, keys: Sequence[bytes], replicas: Iterable[ReplicaId]) -> dict[ReplicaId, int]:
        """Return how many tokens at the beginning of a prompt each replica has cached, as far as is known."""
        bits = self._bits
        tokens = dict.fromkeys(replicas, 0)
        left = {bits[replica]: replica for replica in tokens if replica in bits}
        mask = sum(left)
        for index, key in enumerate(keys):
            holders = self._holders.get(key, 0) & mask
            if holders != mask:
                for bit in [bit for bit in left if not bit & holders]:
                    tokens[left.pop(bit)] = index * self._block_size
                mask = holders
            if not mask:
                break
        for replica in left.values():
            tokens[replica] = len(keys) * self._block_size
        return tokens

    def routed(self, replica: ReplicaId, keys: Sequence[bytes], *, num_blocks: int = 0) -> None:
        """Record that a prompt was sent to a replica, which will cache the blocks with `keys`.

        `num_blocks` is the size of the replica's KV cache; 0: the router's own `num_blocks`.
        """
        num_blocks = num_blocks or self._num_blocks
        if replica not in self._bits:
            self._bits[replica] = 1 << _lowest_zero(sum(self._bits.values()))
            self._keys[replica] = OrderedDict()
        bit, known = self._bits[replica], self._keys[replica]
        # The cache reuses the last blocks of a request before its first, so its first count as used last.
        for key in reversed(keys[:num_blocks]):
            known[key] = None
            known.move_to_end(key)
            self._holders[key] = self._holders.get(key, 0) | bit
        while len(known) > num_blocks:
            self._drop(known.popitem(last=False)[0], bit)

    def forget(self, replica: ReplicaId) -> None:
        """Forget a replica, which has ended; does nothing if it is not known."""
        bit = self._bits.pop(replica, None)
        if bit is not None:
            for key in self._keys.pop(replica):
                self._drop(key, bit)

    def _cost(self, new_tokens: int, load: ReplicaLoad) -> float:
        tokens = new_tokens + load.waiting_tokens
        num_blocks = load.num_blocks or self._num_blocks
        free_tokens = (1 - load.kv_usage) * num_blocks * self._block_size
        missing = max(0.0, tokens - free_tokens)
        sequences = load.running + load.waiting
        work = self._new_weight * new_tokens + load.waiting_tokens + self._decode_tokens * sequences
        return work + self._blocked_weight * missing

    def _num_keys(self, replica: ReplicaId) -> int:
        return len(self._keys.get(replica, ()))

    def _drop(self, key: bytes, bit: int) -> None:
        holders = self._holders[key] & ~bit
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]


def _lowest_zero(mask: int) -> int:
    """Return the position of the lowest bit of `mask` that is 0."""
    return (~mask & (mask + 1)).bit_length() - 1
