"""Fields of a text model's configs that its engine ignores or rejects, in check and in the load."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from genserve.repository.model_validation import repository_diagnostics
from genserve.repository.repository import Repository
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.support.live_server import LiveServer
from tests.support.stage_chains import WHOLE_CONFIG, add_chain, whole_torchscript
from tests.textmodel.test_text_inference import asked, text

STAGES = ("tiny", "tiny_tokenizer", "tiny_logits", "tiny_decoder")


@pytest.fixture
def models(tiny_repository: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_repository, tmp_path / "models")


def add(models: Path, stage: str, config: str) -> None:
    file = models / stage / "config.pbtxt"
    file.write_text(f"{file.read_text()}\n{config}\n")


def change(models: Path, stage: str, old: str, new: str) -> None:
    file = models / stage / "config.pbtxt"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def reported(models: Path, stage: str) -> list[str]:
    diagnostics = repository_diagnostics([models])[stage]
    assert all(diagnostic.position for diagnostic in diagnostics)
    return [f"{diagnostic.severity.value}: {diagnostic.message}" for diagnostic in diagnostics]


def sample(num_ids: int | str, source: str = "zero_data: true", more: str = "") -> str:
    tensor = f"data_type: TYPE_INT64 dims: [ {num_ids} ] {source}"
    inputs = f'inputs {{ key: "input_ids" value {{ {tensor} }} }}'
    return f'model_warmup {{ name: "w" batch_size: 2 {more} {inputs} }}'


def load_error(models: Path) -> str:
    repository = Repository([models])
    repository.start()
    repository.close()
    return str(repository.errors.get("tiny", ""))


@pytest.mark.parametrize("stage", STAGES)
def test_an_exported_model_has_no_fields_without_effect(models, stage):
    assert reported(models, stage) == []


@pytest.mark.parametrize(
    ("stage", "config", "fields"),
    [
        ("tiny_logits", "instance_group { count: 3 }", ["count"]),
        ("tiny_logits", "instance_group { count: 1 kind: KIND_CPU }", []),
        ("tiny_logits", "instance_group { rate_limiter { priority: 2 } }", ["rate_limiter"]),
        ("tiny_logits", "instance_group { } instance_group { }", ["instance group 2"]),
        ("tiny_logits", "optimization { graph { level: 1 } }", ["graph"]),
        ("tiny_logits", "input { reshape { shape: [ -1 ] } name: 'x' data_type: TYPE_INT64 dims: [ -1 ] }",
         ["reshape"]),
        ("tiny_logits", 'metric_tags { key: "a" value: "b" }', []),
        ("tiny_tokenizer", "dynamic_batching { }", ["dynamic_batching"]),
        ("tiny_tokenizer", "instance_group { count: 2 }", ["count"]),
        ("tiny_tokenizer", "response_cache { enable: true }", ["response_cache"]),
        ("tiny_tokenizer", "optimization { graph { level: 1 } }", ["graph"]),
        ("tiny_decoder", "instance_group { kind: KIND_CPU }", []),
        ("tiny_decoder", "instance_group { kind: KIND_GPU count: 2 }", ["count", "kind"]),
        ("tiny_decoder", "sequence_batching { }", ["sequence_batching"]),
        ("tiny_decoder", "dynamic_batching { }", ["dynamic_batching"]),
        ("tiny", 'default_model_filename: "a"', ["default_model_filename"]),
    ],
)  # fmt: skip
def test_a_field_without_effect_in_the_engine_is_named(models, stage, config, fields):
    add(models, stage, config)
    role = f"{stage.partition('_')[2]} stage" if "_" in stage else "text model"
    for line, field in zip(reported(models, stage), fields, strict=True):
        assert line.startswith(f"warning: {field} ")
        assert role in line


STAGES = 'parameters [ { key: "pipeline_stages" value { string_value: "2" } } ]'


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("instance_group { kind: KIND_AUTO gpus: [ 0, 1 ] }", ""),
        ("instance_group { } instance_group { }", ""),
        ("instance_group { kind: KIND_AUTO gpus: [ 0, 1, 4 ] }", "warning: GPU 4 "),
        ("instance_group { } instance_group { } instance_group { }", "warning: instance group 3 "),
        ("instance_group { kind: KIND_CPU } instance_group { kind: KIND_GPU }",
         "error: the stages of a pipeline run on devices of one kind: KIND_CPU or KIND_GPU"),
    ],
)  # fmt: skip
def test_the_devices_of_a_pipeline_are_one_for_each_stage(models, config, found):
    add(models, "tiny_logits", f"{STAGES}\n{config}")
    others = ("on the CPU", "model.stage2.onnx is missing")     # about this machine, and a model in one graph
    lines = [line for line in reported(models, "tiny_logits") if not any(map(line.__contains__, others))]
    assert [line[: len(found)] for line in lines] == ([found] if found else [])


def test_only_exported_onnx_graphs_are_pipelines(models):
    change(models, "tiny_logits", "onnxruntime", "pytorch")
    (models / "tiny_logits" / "1" / "model.onnx").rename(models / "tiny_logits" / "1" / "model.pt")
    add(models, "tiny_logits", STAGES)
    assert any("'pipeline_stages' is for ONNX graphs" in line for line in reported(models, "tiny_logits"))


@pytest.mark.parametrize(
    ("new", "field"),
    [
        ("oldest { } max_sequence_idle_microseconds: 5", "max_sequence_idle_microseconds"),
        ("oldest { max_queue_delay_microseconds: 5 }", "max_queue_delay_microseconds"),
        ("oldest { max_candidate_sequences: 4 }", "max_candidate_sequences"),
        ("oldest { preserve_ordering: true }", "preserve_ordering"),
        ("direct { }", "direct"),
    ],
)
def test_a_sequence_strategy_that_the_engine_ignores_is_named(models, new, field):
    change(models, "tiny_logits", "oldest { max_candidate_sequences: 32 }", new)
    [line] = reported(models, "tiny_logits")
    assert line.startswith(f"warning: {field} ")


CONTROL = "control_input { name: 'START' control { int32_false_true: [ 0, 1 ] } }"


BATCH_INPUT = """
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "a" data_type: TYPE_FP32 source_input: "input_ids" }
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("iterative_sequence: true", f"iterative_sequence: true {CONTROL}"),
        ("sequence_batching {", f"{BATCH_INPUT} sequence_batching {{"),
    ],
)
def test_a_field_that_changes_the_input_of_the_graph_is_an_error(models, old, new):
    change(models, "tiny_logits", old, new)
    [line] = reported(models, "tiny_logits")
    assert line.startswith("error: ")
    assert "the engine gives the graph token ids" in line
    assert "is ignored in a logits stage" in load_error(models)


@pytest.mark.parametrize(
    ("stage", "name", "value"),
    [
        ("tiny", "kv_cache_bytes", "1GiB"),
        ("tiny_decoder", "EXECUTION", "process"),
        ("tiny_logits", "inter_op_thread_count", "2"),
    ],
)
def test_a_parameter_without_effect_is_named(models, stage, name, value):
    add(models, stage, f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}')
    [line] = reported(models, stage)
    assert line.startswith(f"warning: parameter '{name}' ")


def test_loading_logs_the_warnings_that_check_reports(models, caplog):
    add(models, "tiny_logits", "instance_group { count: 3 rate_limiter { } }")
    diagnostics = repository_diagnostics([models])["tiny_logits"]
    with caplog.at_level(logging.WARNING):
        assert load_error(models) == ""
    logged = [record.getMessage() for record in caplog.records]
    for diagnostic in diagnostics:
        assert f"{diagnostic.where}: {diagnostic.message} ({diagnostic.remedy})" in logged


def test_cache_parameters_of_a_stage_without_a_cache_are_named(tiny_repository, tiny_checkpoint, tmp_path):
    names = {"input_ids": "INPUT__0", "logits": "OUTPUT__0"}
    version = add_chain(tiny_repository, tmp_path, name="whole", logits_config=WHOLE_CONFIG, **names)
    whole_torchscript(version / "model.pt", tiny_checkpoint)
    add(tmp_path, "whole_logits", 'parameters { key: "kv_cache_bytes" value { string_value: "1GiB" } }')
    [line] = reported(tmp_path, "whole_logits")
    assert line.startswith("warning: parameter 'kv_cache_bytes' ")


@pytest.mark.parametrize("count", ["", "count: 3"])
def test_a_warmup_runs_and_leaves_nothing_behind(models, count):
    add(models, "tiny_logits", sample(8, more=count))
    assert reported(models, "tiny_logits") == []
    repository = Repository([models])
    repository.start()
    try:
        assert repository.errors == {}
        assert repository.text_model("tiny").engine.num_steps == 0
        ids = np.zeros((1, 8), np.int64)
        [with_warmup] = asked(repository, "tiny_logits", input_ids=ids)
        assert with_warmup.output("logits").shape == (1, 1, 320)
        assert asked(repository, "tiny", text_input=text("hello"), max_tokens=np.array([[3]], np.int32))
    finally:
        repository.close()


def test_a_warmup_longer_than_the_context_is_rejected_by_check_and_by_the_load(models):
    add(models, "tiny_logits", sample(999999))
    [line] = reported(models, "tiny_logits")
    assert re.match(r"error: failed to run warmup sample 'w': .*\b999999\b.*\b256\b", line)
    assert line.removeprefix("error: ") in load_error(models)


def test_a_warmup_that_the_engine_rejects_fails_the_load(models):
    (models / "tiny_logits" / "warmup").mkdir()
    (models / "tiny_logits" / "warmup" / "ids").write_bytes(np.array([1, 320], np.int64).tobytes())
    add(models, "tiny_logits", sample(2, 'input_data_file: "ids"'))
    assert reported(models, "tiny_logits") == []
    assert re.search(r"failed to run warmup sample 'w': .*\b320\b.*\b320\b", load_error(models))


def test_a_warmup_of_the_wrong_tensors_fails_as_it_does_for_other_models(models):
    tensor = 'inputs { key: "x" value { data_type: TYPE_INT64 dims: [ 2 ] zero_data: true } }'
    add(models, "tiny_logits", f'model_warmup {{ name: "w" batch_size: 1 {tensor} }}')
    assert reported(models, "tiny_logits") == ["error: missing required input(s) ['input_ids']"]
    assert "missing required input(s) ['input_ids']" in load_error(models)


def test_a_warmup_with_an_undeclared_input_fails_the_load(models):
    extra = 'inputs { key: "x" value { data_type: TYPE_INT64 dims: [ 2 ] zero_data: true } }'
    add(models, "tiny_logits", sample(2, "zero_data: true", more=extra))
    expected = "failed to run warmup sample 'w': unexpected inference input 'x' for model 'tiny_logits'"
    assert expected in load_error(models)


def test_each_execution_of_a_warmup_computes_all_its_tokens(models, monkeypatch):
    """Nothing of an earlier one is in the prefix cache. Two rows may come in two steps."""
    add(models, "tiny_logits", sample(12, "zero_data: true", more="count: 3"))
    lengths: list[int] = []
    forward = OnnxLogits.forward

    def counted(self, batch):
        lengths.append(len(batch.token_ids))
        return forward(self, batch)

    monkeypatch.setattr(OnnxLogits, "forward", counted)
    assert load_error(models) == ""
    assert re.fullmatch("(24 |12 12 |12 1 ){3}", "".join(f"{length} " for length in lengths))


def test_the_versions_of_the_stages_are_those_of_policy_and_step(models):
    decoder = models / "tiny_decoder"
    shutil.copytree(decoder / "1", decoder / "2")
    broken = "class TritonPythonModel:\n    async def decode(self, sequence): 1 / 0\n"
    (decoder / "2" / "model.py").write_text(broken)
    add(models, "tiny_decoder", "version_policy { specific { versions: 1 } }")
    repository = Repository([models])
    repository.start()
    try:
        [answer] = asked(repository, "tiny", text_input=text("hello"), max_tokens=np.array([[3]], np.int32))
        assert answer.output("text_output") is not None
        assert repository.versions("tiny_decoder") == [1]
    finally:
        repository.close()


def test_the_file_of_the_decoder_is_the_one_that_its_config_names(models):
    folder = models / "tiny_decoder" / "1"
    (folder / "model.py").rename(folder / "loop.py")
    add(models, "tiny_decoder", 'default_model_filename: "loop.py"')
    assert reported(models, "tiny_decoder") == []
    assert load_error(models) == ""


def test_versions_that_the_engine_does_not_serve_are_named(models):
    shutil.copytree(models / "tiny_logits" / "1", models / "tiny_logits" / "2")
    add(models, "tiny_logits", "version_policy { all { } }")
    [line] = reported(models, "tiny_logits")
    assert re.fullmatch(r"warning: version_policy .*\b2", line)


def test_an_ensemble_may_have_names_of_its_own_for_the_tensors(models):
    for old, new in (("text_input", "prompt"), ("max_tokens", "length"), ("text_output", "answer")):
        change(models, "tiny", f'name: "{old}"', f'name: "{new}"')
        change(models, "tiny", f'value: "{old}"', f'value: "{new}"')
    assert reported(models, "tiny") == []
    with LiveServer(models) as server:
        url = f"{server.url}/v2/models/tiny/generate"
        answer = httpx.post(url, json={"prompt": "hello", "length": 3, "random_seed": 1}).json()
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
        own = httpx.post(f"{server.url}/generate", json=body)
    assert answer["answer"] == own.json()["generated_text"]


def test_tensors_without_effect_in_a_decoder_stage_are_named(models):
    extra = '{ name: "score" data_type: TYPE_INT32 dims: [ 1 ] optional: true }'
    change(models, "tiny_decoder", "input [", f"input [ {extra},")
    change(models, "tiny_decoder", "output [", 'output [ { name: "score" data_type: TYPE_FP32 dims: [ 1 ] },')
    of_input, of_output = reported(models, "tiny_decoder")
    assert of_input.startswith("warning: input 'score' ")
    assert of_output.startswith("warning: output 'score' ")


def test_a_failed_warmup_fails_a_load_request(models):
    with LiveServer(models, model_control_mode="explicit") as server:
        load = f"{server.url}/v2/repository/models/tiny/load"
        assert httpx.post(load, timeout=60).status_code == 200
        add(models, "tiny_logits", sample(999999))
        answer = httpx.post(load, timeout=60)
        assert answer.status_code == 400
        assert re.search(r"\b999999\b.*\b256\b", answer.json()["error"])
        assert httpx.get(f"{server.url}/v2/models/tiny/ready").status_code == 200
