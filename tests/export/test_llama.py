"""The Llama graph against transformers' own model of the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from genserve.errors import ExportError
from tests.checkpoints import tiny_llama_checkpoint
from tests.export.graphs import WrittenGraph, write_graph

MAX_DIFFERENCE = 1e-4

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "one_kv_head_per_head": {"num_key_value_heads": 4},
    "wide_heads": {"head_dim": 32},
    "other_rope_theta": {"rope_theta": 500.0},
    "llama3_rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn_rope": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    },
    "gelu": {"hidden_act": "gelu"},
    "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "one_layer": {"num_hidden_layers": 1},
}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_llama_checkpoint(folder / "checkpoint", **VARIANTS[request.param])


@pytest.fixture(scope="module")
def graph(checkpoint: Path) -> WrittenGraph:
    return write_graph(checkpoint, checkpoint.parent / "graph")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def test_a_padded_prefill_and_ragged_decode_equal_each_row_alone(
    graph: WrittenGraph, reference: LlamaForCausalLM
) -> None:
    rows = [random_ids(length, seed=length) for length in (60, 41, 9)]
    prompts, steps = [40, 23, 1], 8
    cached = graph.cached(batch=3, max_len=64)
    padded = np.zeros((3, max(prompts)), np.int64)
    for row, ids in enumerate(rows):
        padded[row, : prompts[row]] = ids[: prompts[row]]
    last = [row * max(prompts) + prompt - 1 for row, prompt in enumerate(prompts)]
    logits = [cached.forward(padded, past=[0, 0, 0], rows=last)]
    for step in range(steps):
        past = [prompt + step for prompt in prompts]
        tokens = np.array([[ids[at]] for ids, at in zip(rows, past, strict=True)])
        logits.append(cached.forward(tokens, past=past, rows=[0, 1, 2]))
    for row, ids in enumerate(rows):
        expected = source_logits(reference, ids)[prompts[row] - 1 :][: steps + 1]
        assert np.abs(np.stack(logits)[:, row] - expected).max() < MAX_DIFFERENCE


def test_a_prefill_in_chunks_equals_one_in_a_piece(graph: WrittenGraph, reference: LlamaForCausalLM) -> None:
    ids = random_ids(100, seed=1)
    cached, logits, past = graph.cached(batch=1, max_len=128), [], 0
    for length in (16, 7, 30, 1, 46):
        chunk = ids[None, past : past + length]
        logits.append(cached.forward(chunk, past=[past], rows=range(length)))
        past += length
    assert np.abs(np.concatenate(logits) - source_logits(reference, ids)).max() < MAX_DIFFERENCE


def test_only_the_rows_that_are_asked_for_get_logits_in_their_order(
    graph: WrittenGraph, reference: LlamaForCausalLM
) -> None:
    ids = random_ids(30, seed=2)
    logits = graph.cached(batch=1, max_len=30).forward(ids[None], past=[0], rows=[29, 3])
    assert logits.shape == (2, 320)
    assert np.abs(logits - source_logits(reference, ids)[[29, 3]]).max() < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
        ({"head_dim": 20}, "head_dim 20"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_what_the_graph_would_not_honour_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint", **config)
    with pytest.raises(ExportError, match=what) as caught:
        write_graph(source, tmp_path / "graph")
    assert "known" in caught.value.remedy


@pytest.mark.parametrize(
    "broken", [{"num_attention_heads": "four"}, {"rope_scaling": {"rope_type": "llama3"}}]
)
def test_a_config_that_makes_no_sense_is_an_export_error(tmp_path: Path, broken: dict[str, Any]) -> None:
    source = tiny_llama_checkpoint(tmp_path / "checkpoint")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    with pytest.raises(ExportError, match=r"config\.json"):
        write_graph(source, tmp_path / "graph")


def test_the_graph_says_what_it_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_graph(tiny_checkpoint, tmp_path, precision="fp16").folder
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert {entry.key: entry.value for entry in model.metadata_props} == {
        "genserve.family": "llama",
        "genserve.precision": "fp16",
        "genserve.context_length": "256",
        "genserve.source": "tiny",
    }


def random_ids(length: int, *, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, 320, length)


def source_logits(model: LlamaForCausalLM, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits
