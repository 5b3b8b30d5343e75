"""Fitted weights: the precision int4."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from genserve.export.checkpoints.checkpoint import StoredRows
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.fitted import fit_weights
from tests.export.graphs import write_graph
from tests.support.tiny_llama import tiny_llama_checkpoint

Weights = NDArray[np.float32]

INPUTS = 96


UP = "layers.1.mlp.up.weight"


def weights_of(weight: Weights) -> DecoderWeights:
    return DecoderWeights(
        roles=frozenset({UP}), rows=lambda _role: Rows.of(weight), vector=lambda _role: weight
    )


def fitted(weight: Weights, *, role: str = UP, seen: Weights | None = None) -> StoredRows:
    """Fit one weight of a decoder of 16 layers."""
    weights = weights_of(weight)
    activations = {} if seen is None else {"layers.1.mlp.norm": seen}
    found = fit_weights(weights, activations, num_layers=16).stored(role)
    assert found is not None
    return found


def numbers(stored: StoredRows) -> Weights:
    values: Weights = gguf.dequantize(stored.rows.whole(), GGMLQuantizationType[stored.kind])
    return values.reshape(stored.shape)


def random(outputs: int = 40) -> Weights:
    rng = np.random.default_rng(0)
    return rng.standard_normal((outputs, INPUTS), dtype=np.float32)


def error(weight: Weights, found: Weights, seen: Weights | None = None) -> float:
    importance = np.ones(INPUTS, np.float32) if seen is None else np.square(seen)
    return float((np.square(weight - found) * importance).sum())


@pytest.mark.parametrize(
    ("role", "kind"), [("layers.3.mlp.down.weight", "Q4_1"), ("layers.1.mlp.down.weight", "Q5_1")]
)
def test_the_fit_loses_less_than_the_grid_from_end_to_end(role: str, kind: str) -> None:
    weight = random()
    stored = fitted(weight, role=role)
    assert stored.kind == kind
    number = GGMLQuantizationType[kind]
    from_end_to_end = gguf.dequantize(gguf.quantize(weight, number), number).reshape(weight.shape)
    assert error(weight, numbers(stored)) < 0.85 * error(weight, from_end_to_end)


def test_errors_count_by_the_mean_square_of_their_inputs() -> None:
    weight = random()
    seen = np.random.default_rng(1).lognormal(sigma=2, size=INPUTS).astype(np.float32)
    equal, weighted = numbers(fitted(weight)), numbers(fitted(weight, seen=seen))
    assert error(weight, weighted, seen) < 0.7 * error(weight, equal, seen)
    assert error(weight, weighted) > error(weight, equal)


def test_numbers_on_a_grid_stay_as_they_are() -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (8, INPUTS)).astype(np.float32)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = codes * np.float32(0.0625) - np.float32(0.375)
    np.testing.assert_array_equal(numbers(fitted(weight)), weight)


@pytest.mark.parametrize("value", [0, 1, -3])
def test_a_block_of_equal_numbers_is_exact(value: float) -> None:
    weight = np.full((3, INPUTS), value, np.float32)
    np.testing.assert_array_equal(numbers(fitted(weight)), weight)


def test_rows_that_are_read_in_parts_are_the_same() -> None:
    stored = fitted(random(), seen=np.ones(INPUTS, np.float32))
    parts = [stored.rows.read(0, 17), stored.rows.read(17, 40)]
    np.testing.assert_array_equal(np.concatenate(parts), stored.rows.whole())


def test_a_weight_without_whole_blocks_is_not_fitted() -> None:
    weights = weights_of(np.ones((4, 40), np.float32))
    assert fit_weights(weights, {}, num_layers=2).stored(UP) is None


def test_the_values_and_downs_of_some_layers_have_5_bits_and_the_embedding_8(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(
        tmp_path / "tiny", hidden_size=64, intermediate_size=96, num_hidden_layers=8, tie_word_embeddings=True
    )
    written = write_graph(folder, tmp_path / "graph", precision="int4")
    graph = onnx.load(written.folder / "model.onnx", load_external_data=False).graph
    formats = [
        {a.name: a.s.decode() for a in node.attribute if a.name.endswith("weight_format")}
        for node in graph.node
        if node.op_type == "DecoderLayer"
    ]
    more = [layer for layer, found in enumerate(formats) if found["down_weight_format"] == "q5"]
    assert more == [0, 3, 6]    # the last layer has operators of its own
    assert [layer for layer, found in enumerate(formats) if "q5" in found["weight_format"]] == more
    assert {found["inner_weight_format"] for found in formats} == {"q4"}
    embedding, head = (node for node in graph.node if "embedding" in node.input)
    assert {a.s for node in (embedding, head) for a in node.attribute if a.name == "weight_format"} == {b"q8"}
