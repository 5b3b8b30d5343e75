"""Quantised weights against plain numpy, and against the operator that reads them."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from genserve.export.quantize import Blocks, Scheme, quantize, quantize_rows

INT8 = Scheme(bits=8, block_size=64)
INT4 = Scheme(bits=4, block_size=32)
SCHEMES = pytest.mark.parametrize("scheme", [INT8, INT4], ids=["int8", "int4"])


@SCHEMES
@pytest.mark.parametrize("num_inputs", [128, 100], ids=["whole_blocks", "padded"])
def test_the_operator_multiplies_by_the_dequantised_weight(scheme: Scheme, num_inputs: int) -> None:
    weight, x = random(50, num_inputs, seed=0), random(7, num_inputs, seed=1)
    blocks = quantize(weight, scheme)
    expected = x @ dequantized(blocks, scheme)[:, :num_inputs].T
    assert np.abs(matmul_n_bits(x, blocks, scheme, shape=weight.shape) - expected).max() < 1e-4


@SCHEMES
def test_no_weight_moves_by_more_than_half_a_step(scheme: Scheme) -> None:
    weight = random(64, 192, seed=2) * np.logspace(-4, 4, 64, dtype=np.float32)[:, None]
    blocks = quantize(weight, scheme)
    step = np.repeat(np.abs(blocks.scales), scheme.block_size, axis=1)
    # In 4 bits the far end of the range, +8 steps, is cut to +7.
    allowed = step * (0.5 if scheme.bits == 8 else 1.0) * 1.001
    assert (np.abs(dequantized(blocks, scheme) - weight) <= allowed).all()


@SCHEMES
def test_the_largest_weight_of_a_block_is_kept_as_it_is(scheme: Scheme) -> None:
    weight = random(16, scheme.block_size, seed=3)
    largest = np.abs(weight).argmax(axis=1)[:, None]
    kept = np.take_along_axis(dequantized(quantize(weight, scheme), scheme), largest, axis=1)
    np.testing.assert_allclose(kept, np.take_along_axis(weight, largest, axis=1), rtol=1e-6)


@SCHEMES
def test_a_block_of_zeros_stays_zero(scheme: Scheme) -> None:
    assert not dequantized(quantize(np.zeros((3, 130), np.float32), scheme), scheme).any()


@SCHEMES
@pytest.mark.parametrize("size", [1e-38, 1e-42])
def test_weights_that_have_no_inverse_become_nothing(scheme: Scheme, size: float) -> None:
    weight = np.full((2, 64), size, np.float32)
    assert np.abs(dequantized(quantize(weight, scheme), scheme)).max() < 1e-30
    rows = quantize_rows(weight)
    assert np.abs(rows.values * rows.scales[:, None]).max() < 1e-30


def test_a_row_is_rounded_by_its_own_largest_weight() -> None:
    weight = random(64, 192, seed=2) * np.logspace(-4, 4, 64, dtype=np.float32)[:, None]
    weight[5] = 0
    rows = quantize_rows(weight)
    assert (np.abs(rows.values * rows.scales[:, None] - weight) <= rows.scales[:, None] * 0.501).all()
    assert (np.abs(rows.values).max(axis=1) == np.where(np.arange(64) == 5, 0, 127)).all()


def random(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def dequantized(blocks: Blocks, scheme: Scheme) -> NDArray[np.float32]:
    values = blocks.values
    if scheme.bits == 4:
        values = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:2], -1)
    centred = values.astype(np.float32) - (1 << (scheme.bits - 1))
    return (centred * blocks.scales[..., None]).reshape(len(values), -1)


def matmul_n_bits(
    x: NDArray[np.float32], blocks: Blocks, scheme: Scheme, *, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    node = helper.make_node(
        "MatMulNBits",
        ["x", "values", "scales"],
        ["y"],
        domain="com.microsoft",
        N=shape[0],
        K=shape[1],
        bits=scheme.bits,
        block_size=scheme.block_size,
        accuracy_level=1,  # activations in float32, so that only the weights are rounded
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (len(x), shape[0]))],
        [numpy_helper.from_array(blocks.values, "values"), numpy_helper.from_array(blocks.scales, "scales")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    [product] = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return product
