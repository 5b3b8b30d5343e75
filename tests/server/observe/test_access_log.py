"""The log of a live server: requests and their ends, without their texts."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st

from genserve.errors import InvalidRequest
from genserve.log import LineFormatter, quoted
from genserve.request_context import CURRENT_REQUEST, KeyShare, RequestContext
from genserve.server.observe.access_log import audit, log_request
from tests.server.test_api_server import LONG, LONG_CHAT
from tests.support.command_line import invoke
from tests.support.live_server import LiveServer, line_with, request_bytes, serving, slow_down, wait_until
from tests.support.python_models import write_model

SPEAKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        if x[0] < 0:
            raise ValueError("no\\n2026-01-01 00:00:00,000 ERROR genserve: forged\\x1b[2J")
        pb_utils.Logger.log_warn("mine\\r\\n2026-01-01 00:00:00,000 ERROR genserve: forged\\x1b[2J\\u2028")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for _ in requests]
"""
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) [\w.]+: \S.*|    .*")


class Log:
    """A live server and the file of its log."""

    def __init__(self, server: LiveServer, file: Path) -> None:
        self.server = server
        self.file = file
        self.http = httpx2.Client(base_url=server.url, timeout=60)

    def lines(self, words: str) -> list[str]:
        return [line for line in self.file.read_text().splitlines() if words in line]

    def line(self, words: str) -> str:
        """The only line with these words, which may be written after the response."""
        wait_until(lambda: self.lines(words))
        [line] = self.lines(words)
        return line

    def infer(self, model: str, value: float, **headers: str) -> httpx2.Response:
        tensor = {"name": "X", "datatype": "FP32", "shape": [1], "data": [value]}
        return self.http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]}, headers=headers)


def logged(repository: Path, folder: Path, **settings: Any) -> Iterator[Log]:
    file = folder / "log"
    server = LiveServer(repository, log_file=file, **settings)
    with server, server.server.services.log_settings.written():
        log = Log(server, file)
        with log.http:
            yield log


@pytest.fixture(scope="module")
def generating(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    yield from logged(tiny_repository, tmp_path_factory.mktemp("generating"), max_queue=0)


@pytest.fixture
def speaking(tmp_path: Path) -> Iterator[Log]:
    write_model(tmp_path / "repository", "speaks", code=SPEAKS)
    yield from logged(tmp_path / "repository", tmp_path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "{}", "max_tokens": 3, "stream": True}),
        ("/generate", {"inputs": "{}", "parameters": {"max_new_tokens": 3}}),
        ("/generate_stream", {"inputs": "{}", "parameters": {"max_new_tokens": 3}}),
        ("/v2/models/tiny/generate", {"text_input": "{}", "max_tokens": 3}),
        ("/v2/models/tiny/generate_stream", {"text_input": "{}", "max_tokens": 3, "stream": True}),
    ],
)
def test_a_generation_is_one_line_with_counts_and_without_text(generating, path, body):
    content = json.dumps(body).replace("{}", "swordfish")
    given = f"one-{path.strip('/').replace('/', '-')}"
    headers = {"x-request-id": given, "content-type": "application/json"}
    answer = generating.http.post(path, content=content, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, given)
    line = generating.line(f"[{given}]")
    cost = r"prompt_tokens=[1-9]\d* cached_tokens=\d+ completion_tokens=[123] finish_reason=\w+"
    times = r"queue_s=\d+\.\d{3} prefill_s=\d+\.\d{3} first_token_s=\d+\.\d{3} "
    times += r"(tokens_per_s=\d+\.\d )?seconds=\d+\.\d{3}"
    fields = rf"127\.0\.0\.1:\d+ POST {path} 200 model=tiny {cost} {times}"
    assert re.fullmatch(rf".* INFO genserve\.server\.observe\.access_log: \[{given}\] {fields}", line)
    assert "swordfish" not in generating.file.read_text()


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"n": 1, "best_of": 2, "temperature": 1}, {"n": 2, "use_beam_search": True}]
)
def test_several_answers_are_counted_together(generating, more):
    body = {"prompt": ["a b c", "a b c"], "max_tokens": 2, "ignore_eos": True, **more}
    answer = generating.http.post("/v1/completions", json=body)
    usage = answer.json()["usage"]
    line = generating.line(f"[{answer.headers['x-request-id']}]")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert f" prompt_tokens={usage['prompt_tokens']} cached_tokens={cached} " in line
    assert f" completion_tokens={usage['completion_tokens']} " in line
    assert " finish_reason=length " in line


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("method", "path", "body", "pattern"),
    [
        (
            "POST",
            "/v1/completions",
            {"prompt": "swordfish", "max_tokens": -1},
            "400 .*error=invalid_request field=max_tokens$",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": [{"type": "swordfish"}]},
            r"400 .*error=invalid_request field=tools\[0\].type$",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": MESSAGES, "chat_template_kwargs": {"swordfish": 1}},
            "400 .*error=invalid_request field=chat_template_kwargs$",
        ),
        (
            "POST",
            "/v1/completions",
            {"prompt": "x", "model": "nobody"},
            "404 model=nobody .*=model_not_found",
        ),
        ("POST", "/api/generate", {"prompt": "x", "model": "nobody"}, "404 model=nobody .*=model_not_found"),
        (
            "POST",
            "/v1beta/models/nobody:generateContent",
            {"contents": [{"parts": [{"text": "x"}]}]},
            "404 model=nobody .*=model_not_found",
        ),
        ("POST", "/generate", {"swordfish": 1}, "422 .*error=invalid_request"),
        ("GET", "/nothing?key=swordfish", None, "404 "),
        ("PUT", "/v1/models", None, "405 "),
        ("POST", "/v2/models/nobody/infer", {}, "404 model=nobody .*error=not_found"),
        ("POST", "/v2/models/tiny/generate", {"text_input": "x", "max_tokens": 0}, "400 .*=invalid_request"),
    ],
)
def test_a_rejected_request_is_a_warning_with_id_and_code(generating, method, path, body, pattern):
    answer = generating.http.request(method, path, json=body)
    line = generating.line(f"[{answer.headers['x-request-id']}]")
    plain = path.partition("?")[0]
    assert re.search(rf" WARNING .* {method} {plain} {pattern}", line)
    assert "swordfish" not in generating.file.read_text()


def test_disconnects_and_full_queues_are_logged(generating, monkeypatch):
    slow_down(generating.server, monkeypatch)
    loop = generating.server.model.engine
    clients = []
    for number in range(generating.server.model.max_num_seqs):
        client = socket.create_connection(("127.0.0.1", generating.server.port))
        head, _, rest = request_bytes("/generate_stream", LONG).partition(b"\r\n")
        client.sendall(b"%s\r\nX-Request-Id: leaves-%d\r\n%s" % (head, number, rest))
        clients.append(client)
    wait_until(lambda: loop.num_accepted == len(clients))
    answer = generating.http.post("/v1/chat/completions", json=LONG_CHAT, headers={"x-request-id": "late"})
    assert answer.status_code == 429
    for client in clients:
        client.close()
    assert re.search("WARNING .* 429 model=tiny seconds=.* error=overloaded", generating.line("[late]"))
    assert re.search("INFO .* 200 model=tiny .* finish_reason=abort", generating.line("[leaves-0]"))


def test_probes_scrapes_pages_and_inferences_are_logged_at_the_verbose_level(speaking):
    pages = ("/", "/dashboard", "/page/chat.js")
    paths = ("/health", "/metrics", "/v2/health/live", "/v2/health/ready", "/v2/models/speaks", "/v2", *pages)
    for number in range(2):
        for path in paths:
            assert speaking.http.get(path, headers={"x-request-id": f"quiet-{number}"}).status_code == 200
        assert speaking.infer("speaks", 1, **{"x-request-id": f"quiet-{number}"}).status_code == 200
        speaking.http.post("/v2/logging", json={"log_verbose_level": 1})
    wait_until(lambda: len(speaking.lines("[quiet-1]")) == len(paths) + 1)
    assert not speaking.lines("[quiet-0]")
    speaking.server.server.services.log_settings.update({"log_verbose_level": 0})


def test_kserve_routes_return_the_request_id(speaking):
    assert speaking.infer("speaks", 1, **{"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    made_up = {speaking.http.get("/v2").headers["x-request-id"] for _ in range(3)}
    assert len(made_up) == 3


def test_the_reason_of_a_rejection_is_logged_at_the_verbose_level(speaking):
    for level, id_ in ((0, "short"), (1, "long")):
        speaking.http.post("/v2/logging", json={"log_verbose_level": level})
        speaking.infer("nobody", 1, **{"x-request-id": id_})
    assert "message=" not in speaking.line("[short]")
    assert "message=\"Request for unknown model: 'nobody' is not found\"" in speaking.line("[long]")
    speaking.http.post("/v2/logging", json={"log_verbose_level": 0})


def test_a_level_that_is_switched_off_is_not_logged(speaking):
    speaking.http.post("/v2/logging", json={"log_warning": False})
    speaking.infer("nobody", 1, **{"x-request-id": "unseen"})
    speaking.http.post("/v2/logging", json={"log_warning": True}, headers={"x-request-id": "seen"})
    speaking.line("[seen]")
    assert not speaking.lines("[unseen]")


def test_client_text_cannot_begin_a_line_or_control_a_terminal(speaking):
    forged = "2026-01-01 00:00:00,000 ERROR genserve: forged"
    escapes = "%0d%0a2026-01-01%2000:00:00,000%20ERROR%20genserve:%20forged%1b%5b2J%e2%80%a8%c2%9b"
    speaking.http.get(f"/{escapes}")
    speaking.http.post(f"/v2/models/{escapes}/infer", json={})
    speaking.http.post("/v1/completions", json={"prompt": "x", "model": f"m\n{forged}\x1b[2J\u2028\x00"})
    with socket.create_connection(("127.0.0.1", speaking.server.port)) as client:
        client.sendall(b"GET /raw HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\x9b2J\x85b\r\n")
        client.sendall(b"X-Forwarded-For: \x9b2J\x85b\r\nConnection: close\r\n\r\n")
        client.makefile("rb").read()
    with socket.create_connection(("127.0.0.1", speaking.server.port)) as client:
        client.sendall(b"GET /parsed HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\x1b[2J\r\n\r\n")
        client.makefile("rb").read()
    assert speaking.infer("speaks", 1).status_code == 200
    assert speaking.infer("speaks", -1).status_code == 500
    with triton.InferenceServerClient(speaking.server.grpc_url) as client:
        tensor = triton.InferInput("X", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        with pytest.raises(triton.InferenceServerException):
            client.infer(f"m\n{forged}\x1b", [tensor], request_id=f"i\n{forged}\x1b")
    assert r'"\x9b2J\x85b:0" GET /raw 404' in speaking.line("/raw")
    assert "malformed_request" in speaking.line("GET /parsed 400")
    wait_until(lambda: speaking.lines("ModelInfer NOT_FOUND"))
    text = speaking.file.read_text()
    assert text.count("forged") >= 7
    for line in text.split("\n")[:-1]:
        assert LINE.fullmatch(line)
        assert not line.startswith(forged)
        assert line.isprintable()


VALUE = r'(?:[^\s"]\S*|"(?:[^"\\]|\\.)*")'


@given(client=st.text(), path=st.text(), model=st.text(min_size=1), change=st.text(min_size=1), id_=st.text())
def test_any_request_is_one_line_whose_fields_are_its_own(client, path, model, change, id_):
    """No text from a client begins a line or imitates a field."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(LineFormatter("ISO8601").format(record))
    request = RequestContext(id=id_, model=model, key=KeyShare("ops"), controls=True, change=change)
    request.error = InvalidRequest(change)
    token = CURRENT_REQUEST.set(request)
    audit.addHandler(handler)
    try:
        call = f"POST {quoted(path)}"
        log_request(request, client=client, call=call, status="400", level=logging.WARNING)
    finally:
        audit.removeHandler(handler)
        CURRENT_REQUEST.reset(token)
    [line] = lines
    assert line.isprintable() or not line.isascii()
    assert len(line.splitlines()) == 1
    id_shown = rf"\[{VALUE}\] " if id_ else ""
    fields = " ".join(f"{name}={VALUE}" for name in ("model", "key", "change", "seconds", "error"))
    assert re.fullmatch(rf"\S+Z WARNING genserve\.audit: {id_shown}{VALUE} POST {VALUE} 400 {fields}", line)


def test_the_api_key_is_not_logged_but_requests_without_it_are(tmp_path):
    write_model(tmp_path / "repository", "speaks", code=SPEAKS)
    for log in logged(tmp_path / "repository", tmp_path, api_key="swordfish", log_verbose=1):
        right = {"authorization": "Bearer swordfish"}
        assert log.http.get("/v2", headers=right).status_code == 200
        assert log.http.get("/v2/models/stats", headers={"authorization": "Bearer sword"}).status_code == 401
        assert log.http.get("/v1/models").status_code == 401
        with grpc.insecure_channel(log.server.grpc_url) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"")
        log.line("GET /v2/models/stats 401")
        log.line("GET /v1/models 401")
        log.line("gRPC ModelInfer UNAUTHENTICATED")
        assert "sword" not in log.file.read_text()


def test_grpc_calls_are_logged_like_http_requests(generating):
    text = triton.InferInput("text_input", [1, 1], "BYTES")
    tokens = triton.InferInput("max_tokens", [1, 1], "INT32")
    text.set_data_from_numpy(np.array([[b"swordfish"]], object))
    tokens.set_data_from_numpy(np.array([[3]], np.int32))
    with triton.InferenceServerClient(generating.server.grpc_url) as client:
        assert client.is_server_live()
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("tiny", [text, tokens], request_id="streamed")
        client.async_stream_infer("nobody", [text], request_id="rejected")
        client.stop_stream()
        with pytest.raises(triton.InferenceServerException):
            client.get_model_metadata("nobody")
    with grpc.insecure_channel(generating.server.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/Nonsense")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "Method not found!"
    tokens = r"prompt_tokens=\d+ cached_tokens=\d+ completion_tokens=\d"
    cost = rf"{tokens} finish_reason=\w+ queue_s=\S+ prefill_s=\S+ first_token_s=\S+ .*seconds=\S+"
    assert re.search(f"INFO .* gRPC ModelStreamInfer OK model=tiny {cost}", generating.line("[streamed]"))
    assert re.search("WARNING .* ModelStreamInfer NOT_FOUND model=nobody", generating.line("[rejected]"))
    generating.line("gRPC ModelMetadata NOT_FOUND model=nobody")
    assert "WARNING" in generating.line("Nonsense UNIMPLEMENTED")
    assert not generating.lines("ServerLive")
    assert "swordfish" not in generating.file.read_text()


def test_with_a_log_file_nothing_is_on_stderr(tmp_path):
    file = tmp_path / "log"
    write_model(tmp_path / "repository", "speaks", code=SPEAKS)
    with serving(tmp_path / "repository", f"--log-file={file}", "--log-format=ISO8601") as process:
        url = line_with(process, "Ready at").split()[2]
        assert httpx2.get(f"{url}/v2/logging").json() == {
            "log_file": file.name,
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "ISO8601",
        }
        httpx2.get(f"{url}/nothing")
        process.terminate()
        assert not process.communicate()[1]
    assert process.returncode == 0
    expected = [
        rf"INFO \S+: listening at {url}, gRPC at \S+, metrics at http://\S+/metrics",
        r"INFO \S+: model speaks version 1 is ready, loaded in \d+\.\d s",
        r"INFO \S+: ready: the models were loaded in \d+\.\d s",
        r"WARNING \S+: \[\w{32}\] 127\.0\.0\.1:\d+ GET /nothing 404 .*",
        r"INFO \S+: stopping: no request is running",
        r"INFO \S+: unloaded in \d+\.\d s: speaks version 1",
        r"INFO \S+: stopped",
    ]
    lines = file.read_text().splitlines()
    assert len(lines) == len(expected)
    for line, words in zip(lines, expected, strict=True):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z " + words, line)


def test_without_a_log_file_the_log_is_on_stderr_with_the_reason_of_a_failed_load(tmp_path):
    write_model(tmp_path / "repository", "speaks", code=SPEAKS)
    (tmp_path / "repository" / "broken").mkdir(parents=True)
    (tmp_path / "repository" / "broken" / "config.pbtxt").write_text('backend: "python"\nnonsense: 1\n')
    with serving(tmp_path / "repository", "--log-info=false", "--no-exit-on-error") as process:
        url = line_with(process, "Ready at").split()[2]
        httpx2.get(f"{url}/nothing")
        process.terminate()
        failed, rejected = filter(LINE.fullmatch, process.communicate()[1].splitlines())
    assert re.search(r"ERROR genserve\.repository\.\w+: model broken is not loaded: .*nonsense", failed)
    assert "GET /nothing 404" in rejected


def test_an_unwritable_log_file_ends_startup_with_a_remedy(tmp_path):
    write_model(tmp_path / "repository", "speaks", code=SPEAKS)
    words = [f"--model-repository={tmp_path}/repository", f"--log-file={tmp_path}/none/log", "--http-port=0"]
    ended = invoke(["serve", *words])
    assert ended.exit_code == 1
    assert "remedy: set --log-file" in ended.stderr
