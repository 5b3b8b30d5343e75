"""Linear: compared with numpy, equal bits in any call, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from genserve import kernels
from genserve.kernels import packing
from tests.kernels.c_types import instruction_sets
from tests.kernels.linear_calls import (
    ACTIVATIONS,
    FORMATS,
    NORMS,
    Layer,
    LinearError,
    compute,
    make_layer,
    reference,
)
from tests.support.representatives import with_extended

INTEGER_FORMATS = FORMATS[:3]

layers = st.fixed_dictionaries(
    {
        "in_features": st.integers(1, 300),
        "out_features": st.integers(1, 110),
        "weight_format": st.sampled_from(FORMATS),
        "norm": st.sampled_from(NORMS),
        "activation": st.sampled_from(ACTIVATIONS),
        "gated": st.booleans(),
        "softcap": st.sampled_from([0.0, 30.0]),
        "bias": st.booleans(),
    }
)


def bits(array: NDArray[np.float32]) -> NDArray[np.int32]:
    return array.view(np.int32)


@given(layers, st.integers(0, 40), st.booleans(), st.integers(0, 2**32))
def test_any_layer_agrees_with_float64(
    attributes: dict[str, Any], rows: int, residual: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layer = make_layer(rng, **attributes)
    x = rng.standard_normal((rows, layer.in_features), dtype=np.float32)
    more = rng.standard_normal((rows, layer.outputs), dtype=np.float32) if residual else None
    got = compute(layer, x, more)
    want, off = reference(layer, x, more)
    assert (np.abs(got - want) <= off).all()
    for isa in instruction_sets():
        np.testing.assert_array_equal(bits(compute(layer, x, more, isa=isa)), bits(got))


@given(
    st.sampled_from(INTEGER_FORMATS),
    st.integers(1, 400),
    st.integers(1, 70),
    st.integers(1, 35),
    st.sampled_from(["extremes", "any", "few large"]),
    st.integers(0, 2**32),
)
def test_products_of_integers_are_exact(
    weight_format: str, inputs: int, outputs: int, rows: int, values: str, seed: int
) -> None:
    """Integer inputs have scales of one if 127 is the largest value, and sum of neighbours, in each block."""
    rng = np.random.default_rng(seed)
    lowest, highest = (-8, 7) if weight_format == "int4_block" else (-127, 127)
    if values == "extremes":
        weights, x = (
            rng.choice([low, high], shape)
            for low, high, shape in [(lowest, highest, (outputs, inputs)), (-127, 127, (rows, inputs))]
        )
    else:
        weights = rng.integers(lowest, highest + 1, (outputs, inputs))
        x = rng.integers(-127, 128, (rows, inputs))
    if values == "few large":
        x[rng.random(x.shape) < 0.9] //= 8
    block = packing.BLOCKS[weight_format] or inputs
    x[:, ::block] = 127
    if weight_format != "int4_block":
        first, second = x[:, :-1:2], x[:, 1::2]
        second[:] = np.clip(first + second, -127, 127) - first
    scales = np.ones((outputs, -(-inputs // block)), np.float32)
    layer = Layer(in_features=inputs, out_features=outputs, weight_format=weight_format)
    layer.set_quantized(packing.Quantized(weights.astype(np.int8), scales))
    want = (x @ weights.T).astype(np.float32)
    for isa in instruction_sets():
        np.testing.assert_array_equal(compute(layer, x.astype(np.float32), isa=isa), want)


@pytest.mark.parametrize("weight_format", ["int8", "int8_block"])
@pytest.mark.parametrize("weight", [-127, 127])
def test_products_at_the_limit_of_16_bits_are_exact(weight: int, weight_format: str) -> None:
    """AVX2 adds two products in 16 bits, up to 255 * 128. Inputs with a sum of 127 may be rounded to 128."""
    x = np.array([value for first in range(64) for value in (first + 0.5, 126.5 - first)] + [127.0, 0.0] * 32)
    layer = Layer(in_features=len(x), out_features=1, weight_format=weight_format)
    scales = np.ones((1, -(-len(x) // (packing.BLOCKS[weight_format] or len(x)))), np.float32)
    layer.set_quantized(packing.Quantized(np.full((1, len(x)), weight, np.int8), scales))
    rows = np.array([x, -x] * 50, np.float32)  # more than a chunk
    pairs = np.rint(rows).reshape(len(rows), -1, 2).sum(2)
    assert abs(pairs).max() == 128
    for isa in instruction_sets():
        got = compute(layer, rows, isa=isa, threads=3)
        np.testing.assert_array_equal(got, pairs.sum(1, keepdims=True) * weight)


@pytest.mark.parametrize("weight", [-8, 7])
def test_the_largest_sums_of_a_block_of_int4_are_exact(weight: int) -> None:
    """AVX2 adds a block in two sums of 16 bits: of inputs 0 and 1, and of inputs 2 and 3, of every four."""
    layer = Layer(in_features=96, out_features=33, weight_format="int4_block")
    quantized = packing.Quantized(np.full((33, 96), weight, np.int8), np.ones((33, 3), np.float32))
    layer.set_quantized(quantized)
    signs = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, -1, -1], [-1, -1, 1, 1]] * 10)
    rows = np.tile(127 * signs, 24).astype(np.float32)
    for isa in instruction_sets():
        got = compute(layer, rows, isa=isa)
        np.testing.assert_array_equal(got, np.repeat(rows.sum(1, keepdims=True) * weight, 33, axis=1))


def test_the_largest_row_of_int8_does_not_overflow() -> None:
    inputs = 1 << 17
    layer = Layer(in_features=inputs, out_features=1)
    layer.set_quantized(packing.Quantized(np.full((1, inputs), -127, np.int8), np.ones((1, 1), np.float32)))
    rows = 17  # more than a tile of vectors has
    x = np.full((rows, inputs), 63.5, np.float32)  # two add up to 127, and are rounded to 64
    opposite = np.tile(np.array([127, -127], np.float32), (rows, inputs // 2))
    alternating = Layer(in_features=inputs, out_features=1)
    alternating.set_quantized(packing.Quantized(opposite[:1].astype(np.int8), np.ones((1, 1), np.float32)))
    for isa in instruction_sets():
        assert compute(layer, x, isa=isa).tolist() == [[-127.0 * 64 * inputs]] * rows
        for sign in (1, -1):
            got = compute(alternating, sign * opposite, isa=isa)
            assert got.tolist() == [[sign * 127.0 * 127 * inputs]] * rows


@pytest.mark.parametrize("norm", with_extended(NORMS, always={"", "rms"}))
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_does_not_depend_on_batch_chunks_and_threads(weight_format: str, norm: str) -> None:
    rng = np.random.default_rng(1)
    layer = make_layer(
        rng,
        in_features=333,
        out_features=75,
        weight_format=weight_format,
        norm=norm,
        activation="silu",
        gated=True,
    )
    x = rng.standard_normal((230, 333), dtype=np.float32)
    alone = np.concatenate([compute(layer, x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2, 5, 12):
        np.testing.assert_array_equal(bits(compute(layer, x, threads=threads)), bits(alone))
    for chunk in (2, 3, 7, 12, 13, 33, 97, 129):
        parts = [compute(layer, x[i : i + chunk], threads=2) for i in range(0, len(x), chunk)]
        np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(alone))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_that_is_not_finite_affects_no_other(weight_format: str, bad: float) -> None:
    rng = np.random.default_rng(2)
    layer = make_layer(rng, in_features=100, out_features=40, weight_format=weight_format)
    x = rng.standard_normal((9, 100), dtype=np.float32)
    good = compute(layer, x)
    x[4, 70] = bad
    for isa in instruction_sets():
        got = compute(layer, x, isa=isa)
        assert not np.isfinite(got[4]).any()
        np.testing.assert_array_equal(np.delete(got, 4, axis=0), np.delete(good, 4, axis=0))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_of_zeros_and_of_the_smallest_numbers(weight_format: str) -> None:
    layer = make_layer(
        np.random.default_rng(3), in_features=70, out_features=20, weight_format=weight_format, bias=False
    )
    x = np.zeros((3, 70), np.float32)
    x[1], x[2] = 1e-40, 1.5e38
    got = compute(layer, x)
    assert (got[0] == 0).all()
    assert (np.abs(got[1]) < 1e-37).all()
    assert not np.isnan(got[2]).any() or weight_format == "float32"


@pytest.mark.parametrize("weight_format", ["int8", "int8_block"])
def test_a_sum_of_neighbours_beyond_the_floats_makes_its_row_nan(weight_format: str) -> None:
    layer = make_layer(
        np.random.default_rng(3), in_features=70, out_features=20, weight_format=weight_format, bias=False
    )
    x = np.ones((4, 70), np.float32)
    x[1, 6:8], x[2, 6:8] = 2e38, (3e38, -3e38)
    for isa in instruction_sets():
        is_nan = np.isnan(compute(layer, x, isa=isa)).all(axis=1)
        assert is_nan.tolist() == [False, True, False, False]


def test_layer_norm_without_weight_and_bias() -> None:
    rng = np.random.default_rng(4)
    layer = make_layer(rng, in_features=45, out_features=9, norm="layer", weight_format="float32")
    layer.inputs["norm_weight"] = np.ones(45, np.float32)
    layer.inputs["norm_bias"] = np.zeros(45, np.float32)
    x = 5 + rng.standard_normal((6, 45), dtype=np.float32)
    want = compute(layer, x)
    del layer.inputs["norm_weight"], layer.inputs["norm_bias"]
    np.testing.assert_array_equal(compute(layer, x), want)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no weight": ({"weight": None}, "weight is missing"),
    "a weight of floats": (
        {"weight": np.zeros((2, 16, 32, 4), np.float32)},
        "weight has type float32, not uint8",
    ),
    "a weight of another size": (
        {"weight": np.zeros((2, 8, 32, 4), np.uint8)},
        r"shape \[2, 8, 32, 4\], not \[2, 16, 32, 4\]",
    ),
    "a weight of another rank": ({"weight": np.zeros((2, 16, 128), np.uint8)}, r"shape \[2, 16, 128\], not"),
    "no scales": ({"scales": None}, "scales is missing"),
    "scales of another size": ({"scales": np.zeros((1, 32), np.float32)}, "scales has shape"),
    "a bias of another size": ({"bias": np.zeros(39, np.float32)}, r"bias has shape \[39\], not \[40\]"),
    "a norm's weight without a norm": ({"norm_weight": np.zeros(50, np.float32)}, 'norm is ""'),
    "rows of another width": (
        {"x": np.zeros((3, 51), np.float32)},
        r"x has shape \[3, 51\], not \[any, 50\]",
    ),
    "rows of three dimensions": ({"x": np.zeros((3, 1, 50), np.float32)}, "x has shape"),
    "rows of another type": ({"x": np.zeros((3, 50))}, "x has type another type, not float32"),
    "a residual of other rows": (
        {"residual": np.zeros((2, 40), np.float32)},
        r"residual has shape \[2, 40\], not \[3, 40\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_of_wrong_shapes_are_refused(case: str) -> None:
    changes, message = REFUSED[case]
    layer = make_layer(np.random.default_rng(0), in_features=50, out_features=40)
    x = changes.get("x", np.zeros((3, 50), np.float32))
    residual = changes.get("residual")
    for name, value in changes.items():
        if name not in ("x", "residual"):
            layer.inputs[name] = value
    with pytest.raises(LinearError, match=message):
        compute(layer, x, residual)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"in_features": 0}, "make no layer"),
        ({"out_features": 0}, "make no layer"),
        ({"out_features": 41, "gated": True}, "make no layer"),
        ({"in_features": (1 << 17) + 1}, 'use "int8_block"'),
        ({"weight_format": "float32"}, "have no scales"),
        ({"norm": "rms"}, "norm_weight is missing"),
    ],
)
def test_invalid_attributes_are_refused(attributes: dict[str, Any], message: str) -> None:
    layer = make_layer(np.random.default_rng(0), in_features=50, out_features=40)
    for name, value in attributes.items():
        setattr(layer, name, value)
    with pytest.raises(LinearError, match=message):
        compute(layer, np.zeros((3, 50), np.float32))


def test_the_instruction_set_in_use_is_compared_with_the_portable_one() -> None:
    assert kernels.instruction_set() in instruction_sets()
    assert instruction_sets()[-1] == "portable"
