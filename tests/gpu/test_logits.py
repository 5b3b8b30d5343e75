"""The forwards of fp16 exports on a GPU against transformers' own models there, in fp16 too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from genserve.engine.logits_model import ForwardBatch, LogitsModel
from genserve.errors import RepositoryError
from genserve.export.export_options import ExportFormat
from genserve.textmodel.logits_config import pipeline_files
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits
from genserve.textmodel.runtimes.torchscript_logits import TorchLogits
from tests.export.graphs import conversion_of, write_conversion, write_graph
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.textmodel.runtimes.cached_sequences import CachedSequences

TOLERANCE = 0.02  # share of the largest logit: some units of float16 in two layers


def reference_model(source: Path, *, device: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16, attn_implementation="eager")
    return model.to(device)


def random_ids(count: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def onnx(source: Path, folder: Path, memory: DeviceMemory) -> LogitsModel:
    return OnnxLogits(onnx_file(source, folder), max_num_seqs=4, max_length=128, memory=memory)


def onnx_file(source: Path, folder: Path, *, pipeline_stages: int = 1) -> Path:
    graph = write_graph(source, folder, precision="fp16", pipeline_stages=pipeline_stages)
    return graph.folder / "model.onnx"


def pipeline(source: Path, folder: Path, memory: DeviceMemory) -> LogitsModel:
    """The second stage is on a second GPU, if there is one."""
    has_two = memory.device == "cuda" and torch.cuda.device_count() > 1
    memories = [memory, DeviceMemory("cuda:1") if has_two else memory]
    files = pipeline_files(onnx_file(source, folder, pipeline_stages=2), num_stages=2)
    return PipelineLogits(files, max_num_seqs=4, max_length=128, memories=memories, max_micro_batch=7)


def torchscript(source: Path, folder: Path, memory: DeviceMemory) -> LogitsModel:
    conversion = conversion_of(source, export_format=ExportFormat.TORCHSCRIPT)
    file = write_conversion(conversion, folder).folder / "model.pt"
    return TorchLogits(file, max_num_seqs=4, max_length=128, memory=memory)


ATTENTION_WITH_A_BIAS = "bloom"     # ALiBi, which ONNX Runtime's attention on CUDA has not


@pytest.mark.parametrize("model", TINY_MODELS)
@pytest.mark.parametrize("runtime", [onnx, pipeline, torchscript])
def test_packed_forwards_equal_transformers(runtime, model, device, memory, tmp_path):
    if runtime is not torchscript and model.startswith(ATTENTION_WITH_A_BIAS):
        pytest.skip("has no attention on CUDA in ONNX Runtime")
    if runtime is pipeline and model.endswith("one_layer"):
        pytest.skip("has one layer for two stages")
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    sequences = CachedSequences(runtime(source, tmp_path / "graph", memory))
    reference = reference_model(source, device=device)
    steps = [
        {"a": random_ids(5, seed=1), "b": random_ids(40, seed=2), "c": random_ids(1, seed=3)},
        *({name: random_ids(1, seed=step) for name in "abc"} for step in range(4)),
        {"a": [5], "d": random_ids(30, seed=4), "b": random_ids(4, seed=5)},    # a chunk, and a draft
        {"b": [6], "d": random_ids(20, seed=6), "c": [7]},
    ]
    for new in steps:
        compare(sequences.forward(new, wanted="all"), reference)
    sequences.shorten("a", 0)
    sequences.copy("d", "a", length=30)     # a prefix that two share
    compare(sequences.forward({"a": [8, 9], "d": [10]}, wanted="all"), reference)


def compare(rows: list[tuple[list[int], NDArray[np.float32]]], reference: PreTrainedModel) -> None:
    for history, row in rows:
        with torch.inference_mode():
            ids = torch.tensor([history], device=reference.device)
            expected = reference(ids).logits[0, -1].float().cpu().numpy()
        assert np.abs(row - expected).max() < TOLERANCE * np.abs(expected).max()


def test_logits_stay_on_the_device(device, memory, tmp_path):
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama"])
    file = write_graph(source, tmp_path / "graph", precision="fp16").folder / "model.onnx"
    logits = OnnxLogits(file, max_num_seqs=2, max_length=64, memory=memory)
    rows = logits.forward(
        ForwardBatch(
            token_ids=np.array([3, 4]),
            positions=np.array([0, 1]),
            query_start_loc=np.array([0, 2], np.int32),
            num_computed_tokens=np.array([0], np.int32),
            block_table=np.array([[0]], np.int32),
            logits_indices=np.array([1]),
        )
    )
    assert rows.device == torch.device(device)
    assert rows.dtype == torch.float32
    assert torch.from_dlpack(rows).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("model", ["bloom_4_heads", "fp32"])
def test_a_cache_that_cuda_does_not_support_is_rejected_at_load(model, device, memory, tmp_path):
    if device == "cpu":
        pytest.skip("the CPU has it")
    precision = "fp32" if model == "fp32" else "fp16"
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama" if model == "fp32" else model])
    file = write_graph(source, tmp_path / "graph", precision=precision).folder / "model.onnx"
    with pytest.raises(RepositoryError, match="on cuda"):
        OnnxLogits(file, max_num_seqs=2, max_length=64, memory=memory)
