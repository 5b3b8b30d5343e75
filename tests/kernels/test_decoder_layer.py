"""DecoderLayer: has the bits of its five parts as separate operators, and refuses wrong inputs."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels import attention_calls, linear_calls
from tests.kernels.attention_calls import CACHES, FAMILIES, Model, make_call
from tests.kernels.c_types import Error, Tensor, Threads, instruction_sets, library
from tests.kernels.linear_calls import FORMATS, Layer, make_layer, random_rows
from tests.kernels.reference_attention import PagedAttentionCall

Array = NDArray[Any]

# They have inputs that the operator has not.
WITHOUT_DECODER_LAYERS = {name for name, model in FAMILIES.items() if model.sinks or model.v_norm}
LINEARS = ("qkv", "output", "inner", "down")
# The inputs in the order of the operator.
INPUTS = (
    "x", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "key_scales", "value_scales",
    *(f"{linear}_{part}" for linear in LINEARS for part in ("weight", "scales", "bias")),
    "attention_norm_weight", "attention_norm_bias", "mlp_norm_weight", "mlp_norm_bias",
    "cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight", "alibi_slopes",
    *(f"{linear}_order" for linear in LINEARS),
)


class Attributes(ctypes.Structure):
    _fields_ = (
        *((linear, linear_calls.Attributes) for linear in LINEARS),
        ("attention", attention_calls.Attributes),
        ("head_dim", ctypes.c_int64),
        ("parallel", ctypes.c_int32),
    )


@dataclasses.dataclass
class Case:
    """A layer, its rows and its sequences; `call.query` is not used."""

    call: PagedAttentionCall
    x: Array
    qkv: Layer
    output: Layer
    inner: Layer
    down: Layer
    head_dim: int
    parallel: bool = False
    given: dict[str, Array | None] = dataclasses.field(default_factory=dict)   # in place of the own inputs

    def inputs(self) -> dict[str, Array | None]:
        named: dict[str, Array | None] = {name: getattr(self.call, name, None) for name in INPUTS}
        for name in LINEARS:
            parts = getattr(self, name).inputs
            named |= {f"{name}_{part}": parts.get(part) for part in ("weight", "scales", "bias", "order")}
        for norm, linear in (("attention_norm", self.qkv), ("mlp_norm", self.inner)):
            named |= {f"{norm}_{part}": linear.inputs.get(f"norm_{part}") for part in ("weight", "bias")}
        return named | {"x": self.x} | self.given


def make_case(
    model: Model,
    sequences: list[tuple[int, int]],
    *,
    hidden: int = 70,
    intermediate: int = 45,
    formats: tuple[str, str] = ("int8", "int8_block"),
    norm: str = "rms",
    activation: str = "silu",
    gated: bool = True,
    bias: bool = False,
    parallel: bool = False,
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    call = make_call(dataclasses.replace(model, query_type="float32"), sequences, seed=seed)
    normed, inner = formats

    def linear(inputs: int, outputs: int, weight_format: str, **attributes: Any) -> Layer:
        sizes = {"in_features": inputs, "out_features": outputs, "weight_format": weight_format}
        return make_layer(rng, bias=bias, **sizes, **attributes)

    return Case(
        call=call,
        x=rng.standard_normal((len(call.query), hidden), dtype=np.float32),
        qkv=linear(hidden, call.query.shape[1], normed, norm=norm),
        output=linear(model.num_heads * model.head_dim, hidden, inner),
        inner=linear(hidden, intermediate, normed, norm=norm, activation=activation, gated=gated),
        down=linear(intermediate, hidden, inner),
        head_dim=model.head_dim,
        parallel=parallel,
    )


def run(case: Case, *, threads: int = 2, isa: str = "", outputs: dict[str, Array] | None = None) -> Array:
    """Run the operator, which writes into the case's caches; y [T, hidden].

    Raises:
        ValueError: the operator refused; has its message.
    """
    call = case.call
    attention = attention_calls.attributes_of(call)
    linears = [linear_calls.attributes_of(getattr(case, name)) for name in LINEARS]
    attributes = Attributes(*linears, attention, case.head_dim, case.parallel)
    named, y, error = case.inputs(), np.full_like(case.x, np.nan), Error()
    bound = {"y": y} | {name: getattr(call, name) for name in CACHES} | (outputs or {})
    good = library(isa).genserve_decoder_layer(
        ctypes.byref(attributes),
        (Tensor * len(INPUTS))(*(Tensor.of(named[name]) for name in INPUTS)),
        (Tensor * len(bound))(*map(Tensor.of, bound.values())),
        ctypes.byref(Threads.of(threads)),
        ctypes.byref(error),
    )
    if not good:
        raise ValueError(error.message.decode())
    return y


def run_parts(case: Case, *, isa: str = "") -> Array:
    """The same by Linear and PagedAttention on one thread."""
    case.call.query = linear_calls.compute(case.qkv, case.x, isa=isa)
    heads = attention_calls.run(case.call, threads=1, isa=isa)
    attended = linear_calls.compute(case.output, heads, case.x, isa=isa)
    inner = linear_calls.compute(case.inner, case.x if case.parallel else attended, isa=isa)
    return linear_calls.compute(case.down, inner, attended, isa=isa)


def assert_equal_bits(case: Case, *, threads: int = 2, isa: str = "") -> None:
    parts = copy.deepcopy(case)
    assert run(case, threads=threads, isa=isa).tobytes() == run_parts(parts, isa=isa).tobytes()
    for name in CACHES:
        one, other = getattr(case.call, name), getattr(parts.call, name)
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


@given(
    family=st.sampled_from(sorted(FAMILIES.keys() - WITHOUT_DECODER_LAYERS)),
    sequences=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=5),
    hidden=st.integers(1, 130),
    intermediate=st.integers(1, 130),
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    norm=st.sampled_from(["rms", "layer"]),
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"]),
    gated=st.booleans(),
    bias=st.booleans(),
    parallel=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_layer_has_the_bits_of_its_parts(
    family: str, sequences: list[tuple[int, int]], threads: int, **options: Any
) -> None:
    assert_equal_bits(make_case(FAMILIES[family], sequences, **options), threads=threads)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("tokens", [1, 40])
def test_instruction_sets_have_the_bits_of_the_parts(isa: str, tokens: int) -> None:
    assert_equal_bits(make_case(FAMILIES["llama"], [(70, tokens), (600, 1)]), threads=3, isa=isa)


def make_ordered_case() -> Case:
    """A layer with weights in blocks, whose inputs are in an order of their own."""
    model, rng = Model(num_heads=4, kv_num_heads=2, head_dim=32), np.random.default_rng(0)
    case = make_case(model, [(40, 4), (20, 1)], hidden=64, intermediate=96)
    for name in LINEARS:
        layer = getattr(case, name)
        layer.inputs["scales"] = None
        layer.set_rows([("Q4Z_32", random_rows(rng, "Q4Z_32", layer.out_features, layer.in_features))])
        layer.inputs["order"] = rng.permutation(layer.in_features).astype(np.int32)
    return case


def test_a_layer_with_inputs_in_another_order_has_the_bits_of_its_parts() -> None:
    assert_equal_bits(make_ordered_case())


@pytest.mark.parametrize("name", LINEARS)
def test_an_order_of_inputs_that_a_layer_does_not_have_is_refused(name: str) -> None:
    case = make_ordered_case()
    getattr(case, name).inputs["order"][3] = 128
    with pytest.raises(ValueError, match=f"{name}: order has an input that is not below"):
        run(case)


def test_a_call_without_tokens_is_valid() -> None:
    assert run(make_case(Model(), [(5, 0), (0, 0)])).shape == (0, 70)


def replace(**inputs: Callable[[Any], Any]) -> Callable[[Case], None]:
    return lambda case: case.given.update({name: new(case.inputs()[name]) for name, new in inputs.items()})


def set_size(**sizes: Any) -> Callable[[Case], None]:
    return lambda case: case.__dict__.update(sizes)


REFUSALS = {
    "no size of a head": (set_size(head_dim=0), "head_dim 0 make no layer"),
    "heads of another size": (set_size(head_dim=33), "qkv: weight has shape"),
    "no heads": (lambda case: setattr(case.call, "num_heads", 0), "num_heads is 0"),
    "rows of another size": (replace(x=lambda x: x[:, 1:].copy()), "x has shape [5, 69], not [any, 70]"),
    "rows of one dimension": (replace(x=lambda x: x[0].copy()), "x has shape [70]"),
    "rows of another type": (replace(x=lambda x: x.astype(np.float64)), "x has type"),
    "weight of another layer": (replace(down_weight=lambda x: x[:-1].copy()), "down: weight has shape"),
    "scales of another format": (replace(output_scales=lambda x: x[0].copy()), "output: scales has shape"),
    "no scales": (replace(inner_scales=lambda _: None), "inner: scales is missing"),
    "no norm": (replace(mlp_norm_weight=lambda _: None), "inner: norm_weight is missing"),
    "no cache": (replace(key_cache=lambda _: None), "key_cache is missing"),
    "cache of other heads": (replace(key_cache=lambda x: x[:, :, :1].copy()), "key_cache has shape"),
    "unknown block": (replace(block_table=lambda x: x * 0 + 99), "block_table[0, 0] is 99"),
    "other tokens": (
        replace(cumulative_sequence_length=lambda x: x * 2),
        "ends with 10, and the query has 5",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_wrong_input_is_refused_and_nothing_is_written(what: str) -> None:
    spoil, words = REFUSALS[what]
    case = make_case(Model(rotary_dims=32), [(40, 4), (20, 1)])
    spoil(case)
    before = case.call.key_cache.tobytes()
    with pytest.raises(ValueError, match=re.escape(words)):
        run(case)
    assert case.call.key_cache.tobytes() == before


def test_outputs_that_are_not_bound_in_place_are_refused() -> None:
    case = make_case(Model(), [(40, 4)])
    with pytest.raises(ValueError, match="not bound to the memory of"):
        run(case, outputs={"value_cache": case.call.value_cache.copy()})


def make_full_case() -> Case:
    """A layer that has every input."""
    model = Model(cache_type="int8", rotary_dims=32, qk_norm=True, alibi=True)
    return make_case(model, [(40, 4), (20, 1)], formats=("int8", "int4_block"), norm="layer", bias=True)


@pytest.mark.parametrize("name", [name for name in INPUTS if not name.endswith("_order")])
@pytest.mark.parametrize(
    "spoil",
    [lambda x: x.astype(np.float64), lambda x: x[..., None].copy(), lambda x: x.ravel()[:1].reshape(())],
    ids=["type", "one_dimension_more", "no_dimension"],
)
def test_every_input_must_have_its_type_and_its_dimensions(
    name: str, spoil: Callable[[Array], Array]
) -> None:
    case = make_full_case()
    run(copy.deepcopy(case))
    replace(**{name: spoil})(case)
    with pytest.raises(ValueError, match=rf"\b({name}|{name.partition('_')[2]}|query) has (type|shape)"):
        run(case)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_layers_compute_in_the_memory_of_the_layers_before_them() -> None:
    tokens, intermediate = 4096, 4096
    case = make_case(Model(), [(0, 16)] * (tokens // 16), hidden=64, intermediate=intermediate)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    run(case)
    before = resident()
    for _ in range(4):
        run(case)
    assert resident() - before < tokens * intermediate * 4
