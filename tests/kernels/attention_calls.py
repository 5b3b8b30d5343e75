"""Attention calls: models and sequences for tests of PagedAttention, and its plain C function."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.c_types import Error, Tensor, Threads, library
from tests.kernels.reference_attention import PagedAttentionCall, write_cache

__all__ = ["CACHES", "FAMILIES", "INPUTS", "Model", "bits", "make_call", "run"]

# ------------------------------------------------------------------------------------- the plain C function


class Attributes(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("kv_num_heads", ctypes.c_int64),
        ("do_rotary", ctypes.c_int64),
        ("local_window_size", ctypes.c_int64),
        ("local_chunk_size", ctypes.c_int64),
        ("shares_cache", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("qk_norm_epsilon", ctypes.c_float),
    )


INPUTS = (
    "query",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "q_norm_weight",
    "k_norm_weight",
    "alibi_slopes",
    "key_scales",
    "value_scales",
    "attention_metadata",
    "sinks",
    "v_norm_weight",
)
CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")


def attributes_of(call: PagedAttentionCall) -> Attributes:
    """The attributes of a call as their C structure."""
    return Attributes(
        call.num_heads,
        call.kv_num_heads,
        call.cos_cache is not None,
        call.local_window_size,
        call.local_chunk_size,
        call.shares_cache,
        call.scale,
        call.softcap,
        call.qk_norm_epsilon,
    )


def run(
    call: PagedAttentionCall, *, threads: int = 2, isa: str = "", outputs: dict[str, Any] | None = None
) -> NDArray[Any]:
    """Run a call, which writes into its caches; `outputs` replaces bound outputs.

    Returns:
        The output [T, Hq * D].

    Raises:
        ValueError: the operator refused; has its message.
    """
    inputs = (Tensor * len(INPUTS))(*(Tensor.of(getattr(call, name, None)) for name in INPUTS))
    written = 0 if call.shares_cache else call.kv_num_heads
    width = call.num_heads * (call.query.shape[1] // max(call.num_heads + 2 * written, 1))
    output = np.full((len(call.query), width), np.nan, call.query.dtype)
    bound = {"output": output, "key_cache": call.key_cache, "value_cache": call.value_cache}
    bound |= {"key_scales": call.key_scales, "value_scales": call.value_scales} | (outputs or {})
    attributes = attributes_of(call)
    error = Error()
    good = library(isa).genserve_paged_attention(
        ctypes.byref(attributes),
        inputs,
        (Tensor * len(bound))(*map(Tensor.of, bound.values())),
        ctypes.byref(Threads.of(threads)),
        ctypes.byref(error),
    )
    if not good:
        raise ValueError(error.message.decode())
    return output


# ------------------------------------------------------------------------------------- calls to test with


@dataclass(frozen=True)
class Model:
    """The common parameters of the calls of one model."""

    num_heads: int = 6
    kv_num_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    cache_type: str = "float16"
    query_type: str = "float32"
    rotary_dims: int = 0
    qk_norm: bool = False
    alibi: bool = False
    sinks: bool = False
    v_norm: bool = False
    attributes: dict[str, float] = field(default_factory=dict)


# The parameters of the exporter's families, with small sizes.
FAMILIES = {
    "llama": Model(rotary_dims=32),
    "llama, float32 cache": Model(9, 3, 64, cache_type="float32", rotary_dims=32),
    "llama, int8 cache": Model(rotary_dims=32, cache_type="int8"),
    "qwen3, float16 query": Model(7, 1, query_type="float16", rotary_dims=32, qk_norm=True),
    "bloom": Model(alibi=True, kv_num_heads=6, head_dim=40),
    "gemma2": Model(rotary_dims=32, attributes={"softcap": 50.0, "local_window_size": 70}),
    "gpt-oss": Model(8, 2, 32, rotary_dims=32, sinks=True, attributes={"local_window_size": 70}),
    "gemma4": Model(rotary_dims=32, qk_norm=True, v_norm=True, attributes={"scale": 1.0}),
    "llama4": Model(rotary_dims=32, attributes={"local_chunk_size": 70}),
    "mistral": Model(rotary_dims=24, head_dim=33, attributes={"local_window_size": 500}),
}


def garbage(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Values that must not be read: NaN, infinities, and huge numbers."""
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    return rng.choice(np.array([np.nan, np.inf, -np.inf, 60000, -60000], dtype), shape)


def make_call(
    model: Model, sequences: list[tuple[int, int]], *, seed: int = 0, spare_entries: int = 2
) -> PagedAttentionCall:
    """Sequences of (past, tokens), with a random history in blocks in random order.

    Everything else is garbage, including the block table's unused entries.
    """
    rng = np.random.default_rng(seed)
    size, heads, dim = model.block_size, model.kv_num_heads, model.head_dim
    needed = [-(-(past + tokens) // size) for past, tokens in sequences]
    num_blocks, max_blocks = sum(needed) + 3, max(needed, default=0) + spare_entries
    ids = rng.permutation(num_blocks).astype(np.int32)
    unused = np.array([-1, 2**31 - 1, -(2**31), num_blocks], np.int32)
    table = rng.choice(unused, (len(sequences), max_blocks))
    for sequence, count in enumerate(needed):
        table[sequence, :count], ids = ids[:count], ids[count:]
    cache = (num_blocks, size, heads, dim)
    tokens = sum(count for _, count in sequences)
    columns = (model.num_heads + 2 * heads) * dim
    longest = max((past + count for past, count in sequences), default=0)
    angles = np.arange(longest)[:, None] * 100.0 ** -np.linspace(0, 1, model.rotary_dims // 2)
    scales = model.cache_type == "int8"
    call = PagedAttentionCall(
        query=rng.standard_normal((tokens, columns)).astype(model.query_type),
        key_cache=garbage(rng, cache, model.cache_type),
        value_cache=garbage(rng, cache, model.cache_type),
        cumulative_sequence_length=np.cumsum([0, *(count for _, count in sequences)]).astype(np.int32),
        past_seqlens=np.array([past for past, _ in sequences], np.int32),
        block_table=table,
        num_heads=model.num_heads,
        kv_num_heads=heads,
        cos_cache=np.cos(angles).astype(np.float32) if model.rotary_dims else None,
        sin_cache=np.sin(angles).astype(np.float32) if model.rotary_dims else None,
        q_norm_weight=np.linspace(0.5, 1.5, dim).astype(np.float32) if model.qk_norm else None,
        k_norm_weight=np.linspace(1.4, 0.6, dim).astype(np.float32) if model.qk_norm else None,
        alibi_slopes=np.geomspace(0.5, 0.004, model.num_heads).astype(np.float32) if model.alibi else None,
        sinks=np.linspace(-2, 3, model.num_heads).astype(np.float32) if model.sinks else None,
        v_norm_weight=np.linspace(0.7, 1.2, dim).astype(np.float32) if model.v_norm else None,
        key_scales=garbage(rng, cache[:3], "float32") if scales else None,
        value_scales=garbage(rng, cache[:3], "float32") if scales else None,
        **model.attributes,
    )
    for sequence, (past, _) in enumerate(sequences):
        keys, values = rng.standard_normal((2, past, heads, dim))
        write_cache(call, sequence, np.arange(past), keys, values)
        if call.local_window_size > 0:  # blocks that no token sees any more may belong to others
            table[sequence, : max(0, past - call.local_window_size + 1) // size] = -1
        if call.local_chunk_size > 0:
            table[sequence, : past // call.local_chunk_size * call.local_chunk_size // size] = -1
    return call


def bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(f"u{array.itemsize}")
