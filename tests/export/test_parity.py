"""The check after an export finds graphs that compute something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.parity import Parity, _compare, check_parity
from genserve.export.reference import Reference
from genserve.export.source_model import run_source
from genserve.sampling.logits_array import FloatArray
from tests.export import tiny_models
from tests.export.graphs import conversion_of, write_graph


@pytest.mark.parametrize("name", tiny_models.TINY_MODELS)
def test_running_the_source_layer_by_layer_equals_transformers(tmp_path: Path, name: str) -> None:
    source = tiny_models.tiny_checkpoint(tmp_path / "checkpoint", **tiny_models.TINY_MODELS[name])
    reference = reference_of(conversion_of(source).layout.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        expected = model.eval()(torch.from_numpy(reference.ids)).logits.numpy()
    np.testing.assert_allclose(reference.logits, expected, atol=1e-5)


def test_the_activations_of_a_norm_come_from_the_calibration_text(tiny_checkpoint: Path) -> None:
    checkpoint = read_checkpoint(tiny_checkpoint, source="tiny")
    reference = run_source(checkpoint, context_length=64, norms={"norm": "model.norm"})
    # The mean square of a norm's output is 1, before it is multiplied by the weight.
    weight = checkpoint.load("model.norm.weight")
    assert np.mean((reference.activations["norm"] / weight) ** 2) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"],
)
def test_one_wrong_tensor_is_found(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    graph = write_graph(tiny_checkpoint, tmp_path)
    wrong = reference_of(with_one_change(read_checkpoint(tiny_checkpoint, source="tiny"), name))
    with pytest.raises(ExportError, match="too far from its source"):
        check(wrong, graph.folder)
    assert not (graph.folder / "parity.json").exists()


def test_a_context_may_be_shorter_than_the_text(tiny_checkpoint: Path, tmp_path: Path) -> None:
    graph = write_graph(tiny_checkpoint, tmp_path)
    reference = reference_of(read_checkpoint(tiny_checkpoint, source="tiny"), context_length=10)
    parity = check(reference, graph.folder)
    assert parity.tokens == len(reference.ids) * (10 + 5)
    assert json.loads((graph.folder / "parity.json").read_text())["tokens"] == parity.tokens


def test_the_divergence_and_the_ratio_of_perplexities_are_those_of_torch(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    graph = write_graph(tiny_checkpoint, tmp_path, precision="fp32")
    exact = reference_of(read_checkpoint(tiny_checkpoint, source="tiny"))
    parity = check(exact, graph.folder)
    assert (parity.top1_agreement, parity.perplexity_ratio) == (1, pytest.approx(1, abs=1e-4))
    assert parity.divergence == pytest.approx(0, abs=1e-5)
    # Compared with a source of doubled logits.
    sure = replace(exact, logits=2 * exact.logits)
    num_rows, length = exact.ids.shape
    found = _compare(graph.logits(max_num_seqs=num_rows, max_length=length), sure, precision="fp32")
    plain, doubled = (torch.from_numpy(logits).log_softmax(-1) for logits in (exact.logits, sure.logits))
    divergences = torch.nn.functional.kl_div(plain, doubled, reduction="none", log_target=True).sum(-1)
    assert divergences.min() <= found.divergence <= divergences.max()
    assert found.divergence == pytest.approx(mean_over_compared(divergences), rel=1e-3)
    nexts = torch.from_numpy(exact.ids[:, 1:, None])
    losses = (doubled - plain)[:, :-1].gather(-1, nexts)[..., 0]
    assert np.log(found.perplexity_ratio) == pytest.approx(mean_over_compared(losses), rel=1e-3, abs=1e-6)


def mean_over_compared(values: torch.Tensor) -> float:
    """The mean of values [rows, positions] over the prefill, and over the decode of half a row."""
    num_rows, length = len(values), 64
    starts = [length // 2 - (num_rows - 1 - row) for row in range(num_rows)]
    decoded = [values[row, start : start + length // 2] for row, start in enumerate(starts)]
    return float(torch.cat([values.flatten(), *decoded]).mean())


def reference_of(checkpoint: Checkpoint, *, context_length: int = 64) -> Reference:
    return run_source(checkpoint, context_length=context_length, norms={})


def check(reference: Reference, folder: Path) -> Parity:
    return check_parity(reference, folder, precision="fp32", source="tiny")


def with_one_change(checkpoint: Checkpoint, changed: str) -> Checkpoint:
    def load(name: str) -> FloatArray:
        value = checkpoint.load(name)
        if name == changed:
            value.flat[7] += 0.5
        return value

    return replace(checkpoint, load=load)
