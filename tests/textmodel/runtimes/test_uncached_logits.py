"""Graphs without a KV cache; their results are tested in test_runtimes.py."""

from __future__ import annotations

import numpy as np
import pytest

from genserve.backends.onnxruntime import open_graph
from genserve.errors import RepositoryError
from genserve.tensor import Tensor
from genserve.textmodel.logits_config import LogitsNames
from genserve.textmodel.runtimes.uncached_logits import UncachedLogits
from tests.backends.inferences import ON_CPU, config_of
from tests.backends.networks import bloom_onnx
from tests.textmodel.runtimes.cached_sequences import CachedSequences

CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
        { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ -1, 500 ] } ]
"""


def test_an_onnx_graph_without_a_cache_decodes(tmp_path):
    config = config_of(CONFIG)
    graph = open_graph(bloom_onnx(tmp_path / "model.onnx", vocab_size=500), config=config, placement=ON_CPU)
    logits = UncachedLogits(graph.run, config, max_length=32)
    sequences = CachedSequences(logits)
    sequences.forward({"a": [5, 6, 7], "b": [8]})
    for history, row in sequences.forward({"a": [9, 11, 12], "b": [10]}, wanted="all"):
        inputs = {"input_ids": np.array([history]), "attention_mask": np.ones((1, len(history)), np.int64)}
        tensors = {name: Tensor(name, array) for name, array in inputs.items()}
        np.testing.assert_allclose(row, graph.run(tensors, ["logits"])["logits"].array[0, -1], rtol=1e-5)


def test_only_sequences_whose_logits_are_wanted_are_run():
    shapes = []

    def run(inputs, outputs):
        ids = inputs["input_ids"].array
        shapes.append(ids.shape)
        return {"logits": Tensor("logits", ids[..., None].repeat(3, axis=2).astype(np.float32))}

    sequences = CachedSequences(UncachedLogits(run, config_of(CONFIG), max_length=32))
    shapes.clear()
    [(_, row)] = sequences.forward({"chunk": [1] * 20, "other": [3, 4]}, wanted=[21])
    assert row.tolist() == [4, 4, 4]
    assert shapes == [(1, 2)]
    sequences.forward({"chunk": [1] * 5}, wanted=[])
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 500), r"float32 \[1, 500\]"), ((1, 1, 500), r"float32 \[1, 1, 500\]")],
)
def test_a_graph_of_the_last_position_only_is_rejected(shape, words):
    def run(inputs, outputs):
        return {"logits": Tensor("logits", np.zeros(shape, np.float32))}

    with pytest.raises(RepositoryError, match=words) as caught:
        UncachedLogits(run, config_of(CONFIG), max_length=32)
    assert "[1, 2, vocabulary]" in caught.value.remedy


def test_logits_that_do_not_fit_into_memory_are_split_into_runs():
    """Eight rows of a large vocabulary: as 32 prompts of 512 tokens would take 3 GiB."""
    num_rows, vocab_size, sizes = 8, 2**20, []

    def run(inputs, outputs):
        ids = inputs["input_ids"].array
        sizes.append(len(ids))
        # The logits of a token are one-hot at its id.
        return {"logits": Tensor("logits", one_hot(ids))}

    def one_hot(ids):
        rows = np.zeros((*ids.shape, vocab_size), np.float16)
        np.put_along_axis(rows, ids[..., np.newaxis], 1, axis=-1)
        return rows

    config = config_of(CONFIG.replace("max_batch_size: 4", f"max_batch_size: {num_rows}"))
    sequences = CachedSequences(UncachedLogits(run, config, max_length=32))
    rows = sequences.forward({i: [1] * 16 + [i + 2] for i in range(num_rows)})
    assert [row.argmax() for _, row in rows] == [i + 2 for i in range(num_rows)]
    assert sizes[1:] == [3, 3, 2]


@pytest.mark.parametrize(
    ("inputs", "outputs", "found"),
    [
        (["input_ids"], ["logits"], ("input_ids", None, "logits")),
        (["attention_mask", "tokens"], ["scores"], ("tokens", "attention_mask", "scores")),
        (["INPUT__0", "INPUT__1"], ["OUTPUT__0"], ("INPUT__0", "INPUT__1", "OUTPUT__0")),
        (["input_ids"], ["hidden", "logits"], ("input_ids", None, "logits")),
    ],
)
def test_ids_mask_and_logits_are_found_by_name_or_order(inputs, outputs, found):
    names = LogitsNames.of(config_with(inputs, outputs))
    assert (names.input_ids, names.attention_mask, names.logits) == found


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["input_ids", "attention_mask", "token_type_ids"], ["logits"]),
        (["input_ids"], ["start", "end"]),
        (["attention_mask"], ["logits"]),
    ],
)
def test_a_model_of_other_tensors_is_rejected_by_their_names(inputs, outputs):
    words = f"inputs are {', '.join(inputs)}, its outputs {', '.join(outputs)}"
    with pytest.raises(RepositoryError, match=words):
        LogitsNames.of(config_with(inputs, outputs))


def test_ids_of_an_unsupported_type_are_rejected():
    config = config_of(CONFIG.replace('ids" data_type: TYPE_INT64', 'ids" data_type: TYPE_FP32'))
    with pytest.raises(RepositoryError, match=r"'input_ids' .* has the unsupported type TYPE_FP32"):
        UncachedLogits(lambda inputs, outputs: {}, config, max_length=32)


def config_with(inputs, outputs):
    specs = [f'input {{ name: "{name}" data_type: TYPE_INT64 dims: [ -1 ] }}' for name in inputs]
    specs += [f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1, 9 ] }}' for name in outputs]
    return config_of("\n".join(specs))

