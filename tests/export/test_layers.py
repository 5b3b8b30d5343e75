"""Layers of every precision, run by ONNX Runtime, against numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from genserve.backends.onnx_session import exact_products
from genserve.export.graph import Graph
from genserve.export.layers import Layers
from genserve.export.precision import FORMATS, Format
from genserve.export.report import Precision

# Largest error over the standard deviation of the product: weights and activations are rounded.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-5, "fp16": 1e-2, "int8": 0.06, "int4": 0.6}
PRECISIONS = pytest.mark.parametrize("precision", get_args(Precision))


@PRECISIONS
def test_a_linear_layer_multiplies_and_shifts(tmp_path: Path, precision: Precision) -> None:
    weight, bias, x = random(48, 96), random(48), random(2, 5, 96)
    with Graph(tmp_path) as graph:
        layers = Layers(graph, FORMATS[precision])
        graph.input("x", layers.numbers.activations, ("batch", "sequence", 96))
        layers.linear("x", weight, "y", bias=bias)
        graph.output("y", layers.numbers.activations, ("batch", "sequence", 48))
        graph.save(metadata={})
    found = run(tmp_path, x=x.astype(layers.numbers.activations))
    assert np.abs(found - (x @ weight.T + bias)).max() < TOLERANCE[precision] * np.sqrt(96)


@PRECISIONS
@pytest.mark.parametrize("hidden", [128, 96], ids=["whole_blocks", "padded"])
def test_a_vocabulary_is_stored_once_and_is_embedding_and_head(
    tmp_path: Path, precision: Precision, hidden: int
) -> None:
    weight, ids = random(40, hidden), np.array([[3, 39, 0], [7, 7, 1]])
    with Graph(tmp_path) as graph:
        layers = Layers(graph, FORMATS[precision])
        graph.input("ids", np.int64, ("batch", "sequence"))
        vocabulary = layers.vocabulary("table", weight)
        rows = layers.embedding("ids", vocabulary, "embeddings")
        flat = graph.node("Flatten", [rows], "flat", axis=2)
        layers.head(flat, vocabulary, "logits")
        graph.output("logits", np.float32, ("rows", 40))
        graph.save(metadata={})
    found = run(tmp_path, ids=ids)
    expected = weight[ids].reshape(6, hidden) @ weight.T
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < TOLERANCE[precision] * np.sqrt(hidden)
    stored = np.dtype(layers.numbers.activations).itemsize if precision.startswith("fp") else 1
    assert (tmp_path / "model.onnx.data").stat().st_size < 40 * 128 * stored + 2 * 4096


@pytest.mark.parametrize("in_blocks", [False, True], ids=["by_row", "by_block"])
def test_a_row_has_the_same_product_to_the_bit_alone_and_beside_any_others(
    tmp_path: Path, in_blocks: bool
) -> None:
    write_linear(tmp_path, random(96, 192), FORMATS["int8"], in_blocks=in_blocks)
    x = random(67, 192) * np.logspace(-3, 3, 67, dtype=np.float32)[:, None]
    together = run(tmp_path, x=x)
    for first, last in [(0, 1), (66, 67), (3, 5), (7, 10), (1, 9), (0, 16), (11, 44), (2, 67)]:
        assert np.array_equal(run(tmp_path, x=x[first:last]), together[first:last])


def test_a_row_loses_no_more_when_another_is_a_thousand_times_as_large(tmp_path: Path) -> None:
    weight, x = random(48, 96), random(2, 96)
    x[1] *= 1000
    write_linear(tmp_path, weight, FORMATS["int8"])
    error = np.abs(run(tmp_path, x=x) - x @ weight.T).max(axis=1)
    assert error[0] < TOLERANCE["int8"] * np.sqrt(96)


def test_a_row_of_zeros_gives_zeros(tmp_path: Path) -> None:
    write_linear(tmp_path, random(48, 96), FORMATS["int8"])
    assert not run(tmp_path, x=np.zeros((3, 96), np.float32)).any()


def test_a_cpu_that_needs_exact_products_asked_for_computes_the_same(tmp_path: Path) -> None:
    write_linear(tmp_path, random(48, 96), FORMATS["int8"])
    x, exact = random(5, 96), exact_products("flags\t: avx2")
    assert exact
    assert np.allclose(run(tmp_path, entries=exact, x=x), run(tmp_path, x=x), atol=1e-5)


def test_weights_begin_where_pages_of_memory_do(tmp_path: Path) -> None:
    with Graph(tmp_path) as graph:
        for name in ("a", "b", "c"):
            graph.weight(name, random(3, 5))
    assert (tmp_path / "model.onnx.data").stat().st_size == 2 * 4096 + 3 * 5 * 4


def write_linear(
    folder: Path, weight: NDArray[np.float32], numbers: Format, *, in_blocks: bool = False
) -> None:
    with Graph(folder) as graph:
        graph.input("x", np.float32, ("rows", weight.shape[1]))
        Layers(graph, numbers).linear("x", weight, "y", in_blocks=in_blocks)
        graph.output("y", np.float32, ("rows", len(weight)))
        graph.save(metadata={})


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def run(
    folder: Path, *, entries: Mapping[str, str] = MappingProxyType({}), **inputs: NDArray[np.generic]
) -> NDArray[np.generic]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for key, value in (exact_products() | dict(entries)).items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    [output] = session.run(None, inputs)
    return output
