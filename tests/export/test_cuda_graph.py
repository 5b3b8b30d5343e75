"""The fp16 graph in a runtime without our kernels, with ONNX Runtime's PagedAttention for CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from genserve.errors import ExportError
from genserve.export.graphs.attention_graph import has_function
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.export.graphs import WrittenGraph, conversion_of, write_conversion
from tests.export.reference_operators import reference_evaluator
from tests.export.rows import BlockPool, Row, forward_batch, logits_of
from tests.export.test_families import ONNX_ONLY
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.representatives import with_extended
from tests.support.transformers_reference import reference_logits, reference_model

TOLERANCE = 0.03  # for logits between -4 and 4: a few units of float16 in two layers
ALWAYS = {"gemma3", "llama", "smollm3"}
# Their attention has a part that ONNX Runtime's has not: the head is rotated in part, for example.
WITHOUT_BODY = {"nemotron", "phi", "phi_plain", "stablelm", "stablelm_parallel"}
REFUSED = {
    name
    for name, config in TINY_MODELS.items()
    if name in ONNX_ONLY or any("expert" in field and value for field, value in config.items())
}
WITH_BODY = [
    name
    for name in TINY_MODELS
    if "bloom" not in name and "odd" not in name and name not in WITHOUT_BODY | REFUSED
]


def fp16_graph(folder: Path, model: str) -> WrittenGraph:
    source = tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[model])
    return write_conversion(conversion_of(source, precision="fp16"), folder / "graph")


@pytest.mark.parametrize("model", with_extended(WITH_BODY, always=ALWAYS))
def test_its_logits_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    """Evaluated by onnx, with ONNX Runtime's operators in torch."""
    graph = fp16_graph(tmp_path, model)
    rows = [Row(random_ids(length), blocks=blocks) for length, blocks in ((50, [6, 0, 3, 1]), (23, [2, 5]))]
    pool = EvaluatedGraph(graph, num_blocks=8)
    found: list[list[NDArray[np.float32]]] = [[] for _ in rows]
    for lengths in ([17, 20], [1, 1], [32, 2]):  # prompts, decodes, and a chunk with drafted tokens
        for logits, part in zip(pool.forward(rows, lengths), found, strict=True):
            part.append(logits)
    reference = reference_model(tmp_path / "checkpoint")
    for row, parts in zip(rows, found, strict=True):
        expected = reference_logits(reference, row.ids)
        assert np.abs(np.concatenate(parts) - expected).max() < TOLERANCE


@pytest.mark.parametrize("model", with_extended(WITH_BODY, always=ALWAYS))
def test_without_our_kernels_onnx_runtime_accepts_its_types_and_shapes(tmp_path: Path, model: str) -> None:
    path = fp16_graph(tmp_path, model).folder / "model.onnx"
    assert "InsertedPrecisionFreeCast" in failure(path)
    # Not any failure: types and shapes are checked before.
    wrong = onnx.load(path)
    [table] = [value for value in wrong.graph.input if value.name == "block_table"]
    table.type.tensor_type.elem_type = TensorProto.INT64
    onnx.save(wrong, path)
    assert "Type 'tensor(int64)' of input parameter (block_table)" in failure(path)


def failure(path: Path) -> str:
    """ONNX Runtime's error for a graph on the CPU, where it has no PagedAttention.

    It inserts casts to float32, which the operator does not support either, after all types and shapes have
    been checked.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match="PagedAttention") as caught:  # onnxruntime's share no base class
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return str(caught.value)


@pytest.mark.parametrize(
    "model",
    with_extended(
        ["bloom_4_heads", "gpt2_odd", "gpt_neox_odd", *sorted(WITHOUT_BODY)],
        always={"bloom_4_heads", "gpt2_odd", "phi"},
    ),
)
def test_attention_that_cuda_does_not_support_has_no_body_and_runs_on_the_cpu(
    tmp_path: Path, model: str
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    conversion = conversion_of(source, precision="fp16")
    assert not has_function(conversion.decoder)
    graph = write_conversion(conversion, tmp_path / "graph")
    assert not onnx.load(graph.folder / "model.onnx", load_external_data=False).functions
    ids = random_ids(50)
    found = logits_of(graph.logits(max_num_seqs=1, max_length=64), ids)
    assert np.abs(found - reference_logits(reference_model(source), ids)).max() < TOLERANCE


@pytest.mark.parametrize("model", with_extended(sorted(REFUSED), always={"gpt_oss", "lfm2"}))
def test_experts_and_own_operators_are_refused_in_fp16(tmp_path: Path, model: str) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    with pytest.raises(ExportError, match=r"fp16 has no (experts|layers)"):
        conversion_of(source, precision="fp16")


@pytest.mark.parametrize("model", ["gemma3", "llama", "smollm3"])
def test_with_our_kernels_the_same_file_runs_on_the_cpu(tmp_path: Path, model: str) -> None:
    graph, ids = fp16_graph(tmp_path, model), random_ids(50)
    model_on_the_cpu = graph.logits(max_num_seqs=1, max_length=64)
    assert isinstance(model_on_the_cpu, OnnxLogits)
    found = BlockPool(model_on_the_cpu, seed=0).run([Row(ids)], length=13)[0]
    expected = reference_logits(reference_model(tmp_path / "checkpoint"), ids)
    assert np.abs(found - expected).max() < TOLERANCE


class EvaluatedGraph:
    """A graph with a cache, run by onnx's evaluator; its outputs are the cache of the next run."""

    def __init__(self, graph: WrittenGraph, *, num_blocks: int) -> None:
        self._evaluator = reference_evaluator(graph.folder / "model.onnx")
        [sizes, *others] = graph.dimensions.caches
        shape = (num_blocks, 16, sizes.num_kv_heads, sizes.head_dim)
        self._caches = {
            f"past_key_values.{layer}.{part}": np.zeros(shape, np.float16)
            for layer in range(1 + len(others))
            for part in ("key", "value")
        }

    def forward(self, rows: list[Row], lengths: list[int]) -> list[NDArray[np.float32]]:
        batch = forward_batch(rows, lengths)
        inputs: dict[str, Any] = {
            "input_ids": batch.token_ids,
            "position_ids": batch.positions,
            "cumulative_sequence_length": batch.query_start_loc,
            "past_seqlens": batch.num_computed_tokens,
            "block_table": batch.block_table,
            "logits_indices": batch.logits_indices,
            "attention_metadata": np.array([max(lengths), 64], np.int32),
        }
        found = self._evaluator.run(None, inputs | self._caches)
        outputs = dict(zip(self._evaluator.output_names, found, strict=True))
        self._caches = {name: outputs[name.replace("past_key_values", "present")] for name in self._caches}
        for row, length in zip(rows, lengths, strict=True):
            row.num_computed += length
        return np.split(outputs["logits"], batch.query_start_loc[1:-1])


def random_ids(length: int) -> NDArray[np.int64]:
    return np.random.default_rng(length).integers(3, 320, length)
