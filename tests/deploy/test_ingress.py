"""An ingress over replicas answers every dialect as a single server does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from genserve.deploy.ingress import ingress_server
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.engine.engine_thread import EngineThread
from genserve.llm import LLM
from genserve.textmodel.calibration import Calibration, calibrated_model, write_calibration
from genserve.textmodel.receipts import described
from tests.fakes.local_replicas import LocalReplicas, LossyReplicas
from tests.support.answer_timings import without_timings
from tests.support.live_ingress import LiveIngress
from tests.support.live_server import LiveServer

CHAT = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
# The fields that differ between answers: ids, times, and how many prompt tokens a replica has cached.
VOLATILE = re.compile(
    r'"(id|call_id|item_id|previous_response_id|created|created_at|completed_at|last_inference|ns|retry_after'
    r"|cached_tokens|cache_read_input_tokens|input_tokens|\w+_duration|compute_time|inference_time|queue_time"
    r'|time_per_token|total_time|validation_time|load_duration|modified_at|expires_at|seed)"'
    r': ?("[^"]*"|[\d.]+)'
)
NOUL = {"type": "noul", "instructions": "?"}
OLLAMA = {"temperature": 0, "num_predict": 8}
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tiny_repository: Path) -> Path:
    """The tiny model without drafts, which are verified when the engine has time: each step is one delta."""
    repository = tmp_path_factory.mktemp("deployed") / "models"
    shutil.copytree(tiny_repository, repository)
    with (repository / "tiny_logits" / "config.pbtxt").open("a") as config:
        config.write('parameters [ { key: "speculation" value: { string_value: "none" } } ]\n')
    with LLM("tiny", model_repository=repository) as llm:
        facts = calibrated_model(described(llm._model.facts()))
    calibration = Calibration(temperatures={"noul": 2.5}, model=facts)
    write_calibration(repository / "tiny_logits" / "1", calibration, fits={})
    return repository


@pytest.fixture(scope="module")
def replicas(repository: Path) -> Iterator[LocalReplicas]:
    made = [ModelReplica([repository], "tiny") for _ in range(3)]
    yield LocalReplicas(*made)
    for replica in made:
        replica.close()


@pytest.fixture(scope="module")
def ingress(repository: Path, replicas: LocalReplicas) -> Iterator[httpx2.Client]:
    with (
        LiveIngress(repository, {"tiny": replicas}) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def lossy(repository: Path, replicas: LocalReplicas) -> Iterator[httpx2.Client]:
    """An ingress that loses a replica in each call."""
    losing = LossyReplicas(*replicas.replicas.values())
    with (
        LiveIngress(repository, {"tiny": losing}) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client
    assert losing.num_lost


@pytest.fixture(scope="module")
def single(repository: Path) -> Iterator[httpx2.Client]:
    with (
        LiveServer(repository) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


REQUESTS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY}),
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "stream": True, "logprobs": True}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 3, "n": 3, "max_tokens": 8}),
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {
        "messages": CHAT, "temperature": 0, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}
        },
    }),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": CHAT, "model": "other"}),
    ("/v1/chat/completions", {"messages": CHAT, "temperature": 0, "max_tokens": 100_000}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 900}]}),
    ("/v1/chat/completions", {"messages": CHAT, "structured_outputs": {"regex": "("}}),
    ("/v1/completions", {"prompt": ["Hello", "world"], "seed": 1, "n": 2, "max_tokens": 6}),
    ("/v1/completions", {"prompt": "a" * 3000}),
    ("/v1/completions", {"prompt": "Hello", "use_beam_search": True, "n": 2, **GREEDY}),
    ("/v1/completions", {"prompt": "Hello", "best_of": 3, "n": 2, "seed": 5, "max_tokens": 6}),
    ("/v1/completions", {"prompt": [[5, 6, 7]], "prompt_logprobs": 2, "logprobs": 2, **GREEDY}),
    ("/v1/completions", {"prompt": "Hello", "stop": ["e"], **GREEDY, "stream": True}),
    ("/v1/responses", {"input": "Hello", "temperature": 0, "max_output_tokens": 16}),
    ("/v1/messages", {"messages": CHAT, "temperature": 0, "max_tokens": 8, "model": "tiny", "stream": True}),
    ("/v1/messages/count_tokens", {"messages": CHAT, "model": "tiny"}),
    ("/api/chat", {"messages": CHAT, "stream": False, "model": "tiny", "options": OLLAMA}),
    ("/api/generate", {"prompt": "x", "stream": False, "model": "tiny", "options": OLLAMA}),
    ("/v1/systemone", {"state": "x", "questions": {"a": NOUL}}),
    ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 8, "details": True}}),
    ("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 8}}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v2/models/tiny/generate", {"text_input": "Hello", "max_tokens": 8}),
    ("/v2/models/tiny/generate", {"text_input": "Hello", "max_tokens": -8}),
    ("/v2/models/tiny/generate_stream", {"text_input": "Hello", "max_tokens": 8, "stream": True}),
    ("/v2/models/tiny/generate", {"text_inputs": "Hello"}),
    ("/v2/models/tiny/infer", {"inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": ["Hello", "world"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [2, 1], "data": [4, 4]},
    ]}),
    ("/v2/models/tiny_logits/infer", {"inputs": [
        {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]},
    ]}),
    ("/v2/models/tiny_decoder/infer", {"inputs": []}),
    ("/v2/models/tiny_tokenizer/infer", {"inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello"]},
    ]}),
    ("/v2/models/other/infer", {"inputs": []}),
    ("/v2/repository/index", {}),
]  # fmt: skip
PATHS = (
    "/v1/models", "/v1/models/tiny", "/health", "/version", "/info", "/api/tags", "/api/version",
    "/v2", "/v2/health/ready", "/v2/health/live", "/v2/models/tiny", "/v2/models/tiny/config",
    "/v2/models/tiny_logits/config", "/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready",
    "/v2/models/tiny/versions/9", "/v2/models/other", "/",
)  # fmt: skip


def shown(response: httpx2.Response) -> tuple[int, str, str]:
    """Status, content type and body, without what differs from answer to answer."""
    return (
        response.status_code,
        response.headers.get("content-type", ""),
        VOLATILE.sub(r'"\1":0', without_timings(response.text)).replace('": ', '":'),
    )


@pytest.mark.parametrize("kind", [pytest.param("ingress", marks=pytest.mark.extended), "lossy"])
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: json.dumps(value)[:60])
def test_answers_as_a_single_server(
    request: pytest.FixtureRequest, single: httpx2.Client, kind: str, path: str, body: Any
) -> None:
    several: httpx2.Client = request.getfixturevalue(kind)
    expected, answered = (client.post(path, json=body) for client in (single, several))
    assert shown(answered) == shown(expected)


def test_progress_and_timings_come_from_the_replica(ingress: httpx2.Client) -> None:
    body = {"messages": CHAT, "n": 2, "return_progress": True, "stream": True, "cache_salt": "p", **GREEDY}
    text = ingress.post("/v1/chat/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    progress = [event for event in events if "prompt_progress" in event]
    assert [event["choices"][0]["index"] for event in progress] == [0]
    assert progress[0]["prompt_progress"]["processed"] == progress[0]["prompt_progress"]["total"]
    assert events[-1]["timings"]["predicted_n"] == 2 * GREEDY["max_tokens"]
    assert events[-1]["timings"]["prompt_ms"] > 0


def test_a_receipt_is_that_of_the_replica(
    single: httpx2.Client, ingress: httpx2.Client, lossy: httpx2.Client
) -> None:
    body = {"messages": CHAT, "return_receipt": True, "seed": 1, **GREEDY}
    answers = [client.post("/v1/chat/completions", json=body) for client in (single, ingress, lossy)]
    whole, same, resumed = (answer.json()["receipt"] for answer in answers)
    assert same == whole
    assert resumed["token_ids"] == whole["token_ids"]
    # A second replica has not seen the logits of the first, which may have ended the answer.
    assert resumed["logits_sha256"] in (None, whole["logits_sha256"])


def test_decisions_are_calibrated(ingress: httpx2.Client) -> None:
    reply = ingress.post("/v1/systemone", json={"state": "x", "questions": {"a": NOUL}})
    answer = reply.json()["answers"]["a"]
    assert (answer["calibrated"], answer["temperature"]) == (True, 2.5)


@pytest.mark.parametrize("path", PATHS)
def test_shows_itself_as_a_single_server(ingress: httpx2.Client, single: httpx2.Client, path: str) -> None:
    expected, answered = (client.get(path) for client in (single, ingress))
    assert shown(answered) == shown(expected)


def test_a_client_that_leaves_cancels_the_sequence_in_the_replica(
    ingress: httpx2.Client, replicas: LocalReplicas
) -> None:
    body = {"prompt": "Hello", "stream": True, "ignore_eos": True}
    with ingress.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    for engine in engines(replicas):
        engine.drain(timeout_s=60)
        assert engine.num_accepted == 0


def test_tokens_of_a_time_limit_end_at_the_replica(ingress: httpx2.Client) -> None:
    body = {"prompt": "Hello", "ignore_eos": True, "max_time_ms": 1}
    answer = ingress.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["stop_reason"] == "deadline"


def test_sums_up_the_metrics_of_the_replicas(ingress: httpx2.Client, replicas: LocalReplicas) -> None:
    before = [engine.num_steps for engine in engines(replicas)]
    generated = counted(ingress, 'genserve_generation_tokens_total{model="tiny"}')
    for _ in range(3):
        ingress.post("/v1/completions", json={"prompt": "Hello", "ignore_eos": True, "max_tokens": 5})
    assert counted(ingress, 'genserve_generation_tokens_total{model="tiny"}') == generated + 15
    assert all(engine.num_steps > steps for engine, steps in zip(engines(replicas), before, strict=True))


class FullReplicas(LocalReplicas):
    """Local replicas that report to be full."""

    def load(self, identity: str) -> ReplicaLoad:
        return ReplicaLoad(num_free=0, seconds_per_slot=0.5)


def test_a_request_is_rejected_early_while_all_replicas_are_full(
    repository: Path, replicas: LocalReplicas
) -> None:
    full = FullReplicas(*replicas.replicas.values())
    with (
        LiveIngress(repository, {"tiny": full}) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        rejected = client.post("/v1/completions", json={"prompt": 5.5})  # which is not validated any more
        assert rejected.status_code == 429
        assert rejected.headers["retry-after-ms"] == "250"
        assert "add replicas" in rejected.text
        assert values(client, "genserve_admission_rejections_total{", replicas="none") == [1]
    assert not full.calls


def test_the_metrics_of_each_replica_are_not_those_of_an_ingress(
    repository: Path, ingress: httpx2.Client, replicas: LocalReplicas
) -> None:
    """The metrics of two ingresses can be added up, and added to the metrics of the replicas."""
    body = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]}]}
    ingress.post("/v2/models/tiny_logits/infer", json=body)
    ingress.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
    with (
        LiveIngress(repository, {"tiny": replicas}) as server,
        httpx2.Client(base_url=server.url, timeout=60) as other,
    ):
        for name in (
            "genserve_generation_tokens_total{",
            "genserve_time_to_first_token_seconds_count{",
            'nv_inference_count{model="tiny_logits"',
            "vllm:prompt_tokens_total{",
            "vllm:request_success_total{",
            "vllm:cache_config_info{",
        ):
            of_each = values(ingress, name, replicas="each")
            assert of_each == values(other, name, replicas="each")
            assert sum(of_each) > 0
            assert len(of_each) % 3 == 0
            assert values(ingress, name, replicas="none") == values(other, name, replicas="none") == []
        lag = "genserve_event_loop_lag_max_seconds"
        assert [len(values(other, lag, replicas=kind)) for kind in ("none", "each", "sum")] == [1, 0, 1]
    text = ingress.get("/metrics?replicas=each").text
    for replica in replicas.replicas.values():
        assert f'vllm:generation_tokens_total{{engine="0",model_name="tiny",replica="{replica.id}"}}' in text
    assert ingress.get("/metrics?replicas=all").status_code == 422


def test_sums_up_the_statistics_of_the_replicas(ingress: httpx2.Client) -> None:
    body = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]}]}

    def count(model: str) -> int:
        [stats] = ingress.get(f"/v2/models/{model}/stats").json()["model_stats"]
        return int(stats["inference_stats"]["success"]["count"])

    before = count("tiny_logits"), count("tiny")
    for _ in range(4):
        ingress.post("/v2/models/tiny_logits/infer", json=body)
        ingress.post("/v2/models/tiny/generate", json={"text_input": "Hello", "max_tokens": 1})
    assert (count("tiny_logits"), count("tiny")) == (before[0] + 4, before[1] + 4)


def test_counters_keep_what_a_killed_replica_has_counted(repository: Path, replicas: LocalReplicas) -> None:
    mortal = LocalReplicas(*replicas.replicas.values())
    body = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]}]}

    def counts(client: httpx2.Client) -> list[float]:
        return [
            counted(client, 'genserve_generation_tokens_total{model="tiny"}'),
            counted(client, 'genserve_e2e_request_latency_seconds_count{model="tiny"}'),
            counted(client, 'nv_inference_count{model="tiny_logits",version="1"}'),
            counted(client, 'genserve_kv_cache_num_blocks{model="tiny"}'),
        ]

    with (
        LiveIngress(repository, {"tiny": mortal}) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        for _ in range(3):
            client.post("/v2/models/tiny_logits/infer", json=body)
            client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
        *before, num_blocks = counts(client)
        server.call(lambda: mortal.kill(0))
        assert counts(client) == [*before, num_blocks * 2 / 3]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "{adapter}"}, 400),
        ("/v1/unload_lora_adapter", {"lora_name": "mine"}, 404),
        ("/v2/models/tiny/generate", {"text_input": "x", "parameters": {"lora_name": "mine"}}, 400),
        ("/generate", {"inputs": "x", "parameters": {"adapter_id": "mine"}}, 404),
    ],
)
def test_a_deployment_has_no_adapters_and_says_so(
    ingress: httpx2.Client, tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    fields = {name: str(tmp_path) if value == "{adapter}" else value for name, value in body.items()}
    assert ingress.post(path, json=fields).status_code == status


@pytest.mark.parametrize("action", ["load", "unload"])
def test_rejects_to_change_the_models(ingress: httpx2.Client, action: str) -> None:
    response = ingress.post(f"/v2/repository/models/tiny/{action}", json={})
    assert response.status_code == 400
    assert "genserve deploy ray" in response.json()["remedy"]


def test_rejects_shared_memory(ingress: httpx2.Client) -> None:
    region = {"key": "/x", "offset": 0, "byte_size": 4}
    response = ingress.post("/v2/systemsharedmemory/region/x/register", json=region)
    assert response.status_code == 400
    assert "another machine" in response.json()["error"]


def engines(replicas: LocalReplicas) -> list[EngineThread]:
    found = [one.repository.text_model().engine for one in replicas.replicas.values()]
    return [engine for engine in found if isinstance(engine, EngineThread)]


def counted(client: httpx2.Client, name: str) -> float:
    """The value of a metric, of ingress and replicas together."""
    [value] = values(client, name, replicas="sum")
    return value


def values(client: httpx2.Client, name: str, *, replicas: str) -> list[float]:
    lines = client.get("/metrics", params={"replicas": replicas}).text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]


def test_answers_the_probe_of_kuberay(
    repository: Path, ingress: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KubeRay looks for the word in the answer of a pod's port, without a key."""
    answer = ingress.get("/-/healthz")
    assert (answer.status_code, answer.text) == (200, "success")
    monkeypatch.setattr(ingress_server, "_START_S", 0.01)  # no model answers
    with LiveIngress(repository, {"tiny": LocalReplicas()}, api_key="key") as server:
        answer = httpx2.get(f"{server.url}/-/healthz")
    assert (answer.status_code, answer.text) == (503, "not ready")


def test_a_request_that_every_replica_dies_of_is_not_to_be_sent_again(
    repository: Path, replicas: LocalReplicas
) -> None:
    dying = LossyReplicas(*replicas.replicas.values(), also_resumed=True)
    with LiveIngress(repository, {"tiny": dying}) as server:
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body)
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=2) as client,
            pytest.raises(openai.InternalServerError, match="3 replicas of 'tiny' died"),
        ):
            client.completions.create(model="tiny", prompt="Hello", extra_body=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "replica_lost"
    assert dying.num_lost == 6


def test_writes_the_log_of_a_single_server(repository: Path, replicas: LocalReplicas, tmp_path: Path) -> None:
    file = tmp_path / "log"
    with LiveIngress(repository, {"tiny": replicas}, log_file=file) as server:
        httpx2.get(f"{server.url}/v1/models", headers={"x-request-id": "mine"})
    [line] = [line for line in file.read_text().splitlines() if "mine" in line]
    assert "/v1/models" in line
