"""Traced models: accuracy and rejections; tests/textmodel/test_logits_runtime.py serves one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genserve.errors import ExportError, RepositoryError
from genserve.export import ExportReport, FileFormat, Precision, SilentProgress, export_model
from genserve.textmodel.runtimes.growing_logits import GrowingLogits
from tests.backends.networks import bloom_onnx
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint

_SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
_GPTJ = {"n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "n_positions": 128}

# Options that no family supports: the name of a tiny model, its changed config, and the message.
_BEYOND_FAMILIES = [
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    ("bloom_4_heads", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
]


def export(source: Path, repository: Path, **options: object) -> ExportReport:
    return export_model(str(source), repository=repository, name="m", progress=SilentProgress(), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        _SIZES | {"model_type": "persimmon", "intermediate_size": 96},
        _GPTJ | {"model_type": "codegen"},
        _SIZES | {"model_type": "gpt_neo", "window_size": 16, "attention_types": [[["global", "local"], 1]]},
    ],
    ids=lambda config: config["model_type"],
)
def test_traced_architectures_equal_their_source(tmp_path: Path, config: dict[str, Any]) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **config)
    assert export(source, tmp_path / "repository").largest_logit_difference < 1e-4


@pytest.mark.parametrize(("model", "changed", "reason"), _BEYOND_FAMILIES)
def test_torchscript_rejects_options_that_the_family_does_not_support(
    tmp_path: Path, model: str, changed: dict[str, Any], reason: str
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **(TINY_MODELS[model] | changed))
    with pytest.raises(ExportError, match=reason):
        export(source, tmp_path / "repository", file_format="torchscript", precision="fp32")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "changed", "reason"), _BEYOND_FAMILIES)
def test_options_that_the_family_does_not_support_are_traced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str, changed: dict[str, Any], reason: str
) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **(TINY_MODELS[model] | changed))
    report = export(source, tmp_path / "repository")
    assert (report.precision, report.top1_agreement) == ("fp32", 1.0)
    assert report.largest_logit_difference < 1e-4
    assert reason in caplog.text
    assert "traced from the code of transformers, and slower" in caplog.text


def test_an_invalid_config_is_not_traced(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama"])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_attention_heads": "four"}))
    with pytest.raises(ExportError, match=r"config\.json.*llama"):
        export(source, tmp_path / "repository")


@pytest.mark.parametrize(
    ("file_format", "precision", "words"),
    [
        ("onnx", "int8", "a traced model does not support the precision 'int8'"),
        ("torchscript", "fp32", "GPTJForCausalLM; TorchScript needs a known family"),
    ],
)
def test_formats_that_need_a_family_are_rejected(
    traced_checkpoint: Path, tmp_path: Path, file_format: FileFormat, precision: Precision, words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        export(traced_checkpoint, tmp_path / "repository", file_format=file_format, precision=precision)
    assert not (tmp_path / "repository").exists()


def test_a_graph_without_a_cache_has_no_growing_cache(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="a KV cache that grows: its inputs are input_ids, attention"):
        GrowingLogits(bloom_onnx(tmp_path / "model.onnx", vocab_size=50), max_num_seqs=1)
