"""The check after an export: it finds a graph that computes something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.parity import check_parity, source_logits
from genserve.export.source import read_checkpoint
from tests.export.graphs import write_graph


def test_the_source_is_run_as_transformers_runs_it(tiny_checkpoint: Path) -> None:
    ids = np.arange(5, 90)
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        expected = model.eval()(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = source_logits(read_checkpoint(tiny_checkpoint, source="tiny"), ids)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.norm.weight",
    ],
)
def test_one_wrong_tensor_is_found(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    graph = write_graph(tiny_checkpoint, tmp_path)
    checkpoint = read_checkpoint(tiny_checkpoint, source="tiny")
    with pytest.raises(ExportError, match="too far from its source"):
        check_parity(
            with_one_change(checkpoint, name), graph.folder, precision="fp32", dimensions=graph.dimensions
        )
    assert not (graph.folder / "parity.json").exists()


def test_a_context_shorter_than_the_text_is_enough(tiny_checkpoint: Path, tmp_path: Path) -> None:
    graph = write_graph(tiny_checkpoint, tmp_path)
    checkpoint = read_checkpoint(tiny_checkpoint, source="tiny")
    dimensions = replace(graph.dimensions, context_length=10)
    parity = check_parity(checkpoint, graph.folder, precision="fp32", dimensions=dimensions)
    assert parity.tokens == 10 + 2 * 5
    assert json.loads((graph.folder / "parity.json").read_text())["tokens"] == parity.tokens


def with_one_change(checkpoint: Checkpoint, changed: str) -> Checkpoint:
    def load(name: str) -> FloatArray:
        value = checkpoint.load(name)
        if name == changed:
            value.flat[7] += 0.5
        return value

    return replace(checkpoint, load=load)
