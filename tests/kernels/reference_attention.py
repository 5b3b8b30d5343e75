"""Reference attention: PagedAttention in float64 numpy, and the layout of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PagedAttentionCall",
    "new_keys_and_values",
    "own_slots",
    "read_cache",
    "reference_attention",
    "write_cache",
]

Array = NDArray[Any]


@dataclass
class PagedAttentionCall:
    """The inputs and attributes of one call, by their names in the operator.

    Shapes, for B sequences of T tokens together: query [T, (Hq + 2 Hk) * D]; caches
    [num_blocks, block_size, Hk, D]; block_table [B, max_blocks]; scales [num_blocks, block_size, Hk].
    """

    query: Array
    key_cache: Array
    value_cache: Array
    cumulative_sequence_length: Array
    past_seqlens: Array
    block_table: Array
    num_heads: int
    kv_num_heads: int
    cos_cache: Array | None = None
    sin_cache: Array | None = None
    q_norm_weight: Array | None = None
    k_norm_weight: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    v_norm_weight: Array | None = None
    key_scales: Array | None = None
    value_scales: Array | None = None
    scale: float = 0.0
    softcap: float = 0.0
    local_window_size: int = -1
    local_chunk_size: int = -1
    shares_cache: bool = False
    qk_norm_epsilon: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.query.shape[1] // (self.num_heads + 2 * self.kv_num_heads)

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[1]

    @property
    def num_sequences(self) -> int:
        return len(self.past_seqlens)

    def tokens_of(self, sequence: int) -> slice:
        """The rows of `query` that belong to a sequence."""
        return slice(*(int(edge) for edge in self.cumulative_sequence_length[sequence : sequence + 2]))

    def positions_of(self, sequence: int) -> NDArray[np.int64]:
        tokens = self.tokens_of(sequence)
        return int(self.past_seqlens[sequence]) + np.arange(tokens.stop - tokens.start)


# Inside a block each head has its own run of memory: keys in groups of 16 tokens as [D][16], values as
# [token][D], scales as [token].


def keys_of(call: PagedAttentionCall) -> Array:
    """The keys as a view [num_blocks, Hk, group, D, 16]."""
    blocks, size, heads, dim = call.key_cache.shape
    return call.key_cache.reshape(blocks, heads, size // 16, dim, 16)


def values_of(call: PagedAttentionCall) -> Array:
    """The values as a view [num_blocks, Hk, token, D]."""
    blocks, size, heads, dim = call.value_cache.shape
    return call.value_cache.reshape(blocks, heads, size, dim)


def scales_of(scales: Array) -> Array:
    """The scales as a view [num_blocks, Hk, token]."""
    blocks, size, heads = scales.shape
    return scales.reshape(blocks, heads, size)


def slots_of(call: PagedAttentionCall, sequence: int, positions: Array) -> tuple[Array, Array]:
    """The block of each position, and the token's slot in it."""
    return call.block_table[sequence][positions // call.block_size], positions % call.block_size


def read_cache(call: PagedAttentionCall, sequence: int, positions: Array) -> tuple[Array, Array]:
    """The keys and values of a sequence at these positions, [n, Hk, D] each, float64."""
    block, place = slots_of(call, sequence, positions)
    keys = keys_of(call)[block, :, place // 16, :, place % 16].astype(np.float64)
    values = values_of(call)[block, :, place].astype(np.float64)
    if call.key_scales is not None and call.value_scales is not None:
        keys *= scales_of(call.key_scales)[block, :, place][..., None]
        values *= scales_of(call.value_scales)[block, :, place][..., None]
    return keys, values


def write_cache(
    call: PagedAttentionCall, sequence: int, positions: Array, keys: Array, values: Array
) -> None:
    """Write keys and values, [n, Hk, D] each, rounded to the type of the cache."""
    block, place = slots_of(call, sequence, positions)
    if call.key_scales is not None and call.value_scales is not None:
        keys, key_scales = rounded_to_int8(keys)
        values, value_scales = rounded_to_int8(values)
        scales_of(call.key_scales)[block, :, place] = key_scales
        scales_of(call.value_scales)[block, :, place] = value_scales
    keys_of(call)[block, :, place // 16, :, place % 16] = keys
    values_of(call)[block, :, place] = values


def rounded_to_int8(x: Array) -> tuple[Array, Array]:
    """Integers in -127..127 and their scales, one per token and head."""
    largest = np.abs(x).max(axis=-1)
    return np.rint(x * (127 / np.where(largest == 0, 1, largest))[..., None]), largest / 127


def own_slots(call: PagedAttentionCall) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """The elements of the key cache, the value cache and the scales that belong to the call's new tokens."""
    mine = np.zeros((call.key_cache.shape[0], call.block_size), bool)
    for sequence in range(call.num_sequences):
        mine[slots_of(call, sequence, call.positions_of(sequence))] = True
    _, _, heads, dim = call.key_cache.shape
    tokens = np.broadcast_to(mine[:, None, :], (len(mine), heads, call.block_size))
    groups = tokens.reshape(len(mine), heads, -1, 1, 16)
    keys = np.broadcast_to(groups, (*groups.shape[:3], dim, 16)).reshape(call.key_cache.shape)
    values = np.broadcast_to(tokens[..., None], (*tokens.shape, dim)).reshape(call.value_cache.shape)
    return keys, values, tokens.reshape(len(mine), call.block_size, heads)


def heads_of(call: PagedAttentionCall) -> tuple[Array, Array, Array]:
    """Queries [T, Hq, D], keys [T, Hk, D] and values [T, Hk, D] of the input, float64."""
    count = call.num_heads + 2 * call.kv_num_heads
    heads = call.query.astype(np.float64).reshape(len(call.query), count, call.head_dim)
    query, keys, values = np.split(heads, [call.num_heads, call.num_heads + call.kv_num_heads], axis=1)
    return query, keys, values


def normed(x: Array, weight: Array | None, epsilon: float) -> Array:
    if weight is None:
        return x
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def rotated(call: PagedAttentionCall, x: Array, positions: Array) -> Array:
    """`x`, [n, heads, D], with the first R numbers of each head rotated by their position."""
    if call.cos_cache is None or call.sin_cache is None:
        return x
    cos, sin = (table[positions].astype(np.float64)[:, None] for table in (call.cos_cache, call.sin_cache))
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def all_positions(call: PagedAttentionCall) -> Array:
    positions = [call.positions_of(sequence) for sequence in range(call.num_sequences)]
    return np.concatenate([np.zeros(0, np.int64), *positions])


def new_keys_and_values(call: PagedAttentionCall) -> tuple[Array, Array]:
    """The new keys and values, [T, Hk, D] each, before they are rounded to the type of the cache."""
    _, keys, values = heads_of(call)
    values = normed(values, call.v_norm_weight, call.qk_norm_epsilon)
    return rotated(call, normed(keys, call.k_norm_weight, call.qk_norm_epsilon), all_positions(call)), values


def reference_attention(call: PagedAttentionCall) -> Array:
    """The output [T, Hq * D] over a cache that includes the keys and values of the new tokens."""
    query, _, _ = heads_of(call)
    query = rotated(call, normed(query, call.q_norm_weight, call.qk_norm_epsilon), all_positions(call))
    query = query * (call.scale or call.head_dim**-0.5)
    output = np.zeros_like(query)
    for sequence in range(call.num_sequences):
        tokens, positions = call.tokens_of(sequence), call.positions_of(sequence)
        if not len(positions):
            continue
        first = 0
        if call.local_window_size >= 0:
            first = max(0, int(positions[0]) - call.local_window_size + 1)
        if call.local_chunk_size > 0:
            first = max(first, int(positions[0]) // call.local_chunk_size * call.local_chunk_size)
        reach = np.arange(first, int(call.past_seqlens[sequence]) + len(positions))
        keys, values = read_cache(call, sequence, reach)
        # Matrix products [Hk, group * T, D] x [Hk, D, keys], since einsum is many times slower.
        rows = query[tokens].swapaxes(0, 1).reshape(call.kv_num_heads, -1, call.head_dim)
        scores = (rows @ keys.transpose(1, 2, 0)).reshape(call.num_heads, len(positions), len(reach))
        if call.softcap:
            scores = call.softcap * np.tanh(scores / call.softcap)
        distance = positions[:, None] - reach
        if call.alibi_slopes is not None:
            scores = scores - call.alibi_slopes.astype(np.float64)[:, None, None] * distance
        hidden = distance < 0
        if call.local_window_size >= 0:
            hidden |= distance >= call.local_window_size
        if call.local_chunk_size > 0:
            hidden |= reach < (positions - positions % call.local_chunk_size)[:, None]
        scores = np.where(hidden, -np.inf, scores)
        if call.sinks is not None:  # of another key, without a value
            sinks = np.broadcast_to(call.sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sinks], axis=-1)
            values = np.concatenate([values, np.zeros_like(values[:1])])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        found = weights.reshape(call.kv_num_heads, -1, weights.shape[-1]) @ values.swapaxes(0, 1)
        output[tokens] = found.reshape(call.num_heads, len(positions), -1).swapaxes(0, 1)
    return output.reshape(len(query), call.num_heads * call.head_dim)
