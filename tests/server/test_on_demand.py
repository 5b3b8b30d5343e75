"""A server that loads its text models when requests need them."""

from __future__ import annotations

import json
import random
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import ollama
import pytest
import tritonclient.grpc as triton_grpc

from genserve.errors import GenserveError
from genserve.repository.model_lifecycle import ModelLifecycle
from genserve.server.dialects import generation_handler
from genserve.server.http import sse_response
from genserve.server.kserve import inference
from genserve.server.services import repository_options
from genserve.settings import ServerSettings
from tests.support.live_server import LiveServer, request_bytes, wait_until
from tests.support.representatives import with_extended

NAMES = ("m1", "m2", "m3", "m4", "m5")
CACHE_BYTES = 2**20
TALK = [{"role": "user", "content": "hello"}]


def copies(tiny_repository: Path, root: Path, names: tuple[str, ...]) -> Path:
    """Copies of the tiny model under other names, each with a KV cache of a MiB."""
    for name in names:
        for folder in sorted(tiny_repository.iterdir()):
            copied = root / folder.name.replace("tiny", name)
            shutil.copytree(folder, copied)
            config = copied / "config.pbtxt"
            text = config.read_text().replace("tiny", name)
            if folder.name == "tiny_logits":
                cache = f'{{ key: "kv_cache_bytes" value: {{ string_value: "{CACHE_BYTES}" }} }}'
                text += f"parameters [ {cache} ]\n"
            config.write_text(text)
    return root


@pytest.fixture(scope="module")
def repository(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copies(tiny_repository, tmp_path_factory.mktemp("on_demand"), NAMES)


def size_of_two(repository: Path) -> int:
    files = sum(file.stat().st_size for file in repository.glob("m1*/1/**/*") if file.is_file())
    return 2 * (files + CACHE_BYTES)


@pytest.fixture
def server(repository: Path) -> Iterator[LiveServer]:
    budget = size_of_two(repository)
    with LiveServer(repository, model_control_mode="on-demand", model_memory_budget=str(budget)) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


class Gate:
    """Holds the loads until it is open.

    Attributes:
        failing: whether they fail then.
        num_begun: the loads that have begun.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.failing, self.num_begun = threading.Event(), False, 0
        load = ModelLifecycle.load

        def gated(lifecycle: ModelLifecycle, request: Any) -> None:
            self.num_begun += 1
            self.opened.wait(60)
            if self.failing:
                raise MemoryError("there is none")
            load(lifecycle, request)

        monkeypatch.setattr(ModelLifecycle, "load", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    for module in (sse_response, generation_handler, inference):
        monkeypatch.setattr(module, "PING_S", 0.1)
    return Gate(monkeypatch)


def loaded(http: httpx2.Client) -> list[str]:
    models = http.get("/v1/models").json()["data"]
    return [model["id"] for model in models if model["status"]["value"] == "loaded"]


# By dialect: the path, the body of a stream, and its sign of life.
STREAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "openai": (
        "/v1/chat/completions",
        {"model": "m1", "messages": TALK, "max_tokens": 3, "stream": True},
        ": ping",
    ),
    "responses": (
        "/v1/responses",
        {"model": "m1", "input": "hello", "max_output_tokens": 3, "ignore_eos": True, "stream": True},
        ": ping",
    ),
    "anthropic": (
        "/v1/messages",
        {"model": "m1", "messages": TALK, "max_tokens": 3, "stream": True},
        "event: ping",
    ),
    "gemini": (
        "/v1beta/models/m1:streamGenerateContent?alt=sse",
        {"contents": [{"parts": [{"text": "hello"}]}], "generationConfig": {"maxOutputTokens": 3}},
        ": ping",
    ),
    "gemini-array": (
        "/v1beta/models/m1:streamGenerateContent",
        {"contents": [{"parts": [{"text": "hello"}]}], "generationConfig": {"maxOutputTokens": 3}},
        "",
    ),
    "ollama": (
        "/api/chat",
        {"model": "m1:latest", "messages": TALK, "options": {"num_predict": 3}},
        '"done":false',
    ),
    "tgi": ("/generate_stream", {"model": "m1", "inputs": "hello", "parameters": {}}, ": ping"),
    "kserve": ("/v2/models/m1/generate_stream", {"text_input": "hello", "max_tokens": 3}, ": ping"),
}


ENDS = {
    "openai": "[DONE]",
    "responses": "event: response.incomplete",
    "anthropic": "event: message_stop",
    "gemini": "finishReason",
    "gemini-array": "finishReason",
    "ollama": '"done":true',
    "tgi": '"finish_reason"',
    "kserve": '"text_output"',
}


def first_line_then(http: httpx2.Client, dialect: str, then: Callable[[], None]) -> tuple[str, str]:
    """The first line of a stream, after which `then` is called, and the rest."""
    path, body, _ = STREAMS[dialect]
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        chunks = response.iter_text()
        first = next(chunks)
        then()
        return first, "".join(chunks)


@pytest.mark.parametrize("dialect", with_extended(STREAMS, always={"openai", "anthropic", "ollama"}))
def test_a_stream_lives_while_its_model_is_loaded(http: httpx2.Client, gate: Gate, dialect: str) -> None:
    first, rest = first_line_then(http, dialect, gate.opened.set)
    assert first.startswith(STREAMS[dialect][2] if dialect != "ollama" else "{")
    if dialect == "ollama":
        assert json.loads(first.splitlines()[0])["message"]["content"] == ""
        assert json.loads(rest.splitlines()[-1])["load_duration"] > 0.1e9
    if dialect == "gemini-array":
        assert json.loads(first + rest)
    assert ENDS[dialect] in rest


@pytest.mark.parametrize("dialect", with_extended(STREAMS, always={"openai", "anthropic", "ollama"}))
def test_a_load_that_fails_late_is_an_error_in_the_stream(
    http: httpx2.Client, gate: Gate, dialect: str
) -> None:
    gate.failing = True
    first, rest = first_line_then(http, dialect, gate.opened.set)
    assert "there is none" in rest
    if dialect == "gemini-array":
        assert "error" in json.loads(first + rest)[0]
    if dialect == "anthropic":
        assert "event: error" in rest


def test_no_stream_begins_before_its_request_has_arrived(http: httpx2.Client, gate: Gate) -> None:
    path, fields, _ = STREAMS["kserve"]
    gate.opened.set()
    assert http.post(path, json=fields).status_code == 200
    gate.opened.clear()
    body = json.dumps(fields).encode()
    headers = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    head = f"POST {path} HTTP/1.1\r\n{headers}"
    with socket.create_connection((http.base_url.host, http.base_url.port)) as slow:
        slow.sendall(head.encode() + body[:5])
        with http.stream("POST", path.replace("m1", "m2"), json=fields) as other:
            pings = other.iter_lines()
            for _ in range(3):
                next(line for line in pings if line)
            begun = select.select([slow], [], [], 0)[0]
            gate.opened.set()
        assert not begun
        slow.sendall(body[5:])
        with slow.makefile("rb") as answer:
            assert b"text_output" in answer.read()


def test_requests_share_a_load_and_its_failure_and_the_next_one_tries_again(
    http: httpx2.Client, gate: Gate
) -> None:
    gate.failing = True
    path, body, _ = STREAMS["openai"]
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(http.post, path, json={**body, "stream": False}) for _ in range(4)]
        wait_until(lambda: gate.num_begun)
        time.sleep(0.1)  # so that most of them wait for this load
        gate.opened.set()
        responses = [answer.result() for answer in answers]
    assert {response.status_code for response in responses} == {503}
    assert "there is none" in responses[0].json()["error"]["message"]
    assert gate.num_begun <= 4
    gate.failing = False
    assert http.post(path, json={**body, "stream": False}).status_code == 200


def test_a_client_that_leaves_does_not_end_the_load_of_another(http: httpx2.Client, gate: Gate) -> None:
    path, body, _ = STREAMS["openai"]
    with ThreadPoolExecutor() as pool:
        with http.stream("POST", path, json=body) as response:
            next(response.iter_text())
            other = pool.submit(http.post, path, json={**body, "stream": False})
        gate.opened.set()
        assert other.result().status_code == 200
    assert gate.num_begun == 1


TEXT_INPUT = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]
# By name: the path and the body of a request that has no answer before its model is loaded.
WAITING: dict[str, tuple[str, dict[str, Any]]] = {
    "infer": ("/v2/models/m2/infer", {"inputs": TEXT_INPUT}),
    "generate": ("/v2/models/m2/generate", {"text_input": "hello"}),
    "generate_stream": ("/v2/models/m2/generate_stream", {"text_input": "hello"}),
    "chat": ("/v1/chat/completions", {"model": "m2", "messages": TALK}),
    "chat stream": ("/v1/chat/completions", {"model": "m2", "messages": TALK, "stream": True}),
    "tokenize": ("/tokenize", {"model": "m2", "prompt": "hello"}),
}


@contextmanager
def client_of_m2(server: LiveServer, door: str) -> Iterator[None]:
    """A client that has sent a request, and leaves at the end of the block."""
    if door in WAITING:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request_bytes(*WAITING[door]))
            if "stream" in door:
                assert connection.recv(1)  # of the signs of life
            yield
        return
    text = triton_grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"hello"], dtype=object))
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        if door == "ModelInfer":
            call = client.async_infer("m2", [text], callback=lambda **_: None)
            yield
            call.cancel()
        else:
            client.start_stream(callback=lambda **_: None)
            client.async_stream_infer("m2", [text])
            yield
            client.stop_stream(cancel_requests=True)


DOORS = [*WAITING, "ModelInfer", "ModelStreamInfer"]


@pytest.mark.parametrize(
    "door", with_extended(DOORS, always={"infer", "chat stream", "tokenize", "ModelInfer"})
)
def test_a_client_that_leaves_causes_no_load(
    server: LiveServer, http: httpx2.Client, gate: Gate, door: str
) -> None:
    on_demand = server.server.services.repository.on_demand
    assert on_demand is not None
    with ThreadPoolExecutor() as pool:
        other = pool.submit(http.post, "/v2/models/m1/generate", json={"text_input": "hello"})
        wait_until(lambda: gate.num_begun)
        with client_of_m2(server, door):
            wait_until(lambda: on_demand.num_waiting == 2)
        wait_until(lambda: on_demand.num_waiting == 1)
        gate.opened.set()
        assert other.result().status_code == 200
    assert http.post("/v2/models/m3/generate", json={"text_input": "hello"}).status_code == 200
    assert loaded(http) == ["m1", "m3"]
    assert gate.num_begun == 2


def test_an_invalid_request_loads_nothing(http: httpx2.Client) -> None:
    path, body, _ = STREAMS["openai"]
    assert http.post(path, json={**body, "temperature": -1}).status_code == 400
    assert http.post(path, json={**body, "model": "m9"}).status_code == 404
    path, body, _ = STREAMS["anthropic"]
    assert http.post(path, json={**body, "temperature": -1}).status_code == 400
    path, body, _ = STREAMS["ollama"]
    assert http.post(path, json={**body, "options": {"temperature": -1}}).status_code == 400
    path, body, _ = STREAMS["gemini"]
    assert http.post(path, json={**body, "generationConfig": {"temperature": -1}}).status_code == 400
    assert http.post("/v1/embeddings", json={"model": "m1", "input": "hello"}).status_code == 404
    gone = http.post("/api/generate", json={"model": "m9", "keep_alive": 0})
    assert gone.status_code == 404
    assert http.post("/v2/models/m9/generate", json={"text_input": ["x"]}).status_code == 404
    assert loaded(http) == []


def test_a_server_that_stops_loads_nothing(server: LiveServer, http: httpx2.Client) -> None:
    server.server.services.draining = True
    path, body, _ = STREAMS["openai"]
    assert http.post(path, json=body).status_code == 503
    assert http.post("/v2/models/m1/generate", json={"text_input": "x"}).status_code == 503
    assert loaded(http) == []


def test_ollamas_client(server: LiveServer, http: httpx2.Client) -> None:
    with ollama.Client(server.url) as client:
        _check_ollama(client, http)


def _check_ollama(client: ollama.Client, http: httpx2.Client) -> None:
    assert [model.model for model in client.list().models] == [f"{name}:latest" for name in NAMES]
    unloaded = client.show("m1")
    assert client.ps().models == []
    assert unloaded.template
    assert unloaded.capabilities == ["completion", "tools"]
    client.chat("m1", TALK, options={"num_predict": 2}, keep_alive=-1)
    loaded_now = client.show("m1")
    assert (loaded_now.template, loaded_now.capabilities) == (unloaded.template, unloaded.capabilities)
    assert unloaded.modelinfo is not None
    assert loaded_now.modelinfo is not None
    for of in ("context_length", "vocab_size"):
        assert loaded_now.modelinfo[f"llama.{of}"] == unloaded.modelinfo[f"unknown.{of}"]
    client.generate("m2", "hello", options={"num_predict": 2}, keep_alive="1h30m")
    by_name = {model.model: model for model in client.ps().models}
    assert by_name.keys() == {"m1:latest", "m2:latest"}
    assert by_name["m1:latest"].expires_at.year > 2300
    left_s = by_name["m2:latest"].expires_at.timestamp() - time.time()
    assert 5000 < left_s < 5401
    assert by_name["m2:latest"].size >= CACHE_BYTES
    assert client.generate("m3", keep_alive=300).done_reason == "load"
    assert client.generate("m3", keep_alive=0).done_reason == "unload"
    wait_until(lambda: "m3" not in loaded(http))
    client.chat("m4", TALK, options={"num_predict": 2}, keep_alive=0)
    wait_until(lambda: "m4" not in loaded(http))
    assert client.generate("m5", keep_alive=0).done_reason == "unload"  # which is not loaded
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        client.chat("m1", TALK, keep_alive="soon")
    assert client.generate("m3", keep_alive="9999999999h").done_reason == "load"
    assert "m3:latest" in [model.model for model in client.ps().models]
    assert client.generate("m4", keep_alive="1m").done_reason == "load"  # the next load waits for nothing


def test_kserve_loads_and_unloads(server: LiveServer, http: httpx2.Client) -> None:
    answer = http.post("/v2/models/m1/generate", json={"text_input": "hello", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        tokens = triton_grpc.InferInput("text_input", [1], "BYTES")
        tokens.set_data_from_numpy(np.array([b"hello"], dtype=object))
        assert not client.is_model_ready("m2")
        states = {model.name: model.state for model in client.get_model_repository_index().models}
        assert (states["m1"], states["m2"]) == ("READY", "")
    assert http.post("/v2/repository/models/m2/load").status_code == 200
    assert loaded(http) == ["m1", "m2"]
    assert http.post("/v2/repository/models/m1/unload").status_code == 200
    wait_until(lambda: loaded(http) == ["m2"])
    config = {"parameters": {"config": "{}"}}
    assert http.post("/v2/repository/models/m2/load", json=config).status_code == 501


def test_states_and_metrics(http: httpx2.Client) -> None:
    assert http.get("/v1/models/m1").json()["status"] == {"value": "unloaded"}
    path, body, _ = STREAMS["openai"]
    http.post(path, json=body)
    status = http.get("/v1/models/m1").json()["status"]
    assert status["value"] == "loaded"
    assert status["memory_bytes"] >= CACHE_BYTES
    assert status["remaining_s"] <= 300
    assert http.get("/health").status_code == 200
    metrics = http.get("/metrics").text
    assert f'genserve_model_memory_bytes{{model="m1"}} {float(status["memory_bytes"])}' in metrics
    assert "genserve_model_load_seconds_count 1.0" in metrics
    assert [model["displayName"] for model in http.get("/v1beta/models").json()["models"]] == [*NAMES]


def test_two_of_five_models_for_many_clients(server: LiveServer, http: httpx2.Client) -> None:
    budget = server.server.services.repository.options.memory_budget_bytes
    on_demand = server.server.services.repository.on_demand
    assert on_demand is not None
    assert budget is not None
    problems: list[str] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        with httpx2.Client(base_url=server.url, timeout=60) as own:
            for _ in range(4):
                path, body, _ = STREAMS[rng.choice(["openai", "anthropic", "ollama"])]
                body = body | {"model": rng.choice(NAMES)}
                with own.stream("POST", path, json=body) as response:
                    if response.status_code != 200:
                        problems.append(response.read().decode())
                    elif rng.random() < 0.3:
                        continue  # leaves
                    elif "error" in (text := response.read().decode()):
                        problems.append(text)

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, seed) for seed in range(6)]
        while not all(one.done() for one in clients):
            if sum(one.size_bytes for one in on_demand.loaded()) > budget:
                problems.append("over the budget")
            time.sleep(0.001)
    for one in clients:
        one.result()
    assert not problems
    assert on_demand.num_unloads["memory"] > 2
    wait_until(lambda: not on_demand.num_waiting)


def test_a_budget_without_the_mode_is_an_error(repository: Path) -> None:
    settings = ServerSettings(model_repository=(repository,), model_memory_budget="1GiB")
    with pytest.raises(GenserveError, match="--model-memory-budget"):
        repository_options(settings)
