"""Who may call what: every route and gRPC method with no key, a wrong one, an ordinary and a control key."""

from __future__ import annotations

import http.client
import json
import logging
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from genserve import Client
from genserve.errors import GenserveError, Overloaded
from genserve.server.access import watched_files
from genserve.server.access.key_ring import KeyRing
from genserve.server.api_server import Server
from genserve.server.kserve.routes import ROUTES
from genserve.settings import ServerSettings
from tests.support.live_server import LiveServer, line_with, serving, slow_down, wait_until
from tests.support.python_models import write_model

ALICE, BOB, OPS = "canary-alice-5f21", "canary-bob-77c0", "canary-ops-90ab"
KEYS = f"""
[alice]
key = "{ALICE}"
[bob]
key = "{BOB}"
requests_per_minute = 1000
[ops]
key = "{OPS}"
control = true
"""
OPEN = {
    ("GET", "/"), ("GET", "/dashboard"), ("GET", "/docs"), ("GET", "/page/{name:path}"),
    ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"),
    ("GET", "/v2/health/live"), ("GET", "/v2/health/ready"),
}  # fmt: skip
CONTROL = {
    ("POST", "/v2/repository[/{repository}]/models/{model}/load"),
    ("POST", "/v2/repository[/{repository}]/models/{model}/unload"),
    ("POST", "/v2/models/{model}/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/systemsharedmemory[/region/{region}]/register"),
    ("POST", "/v2/systemsharedmemory[/region/{region}]/unregister"),
    ("POST", "/v2/cudasharedmemory[/region/{region}]/register"),
    ("POST", "/v2/cudasharedmemory[/region/{region}]/unregister"),
    ("POST", "/api/pull"), ("POST", "/api/push"), ("POST", "/api/create"), ("POST", "/api/copy"),
    ("DELETE", "/api/delete"), ("POST", "/api/blobs/{digest}"),
    ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
}  # fmt: skip
CONTROL_METHODS = {
    "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    "TraceSetting", "LogSettings",
}  # fmt: skip
REFLECTION = [
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    write_model(root, "one")
    return root


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    return file


class Log:
    """A live server with keys, and the file of its log."""

    def __init__(self, server: LiveServer, file: Path) -> None:
        self.server = server
        self.file = file

    def lines(self, words: str) -> list[str]:
        return [line for line in self.file.read_text().splitlines() if words in line]

    def line(self, id_: str) -> str:
        """The only line of a request, without its time; it may be written after the response."""
        wait_until(lambda: self.lines(f"[{id_}]"))
        [line] = self.lines(f"[{id_}]")
        return line.partition(",")[2][4:]


def logged(repository: Path, file: Path, **settings: Any) -> Iterator[Log]:
    server = LiveServer(repository, log_file=file, **settings)
    with server, server.server.services.log_settings.written():
        yield Log(server, file)


@pytest.fixture(scope="module")
def log(repository: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    file = tmp_path_factory.mktemp("log") / "log"
    explicit = {"model_control_mode": "explicit", "load_model": ("one",)}
    yield from logged(repository, file, api_key_file=key_file, log_verbose=1, **explicit)
    text = file.read_text()
    assert "canary" not in text
    assert "Traceback" not in text


@pytest.fixture
def url(log: Log) -> str:
    return log.server.url


def routes(server: LiveServer) -> set[tuple[str, str]]:
    """Method and path of every route of the application."""
    app: Any = server.server.config.app
    found = {(route.method, route.path) for route in ROUTES}
    for routes in (app.routes, *(each.original_router.routes for each in app.routes if _is_router(each))):
        found |= {(method, each.path) for each in routes if not _is_router(each) for method in each.methods}
    return found


def _is_router(route: Any) -> bool:
    return hasattr(route, "original_router")


def concrete(path: str) -> list[str]:
    """Paths of a route: without and with its optional parts."""
    names = {"model": "one", "version": "1", "region": "r", "repository": "x", "name": "chat.js"}
    paths = {re.sub(r"\[.*?\]", "", path), path.replace("[", "").replace("]", "")}
    return [re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "x"), each) for each in sorted(paths)]


def call(url: str, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.rpartition("/")[2], timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    content = answer.read(10_000)
    connection.close()
    return answer.status, content


def key(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def infer(url: str, value: str, id_: str = "x") -> httpx2.Response:
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}
    headers = {**key(value), "x-request-id": id_}
    return httpx2.post(f"{url}/v2/models/one/infer", json=body, headers=headers)


def test_the_line_of_a_request_names_its_key(log, url):
    for value, id_ in ((ALICE, "a1"), (OPS, "o1"), ("canary", "n1")):
        infer(url, value, id_)
    assert " 200 model=one key=alice " in log.line("a1")
    assert " 200 model=one key=ops " in log.line("o1")
    assert re.search(r" 401 seconds=\S+ error=unauthenticated", log.line("n1"))
    with triton.InferenceServerClient(log.server.grpc_url) as client:
        tensor = triton.InferInput("X", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        client.infer("one", [tensor], request_id="g1", headers=key(ALICE))
        client.start_stream(lambda result, error: None, headers=key(BOB))
        client.async_stream_infer("one", [tensor], request_id="g2")
        client.stop_stream()
    assert " gRPC ModelInfer OK model=one key=alice " in log.line("g1")
    assert " gRPC ModelStreamInfer OK model=one key=bob " in log.line("g2")


def test_the_audit_log_says_who_did_what_from_where_and_how_it_ended(log, url):
    """Over both protocols, in lines that no client can switch off."""
    off = {"log_info": False, "log_warning": False, "log_verbose_level": 0}
    load = "/v2/repository/models/one/load"
    for path, body, value, id_ in (
        ("/v2/logging", off, OPS, "c1"),
        (load, {"parameters": {"config": '{"max_batch_size": 0}'}}, OPS, "c2"),
        ("/v2/repository/models/no%0aone/unload", {"parameters": {"unload_dependents": True}}, OPS, "c3"),
        (load, {}, ALICE, "c4"),
        (load, {}, "canary", "c5"),
        ("/v2/systemsharedmemory/region/r/register", {"key": "/k", "byte_size": 8}, OPS, "c6"),
        ("/api/create", {}, ALICE, "c7"),
        ("/v2/trace/setting", {"log_frequency": "5"}, OPS, "c8"),
    ):
        httpx2.post(url + path, json=body, headers={**key(value), "x-request-id": id_})
    with triton.InferenceServerClient(log.server.grpc_url) as client:
        client.load_model("one", headers=key(OPS))
        for value in (ALICE, "canary"):
            with pytest.raises(triton.InferenceServerException):
                client.unload_model("one", headers=key(value))
        client.update_log_settings({"log_warning": True}, headers=key(OPS))
    before = r"(INFO|WARNING) genserve\.audit: \[\w+\] 127\.0\.0\.1:\d+ "
    changed = '"log_info=False, log_warning=False, log_verbose_level=0"'
    for id_, words in {
        "c1": f"POST /v2/logging 200 key=ops change={changed} seconds=",
        "c2": f"POST {load} 200 model=one key=ops change=config seconds=",
        "c3": r'POST "/v2/repository/models/no\\none/unload" .* key=ops change="with its dependents" ',
        "c4": f"POST {load} 403 key=alice seconds=.* error=forbidden",
        "c5": f"POST {load} 401 seconds=.* error=unauthenticated",
        "c6": "POST /v2/systemsharedmemory/region/r/register 501 key=ops ",
        "c7": "POST /api/create 403 key=alice ",
        "c8": "POST /v2/trace/setting 200 key=ops change=log_frequency=5 ",
    }.items():
        assert re.match(before + words, log.line(id_)), log.line(id_)
    wait_until(lambda: log.lines(" change=log_warning=True "))  # the last line, written after the response
    calls = [line.partition("audit: ")[2] for line in log.lines("genserve.audit: ") if " gRPC Repo" in line]
    assert re.fullmatch(r"\S+ gRPC RepositoryModelLoad OK model=one key=ops seconds=\S+", calls[-3])
    assert re.search(r"gRPC RepositoryModelUnload PERMISSION_DENIED key=alice .*error=forbidden", calls[-2])
    assert re.search(r"gRPC RepositoryModelUnload UNAUTHENTICATED seconds=.*error=unauthenticated", calls[-1])
    [last] = log.lines("LogSettings OK")[-1:]
    assert " key=ops change=log_warning=True " in last
    httpx2.post(f"{url}/v2/logging", json={"log_info": True, "log_verbose_level": 1}, headers=key(OPS))


def test_every_route_needs_a_key_except_probes_and_pages(log, url):
    """The routes come from the application, so a new one cannot be forgotten."""
    found = routes(log.server)
    assert found >= OPEN | CONTROL
    assert len(found) > 60
    for method, route in found:
        if method == "OPTIONS":
            continue
        shown = "GET" if method == "HEAD" else method
        for path in concrete(route):
            for headers in ({}, key("canary"), key(ALICE[:-1]), {"x_api_key": "canary"}):
                status = call(url, method, path, **headers)[0]
                assert (status != 401) == ((shown, route) in OPEN), (method, path, status)


def test_control_routes_need_a_control_key_and_others_any_key(log, url):
    for method, route in routes(log.server):
        if method == "OPTIONS" or route.endswith("/unload"):
            continue
        for path in concrete(route):
            status, content = call(url, method, path, **key(ALICE))
            assert (status == 403) == ((method, route) in CONTROL), (method, path, status, content)
            assert status != 401, (method, path)
            if (method, route) in CONTROL:
                assert b"may not change the server" in content
                assert call(url, method, path, **key(OPS))[0] not in (401, 403), (method, path)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1/models/", "/V1/models", "/%76%31/models", "/v1/./models", "/v2/../v1/models",
        "/health/../v1/models", "/page/../v1/models", "/page/%2e%2e/v1/models", "/page/..%2f..%2fapp.py",
        "/docs/../metrics", "/health/", "/health;x", "/ping/../metrics", "/v2/health/live/../../models/stats",
        "/v2/models/one%2fconfig", "/metrics?x=/health", "/metrics#/health", "/v1/models%00/health",
        "http://localhost/metrics", "/v2//models/stats", "/v2/models/stats/",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_opens_it(log, url, path):
    connection = http.client.HTTPConnection(url.rpartition("/")[2], timeout=60)
    connection.putrequest("GET", path)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status in (400, 401, 403, 404), content[:200]
    for secret in (b'"data"', b"genserve_", b"nv_", b"model_stats", b"import "):
        assert secret not in content


CREDENTIALS = {
    "none": ({}, 401),
    "empty": ({"authorization": ""}, 401),
    "no-scheme": ({"authorization": ALICE}, 401),
    "basic": ({"authorization": f"Basic {ALICE}"}, 401),
    "two-in-one": ({"authorization": f"Bearer {ALICE},{BOB}"}, 401),
    "name-for-key": ({"authorization": "Bearer alice"}, 401),
    "not-ascii": ({"authorization": "Bearer \xe4\xff"}, 401),
    "long": ({"authorization": "Bearer " + "x" * 30_000}, 401),
    "lower-case": ({"authorization": f"bearer {ALICE}"}, 200),
    "blanks": ({"authorization": f"Bearer  {ALICE} "}, 200),
    "x-api-key": ({"x_api_key": ALICE}, 200),
    "one-is-right": ({"x_api_key": "canary", "authorization": f"Bearer {ALICE}"}, 200),
}


@pytest.mark.parametrize("form", CREDENTIALS)
def test_credentials_of_all_forms(url, form):
    headers, status = CREDENTIALS[form]
    found = call(url, "GET", "/v2", **headers)[0]
    assert found == status or (form == "long" and found == 431)


def test_every_grpc_method_needs_a_key_and_some_a_control_key(log):
    [service] = service_pb2.DESCRIPTOR.services_by_name.values()
    with grpc.insecure_channel(log.server.grpc_url) as channel:
        for method in service.methods:
            request = _request(method)
            for headers in ({}, key("canary"), key(ALICE[:-1])):
                error = _error_of(channel, method, request, headers)
                assert error is not None, method.name
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED, method.name
            for value, is_allowed in ((ALICE, method.name not in CONTROL_METHODS), (OPS, True)):
                error = _error_of(channel, method, request, key(value))
                code = error.code() if error else None
                rejected = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
                assert (code not in rejected) == is_allowed, (method.name, value, code)
        for name in (*REFLECTION, "/no.Such/Method"):
            error = _failure(channel.stream_stream(name), iter([b""]), {})
            assert error is not None
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        for name in REFLECTION:
            assert _failure(channel.stream_stream(name), iter([b""]), key(ALICE)) is None
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health_pb2.HealthCheckResponse.FromString(health(b"")).status


def test_settings_can_be_read_over_grpc_without_a_control_key(log):
    with triton.InferenceServerClient(log.server.grpc_url) as client:
        assert client.get_log_settings(headers=key(ALICE)).settings
        assert client.get_trace_settings(headers=key(ALICE)).settings
        with pytest.raises(triton.InferenceServerException) as caught:
            client.update_log_settings({"log_info": False}, headers=key(ALICE))
        assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
        assert client.get_log_settings(headers=key(OPS)).settings["log_info"].bool_param


def _request(method: Any) -> Any:
    """A request that is valid for the model, and changes something in methods about settings."""
    request = message_factory.GetMessageClass(method.input_type)()
    for name in ("name", "model_name"):
        if name in method.input_type.fields_by_name and "SharedMemory" not in method.name:
            setattr(request, name, "one")
    if method.name == "LogSettings":
        request.settings["log_verbose_level"].uint32_param = 1
    if method.name == "TraceSetting":
        request.model_name = ""
        request.settings["log_frequency"].value.append("1")
    if method.name == "RepositoryModelUnload":
        request.model_name = "no-such-model"
    return request


def _error_of(channel: Any, method: Any, request: Any, headers: dict[str, str]) -> grpc.RpcError | None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    write = method.input_type._concrete_class.SerializeToString
    return _failure(channel.stream_stream(path, request_serializer=write), iter([request]), headers)


def _failure(call: Any, messages: Iterator[Any], headers: dict[str, str]) -> grpc.RpcError | None:
    try:
        for _ in call(messages, metadata=tuple(headers.items()), timeout=60):
            pass
    except grpc.RpcError as error:
        return error
    return None


LIMITED = """
[carol]
key = "canary-carol-1188"
requests_per_minute = 3
[dave]
key = "canary-dave-4a4a"
concurrent_requests = 1
[openai]
key = "canary-openai-0b0b"
tokens_per_minute = 10
[kserve]
key = "canary-kserve-0b0b"
tokens_per_minute = 10
[grpc]
key = "canary-grpc-0b0b"
tokens_per_minute = 10
concurrent_requests = 1
[free]
key = "canary-free-ffff"
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def limited(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(LIMITED)
    with LiveServer(tiny_repository, api_key_file=file) as server:
        yield server


def chat(server: LiveServer, value: str) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=key(value))


def test_requests_per_minute_are_limited_on_every_face_and_for_this_key_alone(limited):
    carol = key("canary-carol-1188")
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v2/models/tiny/generate", {"text_input": "hi", "max_tokens": 2}),
        ("/api/generate", {"model": "tiny", "prompt": "hi", "options": {"num_predict": 2}}),
    ):
        assert httpx2.post(limited.url + path, json=body, headers=carol).status_code == 200
    for path in ("/v1/chat/completions", "/v2/models/tiny/infer", "/generate", "/v1/messages", "/tokenize"):
        answer = httpx2.post(limited.url + path, json={}, headers=carol)
        assert answer.status_code == 429, path
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert 0 < int(answer.headers["retry-after-ms"]) <= 20_000
        assert "3 requests per minute" in answer.text
    assert chat(limited, "canary-carol-1188").json()["error"]["code"] == "rate_limited"
    with Client(limited.url, api_key="canary-carol-1188", max_retries=0) as client:
        with pytest.raises(Overloaded) as caught:
            client.generate("hi")
        assert caught.value.code == "rate_limited"
        assert 0 < caught.value.retry_after_s <= 20
        assert client.models()
    with triton.InferenceServerClient(limited.grpc_url) as client:
        errors: list[Any] = []
        client.start_stream(lambda result, error: errors.append(error), headers=carol)
        client.async_stream_infer("tiny", tensors("hi", max_tokens=2))
        client.stop_stream()
        assert "3 requests per minute" in errors[0].message()
    with grpc.insecure_channel(limited.grpc_url) as channel:
        stub = triton.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="tiny"), metadata=tuple(carol.items()))
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < int(dict(raised.value.trailing_metadata())["grpc-retry-pushback-ms"]) <= 20_000
    for value in ("canary-free-ffff", "canary-dave-4a4a"):
        assert chat(limited, value).status_code == 200


LONG_PROMPT = "one two three " * 20


def tensors(prompt: str, *, max_tokens: int) -> list[triton.InferInput]:
    text = triton.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[prompt.encode()]], object))
    length = triton.InferInput("max_tokens", [1, 1], "INT32")
    length.set_data_from_numpy(np.array([[max_tokens]], np.int32))
    return [text, length]


def test_tokens_per_minute_count_prompts_and_answers_on_every_face(limited):
    generate = {"text_input": LONG_PROMPT, "max_tokens": 1}
    for path, body, value in (
        ("/v1/chat/completions", CHAT, "canary-openai-0b0b"),
        ("/v2/models/tiny/generate", generate, "canary-kserve-0b0b"),
    ):
        first, second = (httpx2.post(limited.url + path, json=body, headers=key(value)) for _ in range(2))
        assert (first.status_code, second.status_code) == (200, 429), first.text
        assert "10 tokens per minute" in second.text
        assert int(second.headers["retry-after"]) >= 6 * 6    # at least 16 tokens were used of 10
    errors: list[Any] = []
    with triton.InferenceServerClient(limited.grpc_url) as client:
        for _ in range(2):
            headers = {"x-api-key": "canary-grpc-0b0b"}
            client.start_stream(lambda result, error: errors.append(error), headers=headers)
            client.async_stream_infer("tiny", tensors(LONG_PROMPT, max_tokens=1))
            client.stop_stream()
    assert errors[0] is None
    assert "10 tokens per minute" in errors[-1].message()


def counts_running(keys: KeyRing) -> bool:
    return any(usage._running for usage in keys.usages.values())


def test_a_cancelled_grpc_stream_is_no_concurrent_request(limited, monkeypatch):
    slow_down(limited, monkeypatch)
    keys = limited.server.services.keys
    for _ in range(3):
        with triton.InferenceServerClient(limited.grpc_url) as client:
            client.start_stream(lambda result, error: None, headers=key("canary-dave-4a4a"))
            client.async_stream_infer("tiny", tensors("hi", max_tokens=200))
            wait_until(lambda: counts_running(keys))
            client.stop_stream(cancel_requests=True)
        wait_until(lambda: not counts_running(keys))


def test_a_concurrent_request_ends_with_its_stream_or_its_client(limited, monkeypatch):
    slow_down(limited, monkeypatch)
    body = {**CHAT, "max_tokens": 200, "stream": True}
    for _ in range(2):
        with httpx2.stream(
            "POST", f"{limited.url}/v1/chat/completions", json=body, headers=key("canary-dave-4a4a")
        ) as stream:
            assert stream.status_code == 200
            chunks = stream.iter_bytes()    # whose end would close the stream
            next(chunks)
            rejected = chat(limited, "canary-dave-4a4a")
            assert rejected.status_code == 429
            assert "1 concurrent requests" in rejected.text
            assert chat(limited, "canary-free-ffff").status_code == 200
        wait_until(lambda: chat(limited, "canary-dave-4a4a").status_code == 200)
    wait_until(lambda: not counts_running(limited.server.services.keys))


def test_a_limit_of_one_request_at_a_time_suits_a_client_that_waits_for_each_answer(limited):
    body = {**CHAT, "max_tokens": 1}
    with httpx2.Client(base_url=limited.url, headers=key("canary-dave-4a4a")) as http:
        for number in range(100):
            answer = http.post("/v1/chat/completions", json={**body, "stream": number % 2 == 0})
            assert answer.status_code == 200


def test_a_changed_file_of_keys_applies_while_requests_run(repository, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watched_files, "_INTERVAL_S", 0.02)
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    with LiveServer(repository, api_key_file=file) as server, httpx2.Client(base_url=server.url) as http:
        kept = http.get("/v2", headers=key(ALICE))
        assert kept.status_code == 200
        file.write_text(f'[bob]\nkey = "{BOB}"\n[new]\nkey = "canary-new"\n')
        wait_until(lambda: infer(server.url, "canary-new").status_code == 200)
        assert http.get("/v2", headers=key(ALICE)).status_code == 401      # on a connection that is open
        assert http.get("/v2", headers=key(BOB)).status_code == 200
        with triton.InferenceServerClient(server.grpc_url) as client:
            assert client.is_server_live(headers=key("canary-new"))
            with pytest.raises(triton.InferenceServerException) as caught:
                client.is_server_live(headers=key(ALICE))
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        assert httpx2.get(server.info.metrics_url, headers=key("canary-new")).status_code == 200
        assert httpx2.get(server.info.metrics_url, headers=key(ALICE)).status_code == 401
        file.write_text("[broken")
        wait_until(lambda: "the API keys are unchanged" in caplog.text)
        assert infer(server.url, "canary-new").status_code == 200
    assert "canary" not in caplog.text


def test_a_limit_that_comes_with_a_request_lets_go_of_it(repository, tmp_path, monkeypatch):
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    with LiveServer(repository, api_key_file=file) as server:
        keys = server.server.services.keys
        find = keys.find

        def find_in_new_file(candidates):
            file.write_text(f'[alice]\nkey = "{ALICE}"\nconcurrent_requests = 1\n')
            keys.reload()
            return find(candidates)

        file.write_text(f'[alice]\nkey = "{ALICE}"\n')
        keys.reload()
        monkeypatch.setattr(keys, "find", find_in_new_file)
        assert [infer(server.url, ALICE).status_code for _ in range(2)] == [200, 200]


def test_a_control_key_alone_leaves_other_requests_open(repository):
    with LiveServer(repository, control_key=OPS) as server:
        assert infer(server.url, "anything").status_code == 200
        for headers, status in (({}, 401), (key("canary"), 401), (key(OPS), 200)):
            answer = httpx2.post(f"{server.url}/v2/logging", json={"log_info": True}, headers=headers)
            assert answer.status_code == status
        with triton.InferenceServerClient(server.grpc_url) as client:
            assert client.is_server_live()
            with pytest.raises(triton.InferenceServerException) as caught:
                client.update_log_settings({"log_info": True})
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
            client.update_log_settings({"log_info": True}, headers=key(OPS))


def test_a_public_address_needs_more_than_a_control_key(repository, key_file):
    public = {"model_repository": (repository,), "host": "0.0.0.0", "http_port": 0}
    with pytest.raises(GenserveError, match=r"--host 0\.0\.0\.0") as caught:
        Server(ServerSettings(**public, control_key=OPS))
    assert "--api-key-file" in caught.value.remedy
    Server(ServerSettings(**public, api_key_file=key_file))


def test_a_key_is_in_no_output_of_the_command(repository, tmp_path, monkeypatch):
    """Neither in what it prints and logs at the most verbose level, nor in answers, nor in its flags."""
    file, log = tmp_path / "keys.toml", tmp_path / "log"
    main, control = "canary-main-2d2d", "canary-control-3e3e"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    monkeypatch.setenv("GENSERVE_CONTROL_KEY", control)
    flags = (f"--api-key-file={file}", "--log-verbose=1", "--model-control-mode=explicit", "--load-model=one")
    with log.open("wb") as errors, serving(repository, *flags, key=main, stderr=errors) as process:
        url = line_with(process, "Ready at").split()[2]
        grpc_address = line_with(process, "over gRPC at").split()[-1]
        metrics_url = line_with(process, "Metrics at").split()[-1]
        seen = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        for value in (main, control, ALICE, f"{ALICE}-wrong"):
            for method, path in (
                ("GET", "/v2"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/v2/models/none"),
                ("POST", "/v2/models/one/infer"), ("POST", "/v2/repository/models/one/load"), ("POST", "/"),
            ):  # fmt: skip
                answer = httpx2.request(method, url + path, headers=key(value), json={"key": 1})
                seen += answer.content + str(answer.headers).encode()
            seen += httpx2.get(metrics_url, headers=key(value)).content
            with grpc.insecure_channel(grpc_address) as channel:
                call = channel.stream_stream("/no/Method")
                seen += str(_failure(call, iter([b""]), key(value))).encode()
        file.write_text(f'[alice]\nkey = "{ALICE}"\n[bob]\nkey = "{ALICE}"\n')
        wait_until(lambda: "alice and bob are the same" in log.read_text())
        process.terminate()
        seen += process.communicate(timeout=60)[0].encode()
    seen += log.read_bytes()
    assert b" key=alice " in seen
    assert b"canary" not in seen


BODIES = {
    "empty": b"",
    "cut": b'{"prompt": "',
    "unknown-fields": b'{"__class__": 1, "path": "/etc/passwd"}',
    "wrong-types": b'{"model": [], "prompt": {}, "messages": 5, "inputs": "x", "parameters": 1, "input": -1}',
}


@pytest.mark.parametrize("body", BODIES)
def test_no_error_of_any_route_shows_what_the_server_is_made_of(server, log, body):
    """Neither paths, nor tracebacks, nor classes: `exchange` looks for them."""
    content = BODIES[body]
    for method, route in sorted(routes(log.server)):
        path = concrete(route.replace("{model}", "nobody"))[-1]
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        answer = server.exchange(
            f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content, method=method
        )
        # A load of a model that is not there is Triton's 500.
        assert answer.status != 500 or path.endswith("/load"), (method, path)
        assert answer.status != 0, (method, path)


def test_the_series_of_the_metrics_stay_the_same_whatever_clients_send(server):
    """A scanner must not fill the memory of the server and of Prometheus."""
    rng = random.Random(7)

    def send_some(number: int) -> None:
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = triton.service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(number):
                word = "".join(rng.choices("abcxyz/%.-{}\"'", k=12))
                path = quote(word, safe="/%.-")
                for method in ("GET", "POST", "PROPFIND"):
                    for each in (f"/{path}", f"/v2/models/{path}/infer", "/v1/completions"):
                        body = {"model": word, "prompt": "hi", "user": word} if method == "POST" else {}
                        server.exchange(_request_bytes(method, each, body, word), method=method)
                with suppress(grpc.RpcError):
                    stub.ModelInfer(service_pb2.ModelInferRequest(model_name=word, id=word))

    def series() -> set[str]:
        return {line.rpartition(" ")[0] for line in server.get("/metrics").body.decode().splitlines()}

    send_some(2)
    before = series()
    send_some(40)
    assert series() - before == set()


def _request_bytes(method: str, path: str, body: dict[str, Any], word: str) -> bytes:
    content = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}X-Request-Id: {quote(word)}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
