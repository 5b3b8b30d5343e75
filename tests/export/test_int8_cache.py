"""Graphs with an int8 KV cache, compared with the same graphs with a float cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genserve import LLM
from genserve.config.parse import read_config_file
from genserve.errors import ExportError
from genserve.export import ExportReport, Precision, SilentProgress, export_model
from genserve.repository.model_validation import valid_config
from genserve.tuning.search_space import state_types
from tests.export.graphs import write_graph
from tests.export.rows import logits_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.representatives import with_extended

MAX_DIFFERENCE = 0.1  # for a logit; the tiny models' logits are between -4 and 4
MODELS = ("bloom_4_heads", "gemma2", "gpt2_odd", "gpt_neox", "llama", "qwen3")


@pytest.mark.parametrize("model", with_extended(MODELS, always=("bloom_4_heads", "gemma2", "llama")))
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.extended)])
def test_logits_are_near_those_with_a_float_cache(tmp_path: Path, model: str, precision: Precision) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[model])
    ids = np.random.default_rng(0).integers(3, 320, 120)
    floats = write_graph(source, tmp_path / "float", precision=precision)
    rounded = write_graph(source, tmp_path / "int8", precision=precision, kv_cache="int8")
    found, expected = (
        logits_of(graph.logits(max_num_seqs=1, max_length=128), ids) for graph in (rounded, floats)
    )
    assert 0 < np.abs(found - expected).max() < MAX_DIFFERENCE


def test_a_token_takes_a_byte_per_number_and_a_scale_per_head(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama"])
    graph = write_graph(source, tmp_path / "graph", kv_cache="int8")
    model = graph.logits(max_num_seqs=2, max_length=32)
    assert model.kv_cache_bytes == 4 * 16 * (2 * 2 * 2 * (16 + 4))  # 2 layers, keys and values, 2 heads


def test_an_export_with_an_int8_cache_is_served_and_says_so(tmp_path: Path) -> None:
    report = export("llama", tmp_path, kv_cache="int8")
    assert report.perplexity_ratio < 1.01
    version = tmp_path / "repository" / "m_logits" / "1"
    assert json.loads((version / "parity.json").read_text())["kv_cache"] == "int8"
    batching = valid_config(read_config_file(version.parent / "config.pbtxt")).sequence_batching
    assert batching is not None
    assert {state.data_type for state in batching.states} == {"TYPE_INT8"}
    with LLM(model_repository=tmp_path / "repository") as llm:
        completion = llm.generate("the rain in spain", max_tokens=8, ignore_eos=True)
    assert completion.usage.completion_tokens == 8


def test_a_graph_with_an_int8_cache_may_be_an_additional_one(tmp_path: Path) -> None:
    export("llama", tmp_path, precision="fp32")
    export("llama", tmp_path, precision="fp32", kv_cache="int8", beside="int8_cache")
    version = tmp_path / "repository" / "m_logits" / "1"
    assert set(state_types(version / "model.onnx").values()) == {"TYPE_FP32"}
    types = state_types(version / "int8_cache" / "model.onnx")
    assert types["past_key_values.1.value"] == "TYPE_INT8"
    assert types["past_key_values.1.value_scale"] == "TYPE_FP32"


def test_other_formats_reject_an_int8_cache(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="int8"):
        export("llama", tmp_path, kv_cache="int8", file_format="torchscript")
    assert not list((tmp_path / "repository").glob("m*"))


def export(model: str, folder: Path, **options: Any) -> ExportReport:
    source = folder / "tiny"
    if not source.exists():
        tiny_checkpoint(source, **TINY_MODELS[model])
    return export_model(
        str(source), repository=folder / "repository", name="m", progress=SilentProgress(), **options
    )
