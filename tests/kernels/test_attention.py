"""PagedAttention: compared with float64 numpy, equal bits in any call, and refusals."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.attention_calls import FAMILIES, Model, bits, make_call, run
from tests.kernels.c_types import instruction_sets
from tests.kernels.reference_attention import (
    PagedAttentionCall,
    new_keys_and_values,
    own_slots,
    read_cache,
    reference_attention,
    write_cache,
)
from tests.support.representatives import with_extended

MODELS = st.builds(
    lambda group, heads, **rest: Model(num_heads=group * heads, kv_num_heads=heads, **rest),
    group=st.sampled_from([1, 2, 3, 4, 7, 9, 50]),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 20, 33, 48, 64, 80, 128]),
    block_size=st.sampled_from([16, 32, 48, 64, 256]),
    cache_type=st.sampled_from(["float32", "float16", "int8"]),
    query_type=st.sampled_from(["float32", "float16"]),
    rotary_dims=st.sampled_from([0, 2, 6, 8]),
    qk_norm=st.booleans(),
    alibi=st.booleans(),
    v_norm=st.booleans(),
    attributes=st.fixed_dictionaries(
        {},
        optional={
            "scale": st.sampled_from([0.2, 1.0]),
            "softcap": st.sampled_from([5.0, 30.0]),
            "local_window_size": st.sampled_from([1, 5, 16, 64, 100, 513]),
            "local_chunk_size": st.sampled_from([1, 7, 64, 100, 513]),
        },
    ),
)
SEQUENCES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 70), st.sampled_from([127, 500, 511, 512, 513, 1100])),
        st.one_of(st.sampled_from([0, 1, 1, 1, 2, 6, 17]), st.integers(1, 90)),
    ),
    min_size=0,
    max_size=5,
)


def assert_rounded(got: NDArray[Any], want: NDArray[Any], cache_type: str) -> None:
    """Each head of `got` is `want` as rounded by the cache: fp16 has 11 bits, int8 254 steps per head."""
    steps = {"float32": 2**20, "float16": 2**11, "int8": 253}[cache_type]
    assert (np.abs(got - want) <= np.abs(want).max(axis=-1, keepdims=True) / steps).all()


@settings(suppress_health_check=list(HealthCheck))
@given(MODELS, SEQUENCES, st.integers(0, 2**32), st.integers(1, 3))
def test_any_call_agrees_with_float64(
    model: Model, sequences: list[tuple[int, int]], seed: int, threads: int
) -> None:
    call = make_call(model, sequences, seed=seed)
    before = copy.deepcopy(call)
    output = run(call, threads=threads)
    new_keys, new_values = new_keys_and_values(call)
    for sequence in range(len(sequences)):
        tokens, positions = call.tokens_of(sequence), call.positions_of(sequence)
        keys, values = read_cache(call, sequence, positions)
        assert_rounded(keys, new_keys[tokens], model.cache_type)
        assert_rounded(values, new_values[tokens], model.cache_type)
    # A weight is exp(score), so its relative error is the score's absolute one, which grows with the score.
    spread = max(1.0, call.scale * call.head_dim**0.5)  # standard deviation of the scores
    tolerance = 1e-3 if model.query_type == "float16" else 2e-5 * spread
    np.testing.assert_allclose(output, reference_attention(call), rtol=tolerance, atol=tolerance)
    # Nothing is written but the slots of the call's own tokens.
    for name, own in zip(("key_cache", "value_cache", "key_scales"), own_slots(call), strict=True):
        if getattr(call, name) is not None:
            assert (bits(getattr(call, name)) == bits(getattr(before, name)))[~own].all()


# ------------------------------------------------------------------------------------- to the bit


def serve(
    model: Model,
    prompts: list[NDArray[Any]],
    chunks: list[int],
    *,
    seed: int = 0,
    threads: int = 1,
    isa: str = "",
) -> list[NDArray[Any]]:
    """Run prompts, [tokens, columns] each, together through one cache.

    Each step takes the next chunk of every prompt that has tokens left; `chunks` are their sizes in turn. The
    seed determines the order of the blocks.

    Returns:
        The output [tokens, Hq * D] of each prompt.
    """
    whole = make_call(model, [(0, len(prompt)) for prompt in prompts], seed=seed)
    past = [0] * len(prompts)
    outputs: list[list[NDArray[Any]]] = [[] for _ in prompts]
    sizes = itertools.cycle(chunks)
    while waiting := [i for i, prompt in enumerate(prompts) if past[i] < len(prompt)]:
        parts = {i: prompts[i][past[i] : past[i] + next(sizes)] for i in waiting}
        step = replace(
            whole,
            query=np.concatenate(list(parts.values())),
            cumulative_sequence_length=np.cumsum([0, *map(len, parts.values())], dtype=np.int32),
            past_seqlens=np.array([past[i] for i in waiting], np.int32),
            block_table=whole.block_table[waiting],
        )
        rows = np.split(run(step, threads=threads, isa=isa), step.cumulative_sequence_length[1:-1])
        for i, output in zip(waiting, rows, strict=True):
            outputs[i].append(output)
            past[i] += len(output)
    return [np.concatenate(output) for output in outputs]


def make_prompts(model: Model, lengths: list[int]) -> list[NDArray[Any]]:
    rng = np.random.default_rng(1)
    columns = (model.num_heads + 2 * model.kv_num_heads) * model.head_dim
    return [rng.standard_normal((length, columns)).astype(model.query_type) for length in lengths]


@pytest.mark.parametrize(
    "chunks",
    [
        [2, 1, 70, 5],
        *(pytest.param(chunks, marks=pytest.mark.extended) for chunks in ([1], [513, 1], [7], [16], [33])),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_batch_chunks_threads_and_blocks(family: str, chunks: list[int]) -> None:
    model = FAMILIES[family]
    prompts = make_prompts(model, [1, 17, 64, 600] if chunks != [1] else [1, 80, 17])
    alone = [serve(model, [prompt], [len(prompt)])[0] for prompt in prompts]
    for threads, block_size in (1, 32), (2, 16), (3, 64):
        other_blocks = replace(model, block_size=block_size)
        together = serve(other_blocks, prompts, chunks, threads=threads, seed=threads)
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(bits(other), bits(one))


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_a_long_context_do_not_depend_on_how_it_is_split(family: str) -> None:
    """One token after many segments: one thread computes them in one piece, several one by one."""
    _require_equal_bits(FAMILIES[family], [(2100, 1), (5, 3)])


@pytest.mark.parametrize(
    "cache_type", with_extended(["float32", "float16", "int8"], always={"float16", "int8"})
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (9, 3), (14, 2), (36, 4)])
def test_bits_do_not_depend_on_the_heads_of_a_tile(cache_type: str, heads: int, kv_heads: int) -> None:
    """With many sequences a tile has several heads; with few tiles its segments are computed separately."""
    model = Model(num_heads=heads, kv_num_heads=kv_heads, head_dim=16, cache_type=cache_type)
    _require_equal_bits(model, [(2100, 1), *[(600, 1)] * 12, (40, 2)])


def _require_equal_bits(model: Model, sequences: list[tuple[int, int]]) -> None:
    call = make_call(model, sequences)
    want = bits(run(call, threads=1))
    for threads in (2, 3, 8):  # each writes the same keys and values again
        np.testing.assert_array_equal(bits(run(call, threads=threads)), want)


@pytest.mark.parametrize(
    "family",
    with_extended(
        FAMILIES, always={"llama, int8 cache", "qwen3, float16 query", "bloom", "gpt-oss", "llama4"}
    ),
)
def test_instruction_sets_give_equal_bits(family: str) -> None:
    model = FAMILIES[family]
    prompts = make_prompts(model, [3, 90, 530])
    *others, want = (serve(model, prompts, [50, 300], isa=isa) for isa in instruction_sets())
    for found in others:
        for one, other in zip(want, found, strict=True):
            np.testing.assert_array_equal(bits(other), bits(one))


@pytest.mark.parametrize("family", ["llama", "llama, int8 cache", "gemma2", "qwen3, float16 query"])
def test_a_layer_that_shares_a_cache_reads_what_another_has_written(family: str) -> None:
    call = make_call(FAMILIES[family], [(600, 1), (30, 40), (0, 2)])
    expected = run(call)
    queries = call.query[:, : call.num_heads * call.head_dim].copy()
    shared = replace(copy.deepcopy(call), query=queries, shares_cache=True, k_norm_weight=None)
    outputs = dict.fromkeys(("key_cache", "value_cache", "key_scales", "value_scales"))
    assert (bits(run(shared, outputs=outputs)) == bits(expected)).all()
    assert (bits(shared.key_cache) == bits(call.key_cache)).all()


def test_concurrent_calls_have_separate_memory() -> None:
    models = list(FAMILIES.values()) * 2
    sequences = [(40, 20), (600, 1), (0, 130)]
    want = [run(make_call(model, sequences), threads=1) for model in models]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda model: run(make_call(model, sequences)), models))
    for one, other in zip(want, got, strict=True):
        np.testing.assert_array_equal(bits(other), bits(one))


# ------------------------------------------------------------------------------------------- special cases


def test_a_sequence_reads_blocks_written_in_the_same_call() -> None:
    """Two sequences share their first block, which the first one fills in this call."""
    model = Model(rotary_dims=32)
    prompt = make_prompts(model, [20])[0]
    want = serve(model, [prompt], [20])[0]
    call = make_call(model, [(0, 16), (16, 4)])
    call.query = prompt
    call.block_table[1, :2] = call.block_table[0, 0], call.block_table[1, 0]
    np.testing.assert_array_equal(bits(run(call)), bits(want))


def test_float16_holds_its_largest_number_instead_of_infinity() -> None:
    call = make_call(Model(num_heads=1, kv_num_heads=1, head_dim=16), [(0, 1)])
    call.query[:] = 1e6
    assert (run(call) == 65504).all()


@pytest.mark.parametrize("cache_type", ["float32", "float16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_does_not_affect_earlier_tokens(cache_type: str, bad: float) -> None:
    model = Model(num_heads=2, kv_num_heads=1, head_dim=16, cache_type=cache_type)
    good, spoiled = (make_call(model, [(3, 6)]) for _ in range(2))
    spoiled.query[5] = bad
    np.testing.assert_array_equal(bits(run(spoiled)[:5]), bits(run(good)[:5]))


def test_int8_cache_is_near_the_exact_one() -> None:
    """A scale per token and head: 127 steps, about 0.5 % of a normal distribution's width."""
    exact = make_call(Model(cache_type="float32", head_dim=64), [(900, 4), (30, 60)])
    rounded = make_call(Model(cache_type="int8", head_dim=64), [(900, 4), (30, 60)])
    rounded.query = exact.query
    for sequence in range(2):
        past = np.arange(exact.past_seqlens[sequence])
        write_cache(rounded, sequence, past, *read_cache(exact, sequence, past))
    want = run(exact)
    assert np.sqrt(np.mean((run(rounded) - want) ** 2) / np.mean(want**2)) < 0.02


def test_a_call_without_tokens_is_valid() -> None:
    assert run(make_call(Model(), [])).shape == (0, 192)
    assert run(make_call(Model(), [(5, 0), (0, 0)])).shape == (0, 192)


# ------------------------------------------------------------------------------------- refusals


def change(**changes: Callable[[Any], Any]) -> Callable[[PagedAttentionCall], None]:
    return lambda call: call.__dict__.update(
        {name: new(getattr(call, name)) for name, new in changes.items()}
    )


def put(name: str, index: Any, value: Any) -> Callable[[PagedAttentionCall], None]:
    return lambda call: getattr(call, name).__setitem__(index, value)


def zeros(*shape: int) -> Callable[[Any], NDArray[np.float32]]:
    return lambda _: np.zeros(shape, np.float32)


REFUSALS = {
    "kv heads that do not divide": (change(kv_num_heads=lambda _: 4), "num_heads is 6, not a multiple"),
    "no heads": (change(num_heads=lambda _: 0), "num_heads is 0"),
    "window of nothing": (change(local_window_size=lambda _: 0), "local_window_size is 0"),
    "chunk of nothing": (change(local_chunk_size=lambda _: 0), "local_chunk_size is 0"),
    "negative softcap": (change(softcap=lambda _: -1.0), "softcap is -1"),
    "query of another type": (change(query=lambda x: x.astype(np.float64)), "query has type"),
    "query of three dimensions": (change(query=lambda x: x[None]), "query has shape"),
    "columns that make no heads": (
        change(query=lambda x: x[:, :-1].copy()),
        "not a multiple of its 10 heads",
    ),
    "cache of another type": (change(key_cache=lambda x: np.zeros(x.shape, np.int32)), "key_cache has type"),
    "cache of other heads": (change(key_cache=lambda x: x[:, :, :1].copy()), "key_cache has shape"),
    "caches of two types": (change(value_cache=lambda x: x.astype(np.float32)), "value_cache has type"),
    "caches of two sizes": (change(value_cache=lambda x: x[1:].copy()), "value_cache has shape"),
    "block size": (change(key_cache=lambda x: x[:, :8].copy()), "blocks of 8 tokens"),
    "scales without int8": (change(key_scales=zeros(9, 16, 2)), "cache has type"),
    "lengths of another type": (change(past_seqlens=lambda x: x.astype(np.int64)), "past_seqlens has type"),
    "too few lengths": (change(cumulative_sequence_length=lambda x: x[:-1].copy()), "has shape [2], not [3]"),
    "first length": (put("cumulative_sequence_length", 0, 1), "begins with 1"),
    "falling lengths": (put("cumulative_sequence_length", 1, 200), "falls from 200 to 5"),
    "last length": (put("cumulative_sequence_length", -1, 99), "ends with 99, and the query has 5"),
    "negative past": (put("past_seqlens", 0, -1), "past_seqlens[0] is -1"),
    "past beyond the table": (put("past_seqlens", 1, 96), "sequence 1 has 97 tokens"),
    "past beyond all": (put("past_seqlens", 1, 2**31 - 1), "sequence 1 has 2147483648 tokens"),
    "table of one dimension": (change(block_table=lambda x: x[0].copy()), "block_table has shape"),
    "negative block": (put("block_table", (0, 2), -1), "block_table[0, 2] is -1"),
    "unknown block": (put("block_table", (1, 1), 99), "block_table[1, 1] is 99"),
    "too few positions": (change(cos_cache=lambda x: x[:40].copy()), "sin_cache has shape"),
    "too long for positions": (
        change(cos_cache=lambda x: x[:40].copy(), sin_cache=lambda x: x[:40].copy()),
        "sequence 0 has 44 tokens, and cos_cache 40 positions",
    ),
    "rotation of too much": (
        change(cos_cache=zeros(50, 17), sin_cache=zeros(50, 17)),
        "cos_cache turns 17 pairs",
    ),
    "norm of another size": (change(q_norm_weight=zeros(31)), "q_norm_weight has shape"),
    "slopes of other heads": (change(alibi_slopes=zeros(2)), "alibi_slopes has shape"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_wrong_input_is_refused_and_nothing_is_written(what: str) -> None:
    spoil, words = REFUSALS[what]
    call = make_call(Model(rotary_dims=32), [(40, 4), (20, 1)])
    spoil(call)
    before = copy.deepcopy(call)
    with pytest.raises(ValueError, match=re.escape(words)):
        run(call)
    assert call.key_cache.tobytes() == before.key_cache.tobytes()


def test_int8_cache_without_scales_is_refused() -> None:
    call = make_call(Model(cache_type="int8"), [(40, 4)])
    call.value_scales = None
    with pytest.raises(ValueError, match="value_scales is missing"):
        run(call)


@pytest.mark.parametrize("name", ["key_cache", "value_cache", "key_scales", "value_scales"])
def test_outputs_that_are_not_bound_in_place_are_refused(name: str) -> None:
    call = make_call(Model(cache_type="int8"), [(40, 4)])
    with pytest.raises(ValueError, match="not bound to the memory of"):
        run(call, outputs={name: getattr(call, name).copy()})
