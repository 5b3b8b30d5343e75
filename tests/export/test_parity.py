"""The check after an export finds graphs that compute something else."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from genserve.errors import ExportError
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.expert_tensors import with_stacks
from genserve.export.export_options import Precision
from genserve.export.parity import _BOUNDS, Parity, _compare, _require_within, check_parity
from genserve.export.reference import Reference
from genserve.export.source_model import run_source
from genserve.sampling.logits_array import FloatArray
from tests.export import tiny_models
from tests.export.graphs import conversion_of, write_graph
from tests.support.representatives import with_extended

# Each of which runs its layers in another way.
ALWAYS = {
    "bloom_4_heads",
    "falcon",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "granite4",
    "llama",
    "olmoe",
    "opt",
    "phi",
    "qwen2",
}


@pytest.mark.parametrize("name", with_extended(tiny_models.TINY_MODELS, always=ALWAYS))
def test_running_the_source_layer_by_layer_equals_transformers(tmp_path: Path, name: str) -> None:
    source = tiny_models.tiny_checkpoint(tmp_path / "checkpoint", **tiny_models.TINY_MODELS[name])
    conversion = conversion_of(source)
    stacked = with_stacks(conversion.layout.checkpoint, transposed=conversion.family.transposed_stacks)
    reference = reference_of(stacked)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        expected = model.eval()(torch.from_numpy(reference.ids)).logits.numpy()
    np.testing.assert_allclose(all_logits(reference), expected, atol=2e-5)  # recurrent states round more


@pytest.mark.parametrize(
    "name", with_extended(["cohere", "gemma2", "gpt2_untied", "opt", "phi"], always={"gemma2", "gpt2_untied"})
)
def test_large_weights_are_run_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = tiny_models.tiny_checkpoint(tmp_path / "checkpoint", **tiny_models.TINY_MODELS[name])
    checkpoint = conversion_of(source).layout.checkpoint
    whole = reference_of(checkpoint)
    monkeypatch.setattr("genserve.export.source_model._LARGE", 64 * 64)
    monkeypatch.setattr("genserve.export.checkpoints.rows._PART", 64 * 64)
    parts = reference_of(checkpoint)
    np.testing.assert_allclose(parts.hidden, whole.hidden, atol=1e-5)
    np.testing.assert_allclose(all_logits(parts), all_logits(whole), atol=1e-5)


def test_the_activations_of_a_norm_come_from_the_calibration_text(tiny_checkpoint: Path) -> None:
    checkpoint = read_checkpoint(tiny_checkpoint, source="tiny")
    reference = run_source(checkpoint, context_length=64, norms={"norm": "model.norm"})
    # The mean square of a norm's output is 1, before it is multiplied by the weight.
    weight = checkpoint.tensor("model.norm.weight")
    assert np.mean((reference.activations["norm"] / weight) ** 2) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        pytest.param("model.layers.0.self_attn.k_proj.weight", marks=pytest.mark.extended),
        pytest.param("model.norm.weight", marks=pytest.mark.extended),
    ],
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
    exact_logits = all_logits(exact)
    sure = replace(exact, logits=2 * exact_logits)
    num_rows, length = exact.ids.shape
    found = _compare(graph.logits(max_num_seqs=num_rows, max_length=length), sure, precision="fp32")
    plain, doubled = (torch.from_numpy(logits).log_softmax(-1) for logits in (exact_logits, 2 * exact_logits))
    divergences = torch.nn.functional.kl_div(plain, doubled, reduction="none", log_target=True).sum(-1)
    assert divergences.min() <= found.divergence <= divergences.max()
    assert found.divergence == pytest.approx(mean_over_compared(divergences), rel=1e-3)
    nexts = torch.from_numpy(exact.ids[:, 1:, None])
    losses = (doubled - plain)[:, :-1].gather(-1, nexts)[..., 0]
    assert np.log(found.perplexity_ratio) == pytest.approx(mean_over_compared(losses), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("precision", "agreement"), [("int8", 0.90), ("source", 0.90), ("fp16", 0.97)])
def test_a_graph_that_often_ranks_another_token_first_is_refused(
    precision: Precision, agreement: float
) -> None:
    found = Parity(
        precision=precision,
        kv_cache="float",
        tokens=1000,
        largest_logit_difference=1.0,
        top1_agreement=agreement - 0.05,
        perplexity_ratio=1.0,
        divergence=0.03,
    )
    require = partial(_require_within, _BOUNDS[precision], source="tiny")
    with pytest.raises(ExportError, match=r"top-1 agreement .*divergence 0\.0300 nats"):
        require(found)
    require(replace(found, top1_agreement=agreement))
    nearly_tied = replace(found, divergence=0.01)
    with nullcontext() if precision != "fp16" else pytest.raises(ExportError):
        require(nearly_tied)


def mean_over_compared(values: torch.Tensor) -> float:
    """The mean of values [rows, positions] over the prefill, and over the decode of half a row."""
    num_rows, length = len(values), 64
    starts = [length // 2 - (num_rows - 1 - row) for row in range(num_rows)]
    decoded = [values[row, start : start + length // 2] for row, start in enumerate(starts)]
    return float(torch.cat([values.flatten(), *decoded]).mean())


def all_logits(reference: Reference) -> FloatArray:
    rows, positions = np.indices(reference.ids.shape)
    logits: FloatArray = reference.logits[rows.ravel(), positions.ravel()]
    return logits.reshape(*rows.shape, -1)


def reference_of(checkpoint: Checkpoint, *, context_length: int = 64) -> Reference:
    return run_source(checkpoint, context_length=context_length, norms={})


def check(reference: Reference, folder: Path) -> Parity:
    return check_parity(reference, folder, precision="fp32", source="tiny")


def with_one_change(checkpoint: Checkpoint, changed: str) -> Checkpoint:
    def load(name: str, rows: slice) -> FloatArray:
        value = checkpoint.tensor(name)
        if name == changed:
            value.flat[7] += 0.5
        return value[rows]

    return replace(checkpoint, load=load)
