"""Exports in pipeline stages: which layers a stage has, the files of the model, and what is rejected."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from genserve.errors import ExportError, GenserveError
from genserve.export import ExportReport, FileFormat, SilentProgress, export_model
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder import Attention, Decoder, Layer
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.pipeline_stages import split_layers
from genserve.export.quantization import SCHEMES
from genserve.llm import LLM
from genserve.repository.index import scan
from genserve.repository.model_validation import repository_diagnostics
from genserve.tuning.search_space import Setting, config_change
from tests.export.graphs import write_graph
from tests.export.tiny_models import TINY_MODELS
from tests.export.tiny_models import tiny_checkpoint as write_tiny
from tests.support.tiny_llama import tiny_llama_checkpoint

LAYER_SIZES = {"attention.norm.weight": (8,), "mlp.up.weight": (40, 8), "mlp.down.weight": (8, 40)}


def sized(*, num_layers: int, vocab_size: int) -> tuple[DecoderWeights, Decoder]:
    """Weights that have shapes and no values, and the decoder to which they belong."""
    sizes: dict[str, tuple[int, ...]] = {
        f"layers.{layer}.{role}": shape for layer in range(num_layers) for role, shape in LAYER_SIZES.items()
    }
    sizes["head.weight"] = (vocab_size, 8)

    def vector(role: str) -> NDArray[np.float32]:
        return np.zeros(sizes[role], np.float32)

    def rows(role: str) -> Rows[np.float32]:
        return Rows.of(vector(role))

    attention = Attention(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    decoder = Decoder(
        vocab_size=vocab_size,
        hidden_size=8,
        context_length=16,
        layers=(Layer(attention=attention, activation="silu"),) * num_layers,
        norm="rms",
        norm_epsilon=1e-5,
        tied=False,
    )
    return DecoderWeights(roles=frozenset(sizes), rows=rows, vector=vector), decoder


@pytest.mark.parametrize("vocab_size", [1, 200, 1000])
@pytest.mark.parametrize(("num_layers", "num_stages"), [(2, 2), (7, 2), (7, 3), (9, 4), (5, 5)])
def test_no_other_cut_has_a_smaller_largest_stage(num_layers, num_stages, vocab_size):
    weights, decoder = sized(num_layers=num_layers, vocab_size=vocab_size)
    found = split_layers(weights, decoder, scheme=SCHEMES["fp32"], num_stages=num_stages)
    assert [layer for part in found for layer in part] == list(range(num_layers))
    assert len(found) == num_stages
    assert all(found)

    def largest(lengths: tuple[int, ...]) -> int:
        layer_size = 8 + 2 * 40 * 8
        return max(
            length * layer_size + (vocab_size * 8 if index == num_stages - 1 else 0)
            for index, length in enumerate(lengths)
        )

    cuts = itertools.product(range(1, num_layers + 1), repeat=num_stages)
    best = min(largest(lengths) for lengths in cuts if sum(lengths) == num_layers)
    assert largest(tuple(map(len, found))) == best


@pytest.mark.parametrize("model", ["hunyuan", "ministral3"])
def test_a_stage_whose_operators_read_positions_gets_them(tmp_path, model):
    source = write_tiny(tmp_path / "checkpoint", **TINY_MODELS[model])
    assert export(source, tmp_path / "repository").largest_logit_difference < 1e-4


def test_a_stage_has_the_sizes_of_its_layers(tmp_path):
    source = write_tiny(tmp_path / "checkpoint", **TINY_MODELS["gemma4_experts"])
    assert export(source, tmp_path / "repository").largest_logit_difference < 1e-4


def test_layers_that_share_caches_are_not_divided(tmp_path):
    source = write_tiny(tmp_path / "checkpoint", **TINY_MODELS["gemma4"])
    with pytest.raises(ExportError, match="share caches or embeddings"):
        export(source, tmp_path / "repository")


def test_the_precision_decides_how_many_layers_a_head_is_worth():
    weights, decoder = sized(num_layers=12, vocab_size=640)    # the head is as large as eight layers
    lengths = {
        precision: len(split_layers(weights, decoder, scheme=SCHEMES[precision], num_stages=2)[0])
        for precision in ("fp32", "int4")
    }
    assert lengths["fp32"] == 10
    assert lengths["int4"] == 11    # in int4 the head alone keeps 8 bits


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("staged")
    export(tiny_checkpoint, folder)
    return folder


def export(
    source: Path,
    repository: Path,
    *,
    pipeline_stages: int = 2,
    file_format: FileFormat = "onnx",
    overwrite: bool = False,
    beside: str | None = None,
) -> ExportReport:
    return export_model(
        str(source),
        repository=repository,
        name="tiny",
        file_format=file_format,
        precision="fp32",
        pipeline_stages=pipeline_stages,
        overwrite=overwrite,
        beside=beside,
        progress=SilentProgress(),
    )


def test_an_export_in_stages_is_checked_and_answers_like_one_graph(repository, tiny_repository):
    version = repository / "tiny_logits" / "1"
    assert {file.name for file in version.iterdir()} == {
        ".gitkeep",
        "model.onnx",
        "model.onnx.data",
        "model.stage2.onnx",
        "model.stage2.onnx.data",
        "parity.json",
    }
    assert json.loads((version / "parity.json").read_text())["largest_logit_difference"] < 1e-3
    assert not any(repository_diagnostics([repository]).values())
    prompt = " the sea" * 20
    with LLM(model_repository=repository) as staged, LLM(model_repository=tiny_repository) as whole:
        texts = [llm.generate(prompt, max_tokens=40, temperature=0).text for llm in (staged, whole)]
    assert texts[0] == texts[1] != ""


def test_a_missing_stage_is_named_by_check_and_by_the_load(repository, tmp_path):
    models = shutil.copytree(repository, tmp_path / "models")
    (models / "tiny_logits" / "1" / "model.stage2.onnx").unlink()
    [error] = repository_diagnostics([models])["tiny_logits"]
    assert "model.stage2.onnx is missing" in error.message
    assert "a pipeline of 2 stages, and this is stage 2" in error.message
    assert "--pipeline-stages 2" in error.remedy
    with pytest.raises(GenserveError, match=r"model\.stage2\.onnx is missing"):
        LLM(model_repository=models)


STAGES = 'key: "pipeline_stages" value: { string_value: "%d" }'


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (1, "model.onnx is stage 1 of a pipeline of 2; by `pipeline_stages` of its config it should be"),
        (3, "model.stage3.onnx is missing"),
    ],
)
def test_a_config_with_another_number_of_stages_is_an_error(repository, tmp_path, number, problem):
    models = shutil.copytree(repository, tmp_path / "models")
    config = models / "tiny_logits" / "config.pbtxt"
    assert STAGES % 2 in config.read_text()
    config.write_text(config.read_text().replace(STAGES % 2, STAGES % number))
    [error] = repository_diagnostics([models])["tiny_logits"]
    assert problem in error.message
    with pytest.raises(GenserveError, match=problem.split(";")[0]):
        LLM(model_repository=models)


def test_a_graph_with_other_stages_is_not_added_beside(repository, tiny_checkpoint):
    with pytest.raises(ExportError, match=r"tiny_logits/config\.pbtxt"):
        export(tiny_checkpoint, repository, pipeline_stages=1, beside="whole")


def test_more_stages_than_layers_are_rejected(tiny_checkpoint, tmp_path):
    with pytest.raises(ExportError, match="3 stages") as caught:
        export(tiny_checkpoint, tmp_path, pipeline_stages=3)
    assert "--pipeline-stages 2" in caught.value.remedy
    assert not (tmp_path / "tiny_logits").exists()


def test_a_format_without_stages_is_rejected(tiny_checkpoint, traced_checkpoint, tmp_path):
    with pytest.raises(ExportError, match="TorchScript"):
        export(tiny_checkpoint, tmp_path, file_format="torchscript")
    with pytest.raises(ExportError, match="traced"):
        export(traced_checkpoint, tmp_path)


def test_a_tied_matrix_is_in_the_first_and_the_last_stage(tmp_path):
    checkpoint = tiny_llama_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=True)
    graph = write_graph(checkpoint, tmp_path / "graph", precision="fp16", pipeline_stages=2)
    first, last = (
        onnx.load(graph.folder / name, load_external_data=False).graph
        for name in ("model.onnx", "model.stage2.onnx")
    )
    assert "embedding" in {weight.name for weight in first.initializer}
    assert "head" in {weight.name for weight in last.initializer}
    assert "embedding" not in {weight.name for weight in last.initializer}


def test_tune_writes_the_cache_types_of_all_stages(repository, tmp_path, tiny_checkpoint):
    models = shutil.copytree(repository, tmp_path / "models")
    export_model(
        str(tiny_checkpoint),
        repository=models,
        name="tiny",
        precision="int8",
        pipeline_stages=2,
        beside="int8",
        progress=SilentProgress(),
    )
    stage = scan([models])["tiny_logits"]
    config = stage.config
    assert config is not None
    current = Setting.from_config(config)
    change = config_change(
        Setting(graph="int8/model.onnx", threads=current.threads, batch_size=current.batch_size), stage
    )
    types = [value for name, value in change.fields.items() if name.endswith("data_type")]
    assert types == ["TYPE_FP16"] * 4
