"""Completed, validated and normalised configs of models, stages and drafts, and their devices."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from genserve.config.model_config import InstanceGroup
from genserve.errors import RepositoryError
from genserve.repository import config_resolution
from genserve.repository.config_resolution import ResolvedModel, resolve_model
from genserve.repository.index import ModelEntry, scan
from genserve.repository.model_validation import Validator, repository_diagnostics
from genserve.repository.options import RepositoryOptions
from genserve.repository.text_stages import Role
from genserve.textmodel import logits_runtime

STATES, HALF = "sequence_batching", ("TYPE_FP32", "TYPE_FP16")


@pytest.fixture
def stage(tiny_repository: Path, tmp_path: Path):
    """Return the entry of a logits stage with some text added to its config."""
    shutil.copytree(tiny_repository, tmp_path / "models")

    def entry(
        text: str = "",
        *,
        fp16: bool = False,
        precision: str = "fp16",
        backend: str = "onnxruntime",
        grows: bool = False,
    ):
        config = tmp_path / "models" / "tiny_logits" / "config.pbtxt"
        before, states, after = config.read_text().replace("onnxruntime", backend).partition(STATES)
        if fp16:
            after = after.replace(*HALF)
            parity = tmp_path / "models" / "tiny_logits" / "1" / "parity.json"
            parity.write_text(parity.read_text().replace('"fp32"', f'"{precision}"'))
        after = after.replace("use_same_buffer_for_input_output: true", "") if grows else after
        config.write_text(before + states + after + text)
        if backend == "pytorch":    # its content is not looked at
            shutil.copy(config.parent / "1" / "model.onnx", config.parent / "1" / "model.pt")
        return scan([tmp_path / "models"])["tiny_logits"]

    return entry


@pytest.fixture
def machine(monkeypatch):
    """Say what the machine has."""

    def set_up(*, gpus: int, providers: tuple[str, ...] = (), cuda: bool = False) -> None:
        runtime = SimpleNamespace(get_available_providers=lambda: [*providers, "CPUExecutionProvider"])
        monkeypatch.setattr(config_resolution, "num_gpus", lambda: gpus)
        monkeypatch.setattr(logits_runtime, "import_onnxruntime", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)

    return set_up


CUDA = ("CUDAExecutionProvider",)


def placed(entry: ModelEntry, *, strict_placement: bool = False) -> InstanceGroup:
    """The first instance group of the resolved config; its warnings are logged as a load does."""
    options = RepositoryOptions(strict_placement=strict_placement)
    model = resolve_model(entry, Validator({entry.name: entry}), options=options)
    for warning in model.warnings:
        logging.getLogger(__name__).warning("%s", warning.message)
    return model.config.instance_groups[0]


@pytest.mark.parametrize(
    ("group", "device"),
    [
        ("", 0),
        ("instance_group { kind: KIND_GPU gpus: [ 1 ] }", 1),
        ("instance_group { kind: KIND_AUTO }", 0),
    ],
)
def test_a_float16_cache_goes_to_the_gpu_that_the_config_names(stage, machine, group, device):
    machine(gpus=2, providers=CUDA, cuda=True)
    group = placed(stage(group, fp16=True), strict_placement=True)
    assert (group.kind, group.gpus[0]) == ("KIND_GPU", device)


@pytest.mark.parametrize(
    ("groups", "num_stages", "devices"),
    [
        ("instance_group { kind: KIND_GPU gpus: [ 1, 0 ] }", 1, [1]),
        ("instance_group { kind: KIND_GPU gpus: [ 1, 0 ] }", 2, [1, 0]),
        ("instance_group { kind: KIND_GPU gpus: 2 } instance_group { kind: KIND_GPU gpus: 0 }", 2, [2, 0]),
        ("", 2, [0, 1]),
        ("instance_group { kind: KIND_GPU gpus: [ 1 ] }", 2, [1]),
        ("instance_group { kind: KIND_CPU }", 2, [0]),
    ],
)
def test_a_pipeline_goes_to_the_devices_that_the_config_names(stage, machine, groups, num_stages, devices):
    machine(gpus=3, providers=CUDA, cuda=True)
    stages = f'parameters {{ key: "pipeline_stages" value {{ string_value: "{num_stages}" }} }}'
    entry = stage(f"{groups}\n{stages}", fp16=True)
    config = resolve_model(entry, Validator({entry.name: entry}), options=RepositoryOptions()).config
    assert [placement.device_id for placement in logits_runtime.engine_placements(config)] == devices


def test_a_torchscript_cache_goes_to_the_gpu_in_any_precision(stage, machine):
    machine(gpus=1, cuda=True)
    assert placed(stage(backend="pytorch"), strict_placement=True).kind == "KIND_GPU"


def test_a_growing_cache_goes_to_the_gpu_in_any_precision(stage, machine):
    machine(gpus=1, providers=CUDA)
    assert placed(stage(grows=True), strict_placement=True).kind == "KIND_GPU"


def test_a_config_for_the_cpu_stays_on_the_cpu(stage, machine):
    machine(gpus=1, providers=CUDA, cuda=True)
    group = placed(stage("instance_group { kind: KIND_CPU }", fp16=True))
    assert group.kind == "KIND_CPU"


@pytest.mark.parametrize(
    ("logits", "providers", "words"),
    [
        ({"fp16": False}, CUDA, "in fp32 with a KV cache of TYPE_FP32, and CUDA has"),
        ({"fp16": True, "precision": "int8"}, CUDA, "in int8 with a KV cache of TYPE_FP16, and CUDA has"),
        ({"fp16": True}, (), "ONNX Runtime is the build for CPUs"),
        ({"fp16": True}, CUDA, "finds no CUDA"),
        ({"backend": "pytorch"}, (), "finds no CUDA"),
        ({"grows": True}, (), "ONNX Runtime is the build for CPUs"),
    ],
)
def test_a_stage_that_no_gpu_can_run_runs_on_the_cpu_with_the_reason(
    stage, machine, caplog, logits, providers, words
):
    machine(gpus=1, providers=providers)
    entry = stage("instance_group { kind: KIND_GPU }", **logits)
    with caplog.at_level(logging.INFO):
        assert placed(entry).kind == "KIND_CPU"
    [record] = (r for r in caplog.records if words in r.getMessage())
    assert record.levelname == "WARNING"
    with pytest.raises(RepositoryError, match=words):
        placed(entry, strict_placement=True)


def test_an_unused_gpu_that_was_not_asked_for_is_no_warning(stage, machine, caplog):
    machine(gpus=1, providers=CUDA, cuda=True)
    with caplog.at_level(logging.WARNING):
        assert placed(stage(), strict_placement=True).kind == "KIND_CPU"
    assert not caplog.records


def test_without_a_gpu_a_config_that_asks_for_one_is_reported(stage, machine, caplog):
    machine(gpus=0)
    entry = stage("instance_group { kind: KIND_GPU }", fp16=True)
    with caplog.at_level(logging.WARNING):
        assert placed(entry).kind == "KIND_CPU"
    assert "no GPUs are available" in caplog.text
    with pytest.raises(RepositoryError, match="no GPUs are available"):
        placed(entry, strict_placement=True)


def resolved(root: Path, name: str, **options: bool) -> ResolvedModel:
    entries = scan([root])
    return resolve_model(entries[name], Validator(entries), options=RepositoryOptions(**options))


def test_a_text_model_is_resolved_with_its_stages(tiny_repository):
    model = resolved(tiny_repository, "tiny")
    assert (model.role, model.versions, model.warnings) == (Role.ENSEMBLE, (1,), ())
    assert {name: (stage.name, stage.role) for name, stage in model.stages.items()} == {
        "tokenizer": ("tiny_tokenizer", Role.TOKENIZER),
        "logits": ("tiny_logits", Role.LOGITS),
        "decoder": ("tiny_decoder", Role.DECODER),
    }
    assert all(stage.config.instance_groups for stage in model.stages.values())   # normalised
    assert [stage.runs_in_engine for stage in model.stages.values()] == [False, True, True]
    assert not model.stages["logits"].draft


@pytest.mark.parametrize(("speculation", "draft"), [("", "tiny_logits"), ("none", None)])
def test_a_draft_model_is_resolved_like_the_stages(tiny_repository, tmp_path, speculation, draft):
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    with (root / "tiny_logits" / "config.pbtxt").open("a") as config:
        config.write('parameters [ { key: "draft_model" value { string_value: "tiny" } } ]\n')
        if speculation:
            parameter = f'key: "speculation" value {{ string_value: "{speculation}" }}'
            config.write(f"parameters [ {{ {parameter} }} ]\n")
    stages = resolved(root, "tiny").stages["logits"].draft
    assert (stages["logits"].name if stages else None) == draft


def test_warnings_of_the_stages_are_those_of_the_text_model(tiny_repository, tmp_path):
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    for stage in ("tokenizer", "logits", "decoder"):
        with (root / f"tiny_{stage}" / "config.pbtxt").open("a") as config:
            config.write("instance_group { count: 2 }\n")
    warnings = resolved(root, "tiny").warnings
    expected = [one for found in repository_diagnostics([root]).values() for one in found]
    assert sorted(map(str, warnings)) == sorted(map(str, expected))
    assert len(warnings) == 3


COMPLETING = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "score", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    async def decode(self, sequence):
        sequence.finish("stop")
"""


@pytest.mark.parametrize("strict_config", [False, True])
def test_a_decoder_stage_is_completed_like_any_python_model(tiny_repository, tmp_path, strict_config):
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    (root / "tiny_decoder" / "1" / "model.py").write_text(COMPLETING)
    decoder = resolved(root, "tiny", strict_config=strict_config).stages["decoder"]
    assert (decoder.config.output("score") is None) is strict_config


def test_stages_that_run_on_the_cpu_may_ask_for_a_gpu(tiny_repository, machine, tmp_path):
    """The tokenizer of a text model, and all stages of the model that drafts for it."""
    machine(gpus=0)
    shutil.copytree(tiny_repository, tmp_path / "models")
    tokenizer = tmp_path / "models" / "tiny_tokenizer" / "config.pbtxt"
    tokenizer.write_text(tokenizer.read_text() + "instance_group { kind: KIND_GPU }")
    entries = scan([tmp_path / "models"])
    options = RepositoryOptions(strict_placement=True)
    text_model = resolve_model(entries["tiny"], Validator(entries), options=options)
    assert text_model.stages["tokenizer"].config.instance_groups[0].kind == "KIND_CPU"
    assert not any("GPUs are available" in warning.message for warning in text_model.warnings)
    with pytest.raises(RepositoryError, match="no GPUs are available"):
        resolve_model(entries["tiny_tokenizer"], Validator(entries), options=options)


def test_a_stage_in_two_repositories_is_not_loaded(tiny_repository, tmp_path):
    shutil.copytree(tiny_repository, tmp_path / "one")
    shutil.copytree(tiny_repository / "tiny_logits", tmp_path / "two" / "tiny_logits")
    entries = scan([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(RepositoryError, match="not unique across all model repositories"):
        resolve_model(entries["tiny"], Validator(entries), options=RepositoryOptions())


def test_a_stage_with_a_chosen_version_needs_no_other(tiny_repository, tmp_path):
    stage = shutil.copytree(tiny_repository, tmp_path / "models") / "tiny_logits"
    shutil.copytree(stage / "1", stage / "2")
    (stage / "1" / "model.onnx").unlink()
    with (stage / "config.pbtxt").open("a") as config:
        config.write("version_policy { all { } }")
    entry = replace(scan([tmp_path / "models"])["tiny_logits"], wanted_version=2)
    assert resolve_model(entry, Validator({entry.name: entry}), options=RepositoryOptions()).versions == (2,)
