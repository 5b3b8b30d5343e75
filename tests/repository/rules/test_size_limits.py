"""Sizes beyond the memory are rejected, with numbers, before anything is allocated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx2 as httpx
import pytest

from genserve.config.diagnostics import Diagnostic
from genserve.machine import total_memory_bytes
from genserve.repository.model_validation import repository_diagnostics
from genserve.repository.repository import Repository
from tests.support.live_server import LiveServer
from tests.support.python_models import CONFIG, write_model
from tests.support.stage_chains import WHOLE_CONFIG, add_chain, whole_torchscript

BATCHING = CONFIG.replace("{", "{{").replace("}", "}}") + "max_batch_size: {}\n"
WARMUP = 'inputs {{ key: "X" value {{ data_type: TYPE_FP32 dims: [ {} ] zero_data: true }} }}'
STATE = 'state {{ input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ {} ] }}'


@pytest.fixture
def models(tiny_repository: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_repository, tmp_path / "models")


def change(models: Path, old: str, new: str) -> None:
    file = models / "tiny_logits" / "config.pbtxt"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def errors(root: Path, name: str) -> list[Diagnostic]:
    return [each for each in repository_diagnostics([root])[name] if each.severity.value == "error"]


def load_error(root: Path, name: str) -> str:
    repository = Repository([root])
    repository.start()
    repository.close()
    return str(repository.errors[name])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (CONFIG + "instance_group { count: 1000000000 }", ["1000000000"]),
        (CONFIG + "instance_group { count: 4000 } instance_group { count: 4000 }", ["8000"]),
        (BATCHING.format(2**31 - 1) + "sequence_batching { direct { } }",
         ["2147483647", "1048576"]),
        (BATCHING.format(8) + "sequence_batching { oldest { max_candidate_sequences: 2000000000 } }",
         ["2000000000"]),
        (BATCHING.format(8) + f"sequence_batching {{ {STATE.format('1048576, 1048576, 1048576')} }}",
         ["'s'", str(2**62), str(total_memory_bytes())]),
        (BATCHING.format(8) + f'model_warmup {{ name: "w" batch_size: 8 {WARMUP.format(2**60)} }}',
         ["'w'", str(2**65), str(total_memory_bytes())]),
    ],
)  # fmt: skip
def test_a_size_beyond_the_memory_is_rejected_with_numbers(tmp_path, config, named):
    write_model(tmp_path, "m", config=config)
    [diagnostic] = errors(tmp_path, "m")
    assert all(each in diagnostic.message for each in named)
    assert diagnostic.position
    assert diagnostic.remedy
    assert diagnostic.message in load_error(tmp_path, "m")


@pytest.mark.parametrize(
    "config",
    [
        BATCHING.format(2**31 - 1),
        BATCHING.format(2**31 - 1) + f"dynamic_batching {{ preferred_batch_size: {2**31 - 1} }}",
        CONFIG.replace("-1", str(2**62)),
        CONFIG + "instance_group { count: 64 }",
    ],
)
def test_a_limit_that_needs_no_memory_may_have_any_value(tmp_path, config):
    write_model(tmp_path, "m", config=config)
    assert errors(tmp_path, "m") == []
    repository = Repository([tmp_path])
    repository.start()
    repository.close()
    assert repository.errors == {}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("max_batch_size: 32", f"max_batch_size: {2**31 - 1}", ["2147483647", "1048576"]),
        ("320 ]", f"{2**62} ]", ["'logits'", "32", str(total_memory_bytes())]),
        ("sequence_batching {", "instance_group { count: 1000000000 } sequence_batching {", ["1000000000"]),
    ],
)
def test_a_logits_stage_beyond_the_memory_is_rejected(models, old, new, named):
    change(models, old, new)
    first, *_ = errors(models, "tiny_logits")
    assert all(each in first.message for each in named)
    assert first.message in load_error(models, "tiny")


def test_the_context_of_a_graph_without_a_cache_is_limited_by_memory(
    tiny_repository, tiny_checkpoint, tmp_path
):
    config = WHOLE_CONFIG.replace('"128"', f'"{2**40}"')
    names = {"input_ids": "INPUT__0", "logits": "OUTPUT__0"}
    version = add_chain(tiny_repository, tmp_path, name="whole", logits_config=config, **names)
    whole_torchscript(version / "model.pt", tiny_checkpoint)
    [diagnostic] = errors(tmp_path, "whole_logits")
    assert all(str(each) in diagnostic.message for each in (2**40, 2**46))
    assert diagnostic.message in load_error(tmp_path, "whole")


def test_a_kv_cache_limit_beyond_the_memory_is_a_warning(models):
    change(models, "sequence_batching {",
           'parameters { key: "kv_cache_bytes" value { string_value: "999999999GiB" } }\nsequence_batching {')
    [diagnostic] = repository_diagnostics([models])["tiny_logits"]
    assert diagnostic.severity.value == "warning"
    assert str(total_memory_bytes()) in diagnostic.message


def test_the_config_of_a_load_request_has_the_same_limits(tmp_path):
    write_model(tmp_path, "m")
    config = json.dumps({"backend": "python", "instance_group": [{"count": 1000000000}]})
    with LiveServer(tmp_path, model_control_mode="explicit", load_model=("m",)) as server:
        answer = httpx.post(
            f"{server.url}/v2/repository/models/m/load", json={"parameters": {"config": config}}, timeout=30
        )
        assert answer.status_code == 400
        assert "1000000000" in answer.json()["error"]
        assert httpx.get(f"{server.url}/v2/models/m/ready").status_code == 200
