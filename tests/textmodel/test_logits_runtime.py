"""The runtime that each config of a logits stage selects, over HTTP with the tiny model's weights."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.backends.backend import Placement
from genserve.errors import RepositoryError
from genserve.export import SilentProgress, export_model
from genserve.repository.index import scan
from genserve.repository.model_validation import repository_diagnostics
from genserve.textmodel import logits_runtime
from genserve.textmodel.logits_config import is_logits_stage
from genserve.textmodel.logits_runtime import load_logits
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory
from tests.backends.inferences import config_of
from tests.support.live_server import LiveServer
from tests.support.stage_chains import WHOLE_CONFIG, add_chain, whole_torchscript
from tests.support.tiny_llama import tiny_tokenizer
from tests.support.transformers_reference import greedy_ids, reference_model


@pytest.fixture(scope="module")
def root(tiny_repository: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds") / "models"
    shutil.copytree(tiny_repository, root)
    names = {"input_ids": "INPUT__0", "logits": "OUTPUT__0"}
    version = add_chain(tiny_repository, root, name="whole", logits_config=WHOLE_CONFIG, **names)
    whole_torchscript(version / "model.pt", tiny_checkpoint)
    exported(tiny_checkpoint, root, name="scripted", file_format="torchscript")
    exported(tiny_checkpoint, root, name="staged", precision="fp32", pipeline_stages=2)
    return root


def exported(checkpoint: Path, root: Path, **options: Any) -> None:
    export_model(str(checkpoint), repository=root, progress=SilentProgress(), **options)


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[LiveServer]:
    with LiveServer(root) as server:
        yield server


def test_all_kinds_of_logits_stages_pass_check(root: Path) -> None:
    assert set(repository_diagnostics([root]).values()) == {()}


@pytest.mark.parametrize("kind", ["whole", "scripted", "staged"])
def test_every_kind_of_logits_stage_gives_the_same_text(server: LiveServer, kind: str) -> None:
    messages = [{"role": "user", "content": "hello world, how are you"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answers = {
        model: httpx2.post(f"{server.url}/v1/chat/completions", json=body | {"model": model}, timeout=60)
        for model in ("tiny", kind)
    }
    expected, found = (answers[model].json() for model in ("tiny", kind))
    assert found["choices"] == expected["choices"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 12


def test_a_graph_without_a_cache_answers_under_the_names_of_its_own_config(server: LiveServer) -> None:
    def asked(model: str, ids: str, mask: str) -> list[float]:
        inputs = [
            {"name": ids, "shape": [1, 3], "datatype": "INT64", "data": [5, 6, 7]},
            {"name": mask, "shape": [1, 3], "datatype": "INT64", "data": [1, 1, 0]},
        ]
        answer = httpx2.post(f"{server.url}/v2/models/{model}/infer", json={"inputs": inputs}, timeout=60)
        [output] = answer.json()["outputs"]
        return output["data"]

    numbered = asked("whole_logits", "INPUT__0", "INPUT__1")
    assert numbered == pytest.approx(asked("tiny_logits", "input_ids", "attention_mask"), abs=1e-4)


def test_loading_a_graph_without_a_cache_logs_its_cost(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LiveServer(root, load_model=("whole",)):
        pass
    [line] = [record.getMessage() for record in caplog.records if "KV cache" in record.getMessage()]
    assert line.startswith("model whole_logits has no KV cache: each token costs a run of the whole sequence")
    assert "128 tokens" in line


@pytest.mark.parametrize(
    ("backend", "state", "same_buffer", "is_one"),
    [
        ("onnxruntime", "past_key_values.0.key", "true", True),
        ("onnxruntime", "past_key_values.0.key", "false", True),
        ("pytorch", "past_key_values", "true", True),
        ("pytorch", "past_key_values", "false", False),
        ("onnxruntime", "hidden", "true", False),
        ("pytorch", "INPUT__1", "true", False),
        ("python", "past_key_values", "true", False),
    ],
)
def test_an_iterative_model_is_a_logits_stage_if_its_states_are_keys_and_values(
    tmp_path: Path, backend: str, state: str, same_buffer: str, is_one: bool
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(f"""
        backend: "{backend}" max_batch_size: 4
        input [ {{ name: "INPUT__0" data_type: TYPE_INT64 dims: [ -1 ] }} ]
        output [ {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
        sequence_batching {{
          iterative_sequence: true
          state [ {{ input_name: "{state}" output_name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 2, -1, 16 ]
                     use_same_buffer_for_input_output: {same_buffer} }} ]
        }}
    """)
    assert is_logits_stage(scan([tmp_path])["m"].config) is is_one


@pytest.mark.extended
def test_a_traced_model_answers_as_transformers_does(
    traced_repository: Path, traced_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["the", "hello world, how are you", "a longer one of them: " + "on and on " * 6]
    assert set(repository_diagnostics([traced_repository]).values()) == {()}
    caplog.set_level(logging.WARNING)
    with LiveServer(traced_repository) as server, ThreadPoolExecutor() as pool:
        answers = list(pool.map(partial(generated_ids, server.url), prompts))
    assert "traced_logits copies its KV cache at each step" in caplog.text
    model, tokenizer = reference_model(traced_checkpoint), tiny_tokenizer(vocab_size=320)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy_ids(model, tokenizer.encode(prompt).ids, num_tokens=20)


def test_a_stage_with_other_tensors_is_rejected_before_its_file_is_read(tmp_path: Path) -> None:
    inputs = "".join(f"input {{ name: '{name}' data_type: TYPE_INT64 dims: [ -1 ] }}" for name in "abc")
    output = "output { name: 'logits' data_type: TYPE_FP32 dims: [ -1, 8 ] }"
    config = config_of(f"backend: 'onnxruntime' {inputs} {output}")
    with pytest.raises(RepositoryError, match="a, b, c"):
        load_logits(config, tmp_path)


@pytest.mark.parametrize(("num_devices", "expected"), [(1, "aa"), (2, "ab")])
def test_the_stages_of_a_pipeline_are_spread_over_the_devices(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_devices: int, expected: str
) -> None:
    devices: list[str] = []

    def memory(placement: Placement) -> HostMemory:
        devices.append(placement.name)
        return HostMemory()

    monkeypatch.setattr(logits_runtime, "_memory", memory)
    config = scan([root])["staged_logits"].config
    assert config is not None
    placements = [Placement(name=name, kind="CPU") for name in "ab"[:num_devices]]
    load_logits(config, root / "staged_logits" / "1", placements=placements)
    assert "".join(devices) == expected


def generated_ids(url: str, prompt: str) -> list[int]:
    """The ids of twenty greedy tokens."""
    body = {
        "inputs": prompt,
        "parameters": {"max_new_tokens": 20, "do_sample": False, "details": True, "ignore_eos": True},
    }
    answer = httpx2.post(f"{url}/generate", json=body, timeout=60).json()
    return [token["id"] for token in answer["details"]["tokens"]]
