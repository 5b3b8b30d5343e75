"""The models with short names: their sizes follow from the shape, which exports of tiny models confirm."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import onnx
import pytest

from genserve.export import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    KnownModel,
    SilentProgress,
    export_model,
    exporter,
    known_model,
)
from genserve.export.export_options import HUB_NAME
from genserve.export.known_models import ModelShape, variants
from genserve.export.machine_speed import MANY_ROWS, measure_speed
from genserve.export.reference import Recording
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint

RECORDINGS = Path(exporter.__file__).parent / "recordings"
_TINY = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "inner": 96, "vocab": 320, "context": 128}
_ALIGNMENT = 4096   # of each weight in the file

# The shapes of the known models differ in tied heads, norms of heads, biases, and the numbers of norms and of
# tables of positions.
SHAPES = {
    "llama": ModelShape(**_TINY, head_dim=16, is_tied=False),
    "llama_one_layer": ModelShape(**_TINY | {"layers": 1}, head_dim=16),
    "qwen2": ModelShape(**_TINY, head_dim=16, is_tied=False, qkv_bias=True),
    "qwen3": ModelShape(**_TINY, head_dim=32, is_tied=False, head_norms=True),
    "gemma3": ModelShape(**_TINY, head_dim=32, head_norms=True, norms=4, rotaries=2),
    "smollm3": ModelShape(**_TINY, head_dim=16),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name != "gemma3")) for name in SHAPES]
)
def test_the_sizes_are_those_of_an_export(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[name])
    assert shape.parameters == num_parameters(checkpoint / "model.safetensors")
    export_model(str(checkpoint), repository=tmp_path, name="tiny", progress=SilentProgress())
    assert_size(shape, tmp_path / "tiny_logits" / "1")


@pytest.mark.slow
def test_the_size_of_the_default_model_is_that_of_its_export(smollm2_repository: Path) -> None:
    assert_size(KNOWN_MODELS[DEFAULT_MODEL].shape, smollm2_repository / "smollm2_logits" / "1")


def assert_size(shape: ModelShape, folder: Path) -> None:
    """Assert that the file of the weights has this size, apart from the alignment of each weight."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    stored = [tensor for tensor in graph.initializer if tensor.external_data]
    lengths = [
        int(next(entry.value for entry in tensor.external_data if entry.key == "length")) for tensor in stored
    ]
    assert 0 <= sum(lengths) - shape.graph_bytes <= 4   # Gemma scales its embeddings
    assert (folder / "model.onnx.data").stat().st_size - sum(lengths) < _ALIGNMENT * len(stored)
    caches = [value.type.tensor_type for value in graph.input if value.name.startswith("past_key_values.")]
    assert shape.cache_bytes_per_token == sum(
        math.prod(dim.dim_value for dim in cache.shape.dim[2:])
        * onnx.helper.tensor_dtype_to_np_dtype(cache.elem_type).itemsize
        for cache in caches
    )


def num_parameters(path: Path) -> int:
    with path.open("rb") as file:
        [length] = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")


@pytest.mark.parametrize("model", KNOWN_MODELS.values(), ids=lambda model: model.name)
def test_a_name_says_how_many_weights_a_model_has(model) -> None:
    assert bool(HUB_NAME.fullmatch(model.source)) == (model.packaged is None)
    size = model.name.removesuffix("-it").rpartition("-")[2]
    if size.endswith(("m", "b")):
        claimed = float(size[:-1]) * (1e6 if size.endswith("m") else 1e9)
        assert claimed * 0.93 < model.shape.parameters < claimed * 1.24


@pytest.mark.parametrize("model", [model for model in KNOWN_MODELS.values() if model.packaged], ids=str)
def test_a_file_on_pypi_has_a_recording_and_needs_no_account(model: KnownModel) -> None:
    recorded = {Recording.load(path).sha256 for path in RECORDINGS.glob("*.npz")}
    assert model.packaged is not None
    assert model.packaged.sha256 in recorded
    assert not model.is_gated


def test_a_name_is_found_in_the_spelling_of_ollama() -> None:
    assert known_model("Qwen3:0.6b") == known_model("qwen3-0.6b") == KNOWN_MODELS["qwen3-0.6b"]
    assert known_model("smollm2:135m") == KNOWN_MODELS["smollm2"]
    assert known_model("llama3.2") is None
    assert variants("llama3.2") == variants("llama3.2:latest") == ["llama3.2-1b", "llama3.2-3b"]
    assert variants("hello") == []


def test_the_estimate_falls_with_the_size_and_rises_with_the_number_of_sequences() -> None:
    speed = measure_speed()
    sizes = ("smollm2", "qwen3-0.6b", "qwen3-8b")
    estimates = [speed.tokens_per_s(KNOWN_MODELS[name].shape) for name in sizes]
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] > 0
    shape = KNOWN_MODELS["smollm2"].shape
    assert speed.tokens_per_s(shape, sequences=MANY_ROWS) > estimates[0]
