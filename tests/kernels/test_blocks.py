"""Linear and Embedding with the weight formats of checkpoints, compared with what the package gguf reads."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from genserve.kernels.blocks import BLOCK_FORMATS, pack_blocks
from tests.kernels.c_types import Error, Tensor, instruction_sets, library
from tests.kernels.linear_calls import (
    ACTIVATIONS,
    NORMS,
    Layer,
    LinearError,
    attributes_of,
    compute,
    dequantized,
    make_layer,
    random_rows,
    reference,
)
from tests.support.representatives import with_extended

KINDS = tuple(BLOCK_FORMATS)


def bits(array: NDArray[np.float32]) -> NDArray[np.int32]:
    return array.view(np.int32)


def inputs_of(kinds: list[str], blocks: int) -> int:
    """A number of inputs that all types can have."""
    return blocks * max(BLOCK_FORMATS[kind].block for kind in kinds)


def full(kind: str, outputs: int, inputs: int, *, code: int) -> NDArray[np.uint8]:
    """Rows of one code, with scales of one; the codes of signed types are unsigned."""
    known = BLOCK_FORMATS[kind]
    blocks = np.zeros((outputs, inputs // known.block, known.bytes), np.uint8)
    one = np.array([1], np.float16).view(np.uint8)
    scale_at = 208 if kind == "Q6_K" else 0
    blocks[:, :, scale_at : scale_at + 2] = one
    low = code & 15 | (code & 15) << 4
    match kind:
        case "Q4_0" | "Q4_1":
            blocks[:, :, known.bytes - 16 :] = low
        case "Q5_0" | "Q5_1":
            blocks[:, :, known.bytes - 16 :] = low
            blocks[:, :, known.bytes - 20 : known.bytes - 16] = 255 * (code >> 4)
        case "Q8_0":
            blocks[:, :, 2:] = code
        case "Q4_K" | "Q5_K":
            blocks[:, :, 4:8] = blocks[:, :, 12:16] = 1  # the scales; minimums are zero
            blocks[:, :, 16:48] = 255 * (code >> 4)
            blocks[:, :, known.bytes - 128 :] = low
        case "Q4Z_32" | "Q4Z_64" | "Q4Z_128":
            blocks[:, :, 4:] = low
        case "Q6_K":
            blocks[:, :, :128] = low
            blocks[:, :, 128:192] = 85 * (code >> 4)
            blocks[:, :, 192:208] = 1
    return blocks.reshape(outputs, -1)


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(3, 110) | st.integers(256, 400),  # few rows read several of the larger's panels together
    st.integers(0, 20),
    st.sampled_from(NORMS),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_layer_agrees_with_the_dequantized_weight(
    kinds: list[str], blocks: int, outputs: int, rows: int, norm: str, activation: str, gated: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kinds = kinds[:1] if gated else kinds
    layer = make_layer(
        rng,
        kinds=kinds,
        in_features=inputs_of(kinds, blocks),
        out_features=outputs,
        norm=norm,
        activation=activation,
        gated=gated,
    )
    x = rng.standard_normal((rows, layer.in_features), dtype=np.float32)
    residual = rng.standard_normal((rows, layer.outputs), dtype=np.float32)
    got = compute(layer, x, residual)
    want, off = reference(layer, x, residual)
    assert (np.abs(got - want) <= off).all()
    for isa in instruction_sets():
        np.testing.assert_array_equal(bits(compute(layer, x, residual, isa=isa)), bits(got))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [False, True])
def test_the_largest_products_are_exact(kind: str, largest: bool) -> None:
    """AVX2 adds products in 16 bits, which the largest codes and inputs nearly fill."""
    known = BLOCK_FORMATS[kind]
    code = (2**known.bits - 1 if known.bits < 8 else 127) if largest else 128 if known.bits == 8 else 0
    layer = Layer(in_features=512, out_features=33)
    layer.set_rows([(kind, full(kind, 33, 512, code=code))])
    assert len(np.unique(layer.weight)) == 1
    signs = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, -1, -1], [-1, -1, 1, 1]] * 10)
    pairs = np.array([64, 63, 127, 0] if known.bits == 8 else [127, 127, 127, 127])
    rows = np.tile(signs * pairs, 128).astype(np.float32)
    for isa in instruction_sets():
        got = compute(layer, rows, isa=isa)
        np.testing.assert_array_equal(got, (rows @ layer.weight.T).astype(np.float32))


@pytest.mark.parametrize(
    "kinds",
    with_extended(
        [*([kind] for kind in KINDS), ["Q4_K", "Q6_K", "Q8_0"]], always=(["Q4_K", "Q6_K", "Q8_0"], ["Q5_0"])
    ),
)
def test_a_row_does_not_depend_on_batch_chunks_and_threads(kinds: list[str]) -> None:
    rng = np.random.default_rng(1)
    layer = make_layer(rng, kinds=kinds, in_features=1280, out_features=555, norm="rms")
    x = rng.standard_normal((130, 1280), dtype=np.float32)
    alone = np.concatenate([compute(layer, x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2, 5):
        np.testing.assert_array_equal(bits(compute(layer, x, threads=threads)), bits(alone))
    for chunk in (2, 3, 7, 33, 97):
        parts = [compute(layer, x[i : i + chunk], threads=2) for i in range(0, len(x), chunk)]
        np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(alone))


def test_segments_have_the_bits_of_separate_layers() -> None:
    rng = np.random.default_rng(2)
    parts = [
        (kind, random_rows(rng, kind, count, 256))
        for kind, count in [("Q4_K", 70), ("Q5_0", 1), ("Q6_K", 45)]
    ]
    x = rng.standard_normal((9, 256), dtype=np.float32)
    whole, separate = Layer(in_features=256, out_features=116), []
    whole.set_rows(parts)
    for kind, rows in parts:
        layer = Layer(in_features=256, out_features=len(rows))
        layer.set_rows([(kind, rows)])
        separate.append(compute(layer, x))
    got = compute(whole, x, threads=3)
    np.testing.assert_array_equal(bits(got), bits(np.concatenate(separate, axis=1)))


@pytest.mark.parametrize("norm", NORMS)
def test_inputs_in_another_order_have_the_bits_of_rows_in_that_order(norm: str) -> None:
    rng = np.random.default_rng(4)
    layer = make_layer(rng, kinds=["Q4Z_64", "Q8_0"], in_features=192, out_features=45, norm=norm)
    x, order = rng.standard_normal((5, 192), dtype=np.float32), rng.permutation(192).astype(np.int32)
    ordered = replace(layer, inputs=layer.inputs | {"order": order})
    got, (want, off) = compute(ordered, x), reference(ordered, x)
    assert (np.abs(got - want) <= off).all()
    for isa in instruction_sets():
        np.testing.assert_array_equal(bits(compute(ordered, x, isa=isa)), bits(got))
    if not norm:
        np.testing.assert_array_equal(bits(compute(layer, x[:, order].copy())), bits(got))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (np.arange(1, 193, dtype=np.int32), "not below 192"),
        (np.arange(-1, 191, dtype=np.int32), "not below 192"),
        (np.arange(191, dtype=np.int32), "order has shape"),
        (np.arange(192), "order has type"),
    ],
)
def test_orders_that_are_none_are_refused(order: NDArray[Any], message: str) -> None:
    layer = make_layer(np.random.default_rng(0), kinds=["Q4Z_64"], in_features=192, out_features=40)
    layer.inputs["order"] = order
    with pytest.raises(LinearError, match=message):
        compute(layer, np.zeros((3, 192), np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e34])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_affects_no_other(kind: str, bad: float) -> None:
    rng = np.random.default_rng(3)
    layer = make_layer(rng, kinds=[kind], in_features=256, out_features=40)
    x = rng.standard_normal((9, 256), dtype=np.float32)
    good = compute(layer, x)
    x[4, 70] = bad
    for isa in instruction_sets():
        got = compute(layer, x, isa=isa)
        assert np.isnan(got[4]).all()
        np.testing.assert_array_equal(np.delete(got, 4, axis=0), np.delete(good, 4, axis=0))


def embedding(layer: Layer, ids: NDArray[np.int64], *, isa: str = "") -> NDArray[np.float32]:
    y, error = np.full((len(ids), layer.in_features), np.nan, np.float32), Error()
    attributes = attributes_of(layer)
    inputs = (Tensor * 3)(*map(Tensor.of, (ids, layer.inputs["weight"], layer.inputs.get("scales"))))
    good = library(isa).genserve_embedding(
        ctypes.byref(attributes),
        ctypes.byref(inputs),
        ctypes.byref(Tensor.of(y)),
        ctypes.byref(error),
    )
    if not good:
        raise LinearError(error.message.decode())
    return y


@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 110), st.integers(0, 2**32))
def test_an_embedding_reads_the_weights_of_the_file(kind: str, blocks: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layer = make_layer(rng, kinds=[kind], in_features=inputs_of([kind], blocks), out_features=outputs)
    ids = rng.integers(0, outputs, 20)
    for isa in instruction_sets():
        np.testing.assert_array_equal(embedding(layer, ids, isa=isa), layer.weight[ids].astype(np.float32))


@given(st.integers(1, 300), st.integers(1, 110), st.integers(0, 2**32))
def test_an_embedding_reads_int8_in_blocks(inputs: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layer = make_layer(rng, weight_format="int8_block", in_features=inputs, out_features=outputs)
    ids = rng.integers(0, outputs, 20)
    for isa in instruction_sets():
        np.testing.assert_array_equal(embedding(layer, ids, isa=isa), layer.weight[ids].astype(np.float32))


@pytest.mark.parametrize("weight_format", ["int8", "int4_block", "float32"])
def test_an_embedding_refuses_other_formats(weight_format: str) -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(rng, weight_format=weight_format, in_features=64, out_features=40)
    with pytest.raises(LinearError, match='neither "int8_block" nor'):
        embedding(layer, np.array([3]))


@pytest.mark.parametrize("token", [-1, 40, 2**40])
def test_an_embedding_refuses_ids_that_it_does_not_have(token: int) -> None:
    layer = make_layer(np.random.default_rng(0), kinds=["Q4_1"], in_features=64, out_features=40)
    with pytest.raises(LinearError, match="is not below 40"):
        embedding(layer, np.array([3, token]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": np.zeros(7, np.uint8)}, "weight has shape"),
        ({"weight": np.zeros(2 * 2 * 640, np.int8)}, "weight has type int8"),
        ({"weight": None}, "weight is missing"),
        ({"scales": np.zeros((2, 2, 32), np.float32)}, "have their scales with them"),
    ],
)
def test_weights_of_wrong_shapes_are_refused(changed: dict[str, Any], message: str) -> None:
    layer = make_layer(np.random.default_rng(0), kinds=["Q4_1"], in_features=64, out_features=40)
    layer.inputs |= changed
    with pytest.raises(LinearError, match=message):
        compute(layer, np.zeros((3, 64), np.float32))


@pytest.mark.parametrize("segments", [[("Q4_1", 40), ("Q8_0", 40)], [("Q4_1", 0), ("Q8_0", -1)]])
def test_segments_that_are_not_the_outputs_are_refused(segments: list[tuple[str, int]]) -> None:
    layer = make_layer(np.random.default_rng(0), kinds=["Q4_1"], in_features=64, out_features=40)
    layer.segments = segments
    with pytest.raises(LinearError, match="make no layer of 40 outputs"):
        compute(layer, np.zeros((3, 64), np.float32))


def test_formats_in_blocks_are_not_mixed_with_others() -> None:
    layer = make_layer(np.random.default_rng(0), in_features=64, out_features=40)
    layer.segments = [("Q4_1", 20), ("Q8_0", 20)]
    with pytest.raises(LinearError, match="make no layer of 40 outputs"):
        compute(layer, np.zeros((3, 64), np.float32))


@pytest.mark.parametrize("value", [np.inf, np.nan, 60_000])
def test_a_scale_that_no_panel_can_have_is_refused(value: float) -> None:
    """The minimum of Q4_0 is -8 times its scale, in fp16."""
    rows = random_rows(np.random.default_rng(0), "Q4_0", 3, 64)
    rows[1, :2] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="scale"):
        pack_blocks(rows, "Q4_0")


def test_the_types_are_those_of_the_package_gguf() -> None:
    rng = np.random.default_rng(0)
    for kind, known in BLOCK_FORMATS.items():
        assert dequantized(random_rows(rng, kind, 2, 512), kind).shape == (2, 512)
        assert known.bytes * 8 / known.block <= known.bits + 1
