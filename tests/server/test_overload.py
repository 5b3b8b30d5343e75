"""A full server: which requests are rejected, and how each dialect reports it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import httpx2
import huggingface_hub
import openai
import pytest
from huggingface_hub.errors import OverloadedError
from tritonclient.grpc import service_pb2, service_pb2_grpc

from genserve.client import Client
from genserve.errors import Overloaded
from genserve.inference_statistics import FailureReason
from tests.server.gated import TGI, Gated, gated
from tests.support.live_server import LiveServer, wait_until

CHAT = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 40, "ignore_eos": True}
TEXT = {"prompt": "tell me", "max_tokens": 40, "ignore_eos": True}
TRITON = {"text_input": "tell me", "max_tokens": 40}
INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["tell me"]}]}

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", TEXT),
    ("/v1/completions", TEXT | {"stream": True}),
    ("/generate", TGI),
    ("/generate_stream", TGI),
    ("/", TGI | {"stream": True}),
    ("/v2/models/tiny/generate", TRITON),
    ("/v2/models/tiny/generate_stream", TRITON | {"stream": True}),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tiny_repository: Path) -> Path:
    return gated(tmp_path_factory.mktemp("gated"), tiny_repository)


def answer_of(client: socket.socket) -> tuple[int, Any, bytes]:
    """Read an answer: its status, headers and body."""
    answer = HTTPResponse(client)
    answer.begin()
    return answer.status, answer.headers, answer.read()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, tiny_repository: Path) -> Iterator[Gated]:
    """One answer runs, and none may wait."""
    server = Gated(gated(tmp_path_factory.mktemp("full"), tiny_repository), max_queue=0)
    yield server
    server.close()


@pytest.fixture
def impatient(repository: Path) -> Iterator[Gated]:
    """One answer runs, and requests that wait time out immediately."""
    server = Gated(repository, max_queue_wait_s=1e-6)
    yield server
    server.close()


def check_rejection(path: str, status: int, headers: Any, body: bytes) -> None:
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) >= 1
    content = json.loads(body.removeprefix(b"data: "))
    if path.startswith("/v1/"):
        assert content["error"]["type"] == "rate_limit_error"
        assert content["error"]["code"] == "overloaded"
    elif path.startswith("/v2/"):
        assert "--max-queue" in content["remedy"]
    else:
        assert content["error_type"] == "overloaded"


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_full_queue_is_429_with_retry_after_on_every_route(
    full: Gated, path: str, body: dict[str, Any]
) -> None:
    with httpx2.Client(base_url=full.live.url) as http:
        answer = http.post(path, json=body)
    check_rejection(path, answer.status_code, answer.headers, answer.content)
    assert full.engine.num_accepted == 1


def test_a_full_queue_rejects_a_request_before_its_fields_are_validated(full: Gated) -> None:
    no_chat = CHAT | {"messages": "tell me"}
    with httpx2.Client(base_url=full.live.url) as http:
        statuses = {
            name: http.post("/v1/chat/completions", json=no_chat | fields).status_code
            for name, fields in {
                "the only model": {},
                "named": {"model": "tiny"},
                "unknown": {"model": "huge"},
                "no name": {"model": 1},
                "with priority": {"priority": -1},  # its wait depends on it
            }.items()
        }
        empty = http.post("/v1/chat/completions").status_code
        counted = http.post("/v1/messages/count_tokens", json={"messages": CHAT["messages"]}).status_code
    assert statuses == {
        "the only model": 429, "named": 429, "unknown": 400, "no name": 400, "with priority": 400,
    }  # fmt: skip
    assert (empty, counted) == (400, 200)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_queue_timeout_is_429_before_the_first_byte_on_every_route(
    impatient: Gated, path: str, body: dict[str, Any]
) -> None:
    with impatient.send(path, body) as client:
        wait_until(lambda: impatient.engine.num_accepted == 2)
        impatient.open_gate()
        status, headers, content = answer_of(client)
    check_rejection(path, status, headers, content)
    assert impatient.rejections("queue_timeout") == 1
    if path.startswith("/v2/"):
        failures = impatient.live.server.services.repository.find("tiny", -1).statistics.failures
        assert {reason: count for reason, count in failures.items() if count} == {FailureReason.REJECTED: 1}


def test_requests_in_preparation_count_against_the_queue_on_every_route(
    tmp_path: Path, tiny_repository: Path
) -> None:
    repository = gated(tmp_path, tiny_repository)
    (tmp_path / "gate").touch()
    with (
        LiveServer(repository, max_queue=0) as server,
        httpx2.Client(base_url=server.url, timeout=100) as http,
    ):
        loop = server.model.engine
        with loop.reserve(1):
            assert {http.post(path, json=body).status_code for path, body in ROUTES} == {429}
        for path, body in ROUTES:
            assert http.post(path, json=body).status_code == 200
            wait_until(lambda: loop.num_accepted + loop.num_preparing == 0)


def test_a_running_stream_continues_while_others_are_rejected(impatient: Gated) -> None:
    with impatient.send("/generate", TGI) as client:
        wait_until(lambda: impatient.engine.num_accepted == 2)
        impatient.open_gate()
        assert answer_of(client)[0] == 429
    with impatient.holder.makefile("rb") as file:
        line = file.readline()
        assert line.startswith(b"HTTP/1.1 200 ")
        while b'"finish_reason": "length"' not in line:
            line = file.readline()
            assert b'"error"' not in line


def test_a_disconnect_frees_the_place_in_the_queue(repository: Path) -> None:
    server = Gated(repository)
    try:
        client = server.send("/v1/chat/completions", CHAT | {"stream": True})
        wait_until(lambda: server.engine.num_accepted == 2)
        client.close()
        server.open_gate()
        wait_until(lambda: server.engine.num_accepted == 0)
        registry = server.live.server.services.metrics.registry
        ended = {"model": "tiny", "finished_reason": "abort"}
        assert registry.get_sample_value("genserve_requests_total", ended) == 1
    finally:
        server.close()


def test_waiting_prompts_are_limited_in_tokens_and_reported_as_metrics(repository: Path) -> None:
    server = Gated(repository, max_queue_tokens=40)  # the first one counts until its step is over
    try:
        waiting = server.send("/generate", TGI | {"inputs": "x" * 25})
        wait_until(lambda: server.engine.num_accepted == 2)
        with httpx2.Client(base_url=server.live.url) as http:
            answer = http.post("/generate", json=TGI | {"inputs": "y" * 10})
            check_rejection("/generate", answer.status_code, answer.headers, answer.content)
            waiting.close()
            tasks = server.live.server.server_state.tasks
            wait_until(lambda: len(tasks) == 1)  # the server has noticed that the client has left
            server.open_gate()
            wait_until(lambda: server.engine.num_accepted == 0)
            text = http.get("/metrics").text
        assert 'genserve_admission_rejections_total{model="tiny",reason="max_queue_tokens"} 1.0' in text
        assert 'genserve_num_prompt_tokens_waiting{model="tiny"} 0.0' in text
        assert 'genserve_request_queue_time_seconds_count{model="tiny"} 1.0' in text
    finally:
        server.close()


def triton_request() -> Any:
    text = service_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"tell me")
    return service_pb2.ModelInferRequest(model_name="tiny", inputs=[text])


def check_grpc_rejection(error: Any) -> None:
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1


def test_a_grpc_stream_goes_on_after_a_rejection(full: Gated) -> None:
    with grpc.insecure_channel(full.live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages = [message.error_message for message in stub.ModelStreamInfer(iter([triton_request()] * 2))]
    assert messages == ["1 request is running or waiting; the limit is 1"] * 2


def test_infer_of_a_full_generation_model_is_rejected_over_both_protocols(
    tiny_repository: Path, tmp_path: Path
) -> None:
    folder = gated(tmp_path, tiny_repository)
    config = folder / "tiny" / "config.pbtxt"
    config.write_text(config.read_text().replace("decoupled: true", "decoupled: false"))
    server = Gated(folder, max_queue=0)
    try:
        with httpx2.Client(base_url=server.live.url) as http:
            answer = http.post("/v2/models/tiny/infer", json=INFER)
        check_rejection("/v2/models/tiny/infer", answer.status_code, answer.headers, answer.content)
        with grpc.insecure_channel(server.live.grpc_url) as channel, pytest.raises(grpc.RpcError) as rejected:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(triton_request())
        check_grpc_rejection(rejected.value)
    finally:
        server.close()


def test_openai_python_raises_its_rate_limit_error(full: Gated) -> None:
    with (
        openai.OpenAI(base_url=f"{full.live.url}/v1", api_key="-", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as rejected,
    ):
        client.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True)
    assert rejected.value.code == "overloaded"


def test_huggingface_hub_raises_its_overloaded_error(full: Gated) -> None:
    with pytest.raises(OverloadedError):
        huggingface_hub.InferenceClient(full.live.url).text_generation("tell me", max_new_tokens=4)


def test_our_client_raises_overloaded(full: Gated) -> None:
    with Client(full.live.url, max_retries=0) as client, pytest.raises(Overloaded) as rejected:
        client.generate("tell me")
    assert rejected.value.retry_after_s > 0


def test_a_client_that_retries_after_the_given_time_is_answered(repository: Path) -> None:
    server = Gated(repository, max_queue=0)
    try:
        # The first answer, a rejection, opens the gate.
        hooks = {"response": [lambda _: server.open_gate()]}
        http = httpx2.Client(event_hooks=hooks)
        with openai.OpenAI(base_url=f"{server.live.url}/v1", api_key="-", http_client=http) as client:
            answer = client.completions.create(
                model="tiny", prompt="tell me", max_tokens=4, extra_body={"ignore_eos": True}
            )
        assert answer.usage.completion_tokens == 4
        assert server.rejections("max_queue") >= 1
    finally:
        server.close()


def test_a_stopping_server_is_503_not_429(repository: Path) -> None:
    server = Gated(repository)
    try:
        server.live.server.services.draining = True
        with httpx2.Client(base_url=server.live.url) as http:
            answers = [http.post("/v1/chat/completions", json=CHAT), http.post("/generate", json=TGI)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    finally:
        server.close()
