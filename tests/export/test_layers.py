"""Layers of every precision, run by ONNX Runtime with our operators, compared with numpy."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from torch import nn, tensor

from genserve.backends.onnx_session import register_kernels
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder import Activation
from genserve.export.export_options import Precision
from genserve.export.graphs.layers import FusedLayers, Layers, Linear, LinearKind, Norm, StandardLayers
from genserve.export.graphs.onnx_graph import OnnxGraphBuilder
from genserve.export.quantization import SCHEMES, scheme_of

# Largest error over the standard deviation of the product, from quantization.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-5, "fp16": 1e-2, "int8": 0.06, "int4": 0.6, "source": 0.06}
PRECISIONS = pytest.mark.parametrize("precision", get_args(Precision))
ACTIVATIONS: dict[Activation, nn.Module] = {
    "silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()
}
INPUTS, OUTPUTS = 90, 50    # not multiples of anything


@PRECISIONS
@pytest.mark.parametrize("kind", get_args(LinearKind)[:2])
def test_a_linear_layer_has_a_bias_and_a_residual(
    tmp_path: Path, precision: Precision, kind: LinearKind
) -> None:
    weight, bias = random(OUTPUTS, INPUTS), random(OUTPUTS)
    x, residual = random(5, INPUTS), random(5, OUTPUTS)
    found = run_layer(
        tmp_path, precision, weight, x=x, kind=kind, bias=bias, residual=residual, num_outputs=OUTPUTS
    )
    expected = x @ weight.T + bias + residual
    assert np.abs(found - expected).max() < TOLERANCE[precision] * np.sqrt(INPUTS)


@PRECISIONS
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_linear_layer_norms_its_inputs(tmp_path: Path, precision: Precision, kind: Any) -> None:
    weight, x = random(OUTPUTS, INPUTS), 3 * random(5, INPUTS) + 1
    norm = Norm(
        name="norm",
        kind=kind,
        epsilon=1e-5,
        weight=random(INPUTS) + 1,
        bias=random(INPUTS) if kind == "layer" else None,
    )
    found = run_layer(tmp_path, precision, weight, x=x, norm=norm, num_outputs=OUTPUTS)
    expected = normed(x, norm) @ weight.T
    assert np.abs(found - expected).max() < 2 * TOLERANCE[precision] * np.sqrt(INPUTS)


@PRECISIONS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_applies_to_outputs_or_gates(
    tmp_path: Path, precision: Precision, activation: Activation, gated: bool
) -> None:
    weight, bias, x = random(2 * OUTPUTS, INPUTS) / 10, random(2 * OUTPUTS), random(5, INPUTS)
    found = run_layer(
        tmp_path,
        precision,
        weight,
        x=x,
        bias=bias,
        activation=activation,
        gated=gated,
        num_outputs=OUTPUTS if gated else 2 * OUTPUTS,
    )
    product = x @ weight.T + bias
    if gated:
        gates, values = np.split(product, 2, axis=1)
        expected = ACTIVATIONS[activation](tensor(gates)).numpy() * values
    else:
        expected = ACTIVATIONS[activation](tensor(product)).numpy()
    assert np.abs(found - expected).max() < TOLERANCE[precision] * np.sqrt(INPUTS)


@PRECISIONS
@pytest.mark.parametrize("hidden", [128, 90], ids=["whole_blocks", "padded"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_tied_vocabulary_is_embedding_and_head(
    tmp_path: Path, precision: Precision, hidden: int, softcap: float | None
) -> None:
    weight, ids = random(40, hidden), np.array([3, 39, 0, 7, 7, 1])
    norm = Norm(name="norm", kind="rms", epsilon=1e-5, weight=np.ones(hidden, np.float32), bias=None)
    with OnnxGraphBuilder(tmp_path) as graph:
        layers = layers_of(graph, precision, is_tied=True)
        graph.input("ids", np.int64, ("num_tokens",))
        rows = layers.embedding("ids", Rows.of(weight), "embeddings")
        head = Linear(
            x=rows, weight=Rows.of(weight), output="logits", kind="head", norm=norm, softcap=softcap
        )
        layers.head(head, tied=True)
        graph.output("logits", np.float32, ("num_tokens", 40))
        graph.save(metadata={})
    found = run(tmp_path, ids=ids)
    expected = normed(weight[ids], norm) @ weight.T
    if softcap:
        expected = softcap * np.tanh(expected / softcap)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < TOLERANCE[precision] * np.sqrt(hidden)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_tied_vocabulary_is_stored_once(tmp_path: Path, precision: Precision) -> None:
    norm = Norm(name="norm", kind="rms", epsilon=1e-5, weight=np.ones(128, np.float32), bias=None)
    with OnnxGraphBuilder(tmp_path) as graph:
        layers = layers_of(graph, precision, is_tied=True)
        weight = Rows.of(random(40, 128))
        rows = layers.embedding(graph.input("ids", np.int64, ("num_tokens",)), weight, "embeddings")
        head = Linear(x=rows, weight=weight, output="logits", kind="head", norm=norm)
        layers.head(head, tied=True)
    assert (tmp_path / "model.onnx.data").stat().st_size < 2 * 40 * 128 + 3 * 4096


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("per_group", [False, True])
def test_a_norm_by_itself_has_groups_and_a_residual(
    tmp_path: Path, precision: Precision, kind: Any, per_group: bool
) -> None:
    """Of heads, for example, which have one weight or a weight each."""
    weight = random(3, 30) if per_group else random(30)
    bias = None if kind == "rms" or per_group else random(30)
    norm = Norm(name="y", kind=kind, epsilon=1e-5, weight=weight, bias=bias, num_groups=3)
    x, residual, dtype = random(5, 90), 2 * random(5, 90), SCHEMES[precision].activations
    with OnnxGraphBuilder(tmp_path) as graph:
        graph.input("x", dtype, ("rows", 90))
        graph.input("residual", dtype, ("rows", 90))
        output = layers_of(graph, precision).norm("x", norm, residual="residual")
        graph.output(output, dtype, ("rows", 90))
        graph.save(metadata={})
    groups = [
        normed(part, replace(norm, weight=own))
        for part, own in zip(np.split(x, 3, axis=1), np.broadcast_to(weight, (3, 30)), strict=True)
    ]
    found = run(tmp_path, x=x.astype(dtype), residual=residual.astype(dtype))
    np.testing.assert_allclose(
        found, np.concatenate(groups, axis=1) + residual, atol=1e-5 if precision == "fp32" else 2e-2
    )


@pytest.mark.parametrize("kind", get_args(LinearKind)[:2])
def test_a_large_row_does_not_affect_the_precision_of_another(tmp_path: Path, kind: LinearKind) -> None:
    weight, x = random(OUTPUTS, INPUTS), random(2, INPUTS)
    x[1] *= 1000
    found = run_layer(tmp_path, "int8", weight, x=x, kind=kind, num_outputs=OUTPUTS)
    assert np.abs(found - x @ weight.T).max(axis=1)[0] < TOLERANCE["int8"] * np.sqrt(INPUTS)


@pytest.mark.parametrize("kind", get_args(LinearKind)[:2])
def test_a_row_of_zeros_gives_zeros(tmp_path: Path, kind: LinearKind) -> None:
    weight, x = random(OUTPUTS, INPUTS), np.zeros((3, INPUTS), np.float32)
    assert not run_layer(tmp_path, "int8", weight, x=x, kind=kind, num_outputs=OUTPUTS).any()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("precision", ["int8", "int4", "fp32"])
def test_a_large_weight_is_written_in_parts_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision, *, gated: bool
) -> None:
    weight = random(330, 70)
    read: list[weakref.ref[NDArray[np.float32]]] = []
    in_memory: list[int] = []

    def some_rows(start: int, stop: int) -> NDArray[np.float32]:
        in_memory.append(sum(part() is not None for part in read))
        part = weight[start:stop].copy()
        read.append(weakref.ref(part))
        return part

    def written(name: str, rows: Rows[np.float32]) -> bytes:
        (tmp_path / name).mkdir()
        with OnnxGraphBuilder(tmp_path / name) as graph:
            activation = "silu" if gated else None
            layer = Linear(
                x="x", weight=rows, output="y", kind="normed", gated=gated, activation=activation
            )
            layers_of(graph, precision).linear(layer)
        return (tmp_path / name / "model.onnx.data").read_bytes()

    whole = written("whole", Rows.of(weight))
    monkeypatch.setattr("genserve.export.checkpoints.rows._PART", 64 * 70)
    assert written("parts", Rows(weight.shape, some_rows)) == whole
    assert len(read) >= 6
    # One part is written while the next is read, and gates and values are read one after the other.
    assert max(in_memory) <= 3


def test_weights_are_aligned_to_pages(tmp_path: Path) -> None:
    with OnnxGraphBuilder(tmp_path) as graph:
        for name in ("a", "b", "c"):
            graph.weight(name, random(3, 5))
    assert (tmp_path / "model.onnx.data").stat().st_size == 2 * 4096 + 3 * 5 * 4


def run_layer(
    folder: Path,
    precision: Precision,
    weight: NDArray[np.float32],
    *,
    x: NDArray[np.float32],
    num_outputs: int,
    kind: LinearKind = "normed",
    residual: NDArray[np.float32] | None = None,
    **options: Any,
) -> NDArray[np.generic]:
    dtype, inputs = SCHEMES[precision].activations, {"x": x}
    with OnnxGraphBuilder(folder) as graph:
        graph.input("x", dtype, ("rows", weight.shape[1]))
        if residual is not None:
            inputs["residual"] = residual
            options["residual"] = graph.input("residual", dtype, ("rows", num_outputs))
        layer = Linear(x="x", weight=Rows.of(weight), output="y", kind=kind, **options)
        output = layers_of(graph, precision).linear(layer)
        graph.output(output, dtype, ("rows", num_outputs))
        graph.save(metadata={})
    return run(folder, **{name: value.astype(dtype) for name, value in inputs.items()})


def layers_of(graph: OnnxGraphBuilder, precision: Precision, *, is_tied: bool = False) -> Layers:
    scheme = scheme_of(precision, is_tied=is_tied)
    return StandardLayers(graph, scheme) if precision == "fp16" else FusedLayers(graph, scheme)


def normed(x: NDArray[np.float32], norm: Norm) -> NDArray[np.float32]:
    centred = x - x.mean(axis=-1, keepdims=True) if norm.kind == "layer" else x
    shares = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + norm.epsilon)
    return shares * norm.weight + (0 if norm.bias is None else norm.bias)


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def run(folder: Path, **inputs: NDArray[Any]) -> NDArray[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    register_kernels(options)
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    [output] = session.run(None, inputs)
    return output
