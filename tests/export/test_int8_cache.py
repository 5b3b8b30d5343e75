"""Graphs whose KV cache is in int8, beside the same graphs with it in float."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from genserve import LLM
from genserve.backends.logits_onnx import OnnxLogits
from genserve.config.parse import read_model_config
from genserve.errors import ExportError
from genserve.export import ExportReport, Precision, SilentProgress, export_model
from genserve.export.int8_cache import round_cache
from genserve.tuning.graph import state_types
from tests.export.graphs import WrittenGraph, conversion_of, write_conversion
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint

MAX_DIFFERENCE = 0.1    # of a logit; the tiny models' are between -4 and 4
MODELS = ("bloom_4_heads", "gemma2", "gpt2", "gpt_neox", "llama", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One graph, with both caches."""

    floats: WrittenGraph
    rounded: WrittenGraph

    def both(self) -> tuple[OnnxLogits, OnnxLogits]:
        found, expected = (g.logits(num_slots=4, max_length=128) for g in (self.rounded, self.floats))
        assert isinstance(found, OnnxLogits)
        assert isinstance(expected, OnnxLogits)
        return found, expected


def pair_of(folder: Path, model: str, *, ids: NDArray[np.int64], precision: Precision = "fp32") -> Pair:
    conversion = conversion_of(
        tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[model]), precision=precision
    )
    floats = write_conversion(conversion, folder / "float")
    shutil.copytree(folder / "float", folder / "int8")
    rounded = WrittenGraph(
        folder=folder / "int8" / floats.folder.relative_to(folder / "float"),
        form=floats.form,
        precision=precision,
        dimensions=floats.dimensions,
    )
    round_cache(rounded.folder, conversion.decoder, ids=ids)
    return Pair(floats=floats, rounded=rounded)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp(request.param), request.param, ids=every_token())


def test_prefills_decodes_chunks_and_moves_are_near_those_over_a_cache_in_float(pair: Pair) -> None:
    rows, differences = random_ids(1, 4, 80), []
    models = pair.both()

    def compare(operation: str, *args: Any, **options: Any) -> None:
        found, expected = (np.array(getattr(model, operation)(*args, **options)) for model in models)
        differences.append(np.abs(found - expected).max())

    padded = [row[:length].tolist() for row, length in zip(rows, (40, 23, 1), strict=False)]
    compare("prefill", padded, first_slot=0, past=0)
    for past, length in ((0, 16), (16, 7), (23, 1), (24, 20)):
        compare("prefill", [rows[3, past : past + length].tolist()], first_slot=3, past=past)
    past = np.array([40, 23, 1, 44])
    for step in range(4):
        compare("decode", rows[range(4), past + step], past + step)
    for model in models:
        model.move(source=3, target=0, length=48)
        model.give_back(3, length=0)
    past[0] = 44
    for step in range(4, 8):
        compare("decode", rows[[3, 1, 2], past[:3] + step], past[:3] + step)
    assert 0 < max(differences) < MAX_DIFFERENCE


def test_a_chunk_reads_from_the_cache_what_a_whole_prefill_reads(pair: Pair) -> None:
    model, ids = pair.both()[0], random_ids(2, 1, 60)[0].tolist()
    whole = np.array(model.prefill([ids], first_slot=0, past=0))
    for past in range(0, 60, 20):
        chunked = model.prefill([ids[past : past + 20]], first_slot=1, past=past)
    np.testing.assert_allclose(chunked, whole, atol=1e-5)


def test_a_token_takes_a_quarter_of_the_memory(pair: Pair) -> None:
    found, expected = pair.both()
    assert 4 * found.cache.token_bytes == expected.cache.token_bytes
    assert found.page_tokens == 4 * expected.page_tokens


@pytest.mark.parametrize("model", ["llama", "gpt_neox", "llama_yarn_rope"])
def test_keys_that_turn_further_than_in_the_calibration_are_not_cut_off(tmp_path: Path, model: str) -> None:
    pair = pair_of(tmp_path, model, ids=np.full((1, 4), 7))
    floats, rounded = (graph.cached(batch=1, max_len=120) for graph in (pair.floats, pair.rounded))
    for graph in (floats, rounded):
        graph.forward(np.full((1, 120), 7), past=[0], rows=[0])
    # In the first layer the keys of one token differ in their positions alone.
    expected, found = (graph.caches["past_key_values.0.key"] for graph in (floats, rounded))
    steps = np.abs(expected).max(axis=2, keepdims=True) / 127
    scale = np.abs(expected).sum(axis=2, keepdims=True) / np.abs(found.astype(int)).sum(axis=2, keepdims=True)
    assert np.abs(found * scale - expected).max() < 2 * steps.max()


def test_activations_in_fp16_go_with_it(tmp_path: Path) -> None:
    models = pair_of(tmp_path, "llama", ids=every_token(), precision="fp16").both()
    found, expected = (model.prefill(random_ids(3, 1, 60).tolist(), first_slot=0, past=0) for model in models)
    assert 0 < np.abs(found - expected).max() < MAX_DIFFERENCE


def test_an_export_is_served_and_says_that_its_cache_is_in_int8(tmp_path: Path) -> None:
    report = export("llama", tmp_path, kv_cache="int8")
    assert report.perplexity_ratio < 1.01
    version = tmp_path / "repository" / "m_logits" / "1"
    assert json.loads((version / "parity.json").read_text())["kv_cache"] == "int8"
    batching = read_model_config(version.parent / "config.pbtxt").sequence_batching
    assert batching is not None
    assert {state.data_type for state in batching.states} == {"TYPE_INT8"}
    with LLM(tmp_path / "repository") as llm:
        completion = llm.generate("the rain in spain", max_tokens=8, ignore_eos=True)
    assert completion.usage.completion_tokens == 8


def test_a_graph_with_it_lies_beside_one_in_float_to_be_chosen(tmp_path: Path) -> None:
    export("llama", tmp_path, precision="fp32")
    export("llama", tmp_path, precision="fp32", kv_cache="int8", beside="int8_cache")
    version = tmp_path / "repository" / "m_logits" / "1"
    assert set(state_types(version / "model.onnx").values()) == {"TYPE_FP32"}
    assert set(state_types(version / "int8_cache" / "model.onnx").values()) == {"TYPE_INT8"}


def test_what_has_no_such_cache_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="TorchScript has no KV cache in int8"):
        export("llama", tmp_path, kv_cache="int8", file_format="torchscript")
    assert not list((tmp_path / "repository").glob("m*"))


def export(model: str, folder: Path, **options: Any) -> ExportReport:
    source = folder / "tiny"
    if not source.exists():
        tiny_checkpoint(source, **TINY_MODELS[model])
    return export_model(
        str(source), repository=folder / "repository", name="m", progress=SilentProgress(), **options
    )


def every_token() -> NDArray[np.int64]:
    """All tokens of the vocabulary four times, each time in another company."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.permutation(320).reshape(5, 64) for _ in range(4)])


def random_ids(seed: int, num_rows: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, 320, (num_rows, length))
