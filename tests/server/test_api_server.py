"""The life of a server: readiness, disconnects, overload, keys, draining."""

from __future__ import annotations

import json
import signal
import socket
import threading

import httpx2
import pytest

from genserve.errors import GenserveError, InvalidRequest, ModelNotFound, RepositoryError
from genserve.server.api_server import Server
from genserve.settings import ServerSettings
from tests.support.live_server import LiveServer, line_with, request_bytes, serving, slow_down, wait_until
from tests.support.python_models import write_model

FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}


LONG = {"inputs": "tell me", "parameters": {"max_new_tokens": 200, "ignore_eos": True}}
LONG_CHAT = {
    "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": 200,
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    ("path", "body", "reads_first"),
    [
        ("/generate_stream", LONG, True),
        ("/v1/chat/completions", LONG_CHAT | {"stream": True}, True),
        ("/generate", LONG, False),
        ("/v1/chat/completions", LONG_CHAT, False),
    ],
)
def test_a_disconnect_frees_the_slot_within_two_steps(tiny_server, monkeypatch, path, body, reads_first):
    slow_down(tiny_server, monkeypatch)
    loop = tiny_server.model.engine
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as client:
        client.sendall(request_bytes(path, body))
        if reads_first:
            while b"data:" not in client.recv(65536):
                pass
        else:
            # The server begins to watch the client after 50 ms: ten steps last twice as long.
            begun = loop.num_steps
            wait_until(lambda: loop.num_steps >= begun + 10)
        before = loop.num_steps
    wait_until(lambda: loop.num_accepted == 0)
    # One step may be under way when the connection closes, one may start before the event loop hears of it.
    assert loop.num_steps - before <= 2
    assert loop.num_running == 0


def test_health_and_metrics_report_the_model(tiny_server):
    with httpx2.Client(base_url=tiny_server.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.head("/health").status_code == 200
        http.post("/generate", json={"inputs": "hi", "parameters": {"max_new_tokens": 4}})
        text = http.get("/metrics").text
    assert 'genserve_generation_tokens_total{model="tiny"}' in text
    assert 'genserve_requests_total{finished_reason="length",model="tiny"}' in text
    assert 'genserve_time_to_first_token_seconds_count{model="tiny"}' in text


def test_with_an_api_key_only_the_health_check_is_open(tiny_repository):
    with LiveServer(tiny_repository, api_key="secret") as server, httpx2.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == http.post("/ping").status_code == 200
        assert http.get("/v1/models").status_code == http.get("/tokenizer_info").status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_an_api_key_that_no_header_can_hold_is_rejected_at_startup(tiny_repository):
    with pytest.raises(InvalidRequest) as caught:
        Server(ServerSettings(model_repository=(tiny_repository,), api_key="schlüssel", **FREE_PORTS))
    assert caught.value.field == "api_key"


def test_a_running_stream_ends_normally_while_the_server_drains(tiny_repository, monkeypatch):
    with LiveServer(tiny_repository) as server:
        slow_down(server, monkeypatch)
        answer = read_in_thread(server, LONG_CHAT | {"stream": True, "max_tokens": 60})
        wait_until(lambda: server.model.engine.num_running == 1)
        server.stop()
        text = answer()
    assert '"finish_reason": "length"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(tiny_repository, monkeypatch):
    with LiveServer(tiny_repository, drain_s=0.2) as server:
        slow_down(server, monkeypatch)
        answer = read_in_thread(server, LONG_CHAT | {"stream": True})
        wait_until(lambda: server.model.engine.num_running == 1)
        server.stop()
        text = answer()
    assert '"error": {"message"' in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.fixture
def hang_up():
    """SIGHUP with its default action, which child processes inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.extended  # test_access_log.py has SIGTERM, and test_stopping.py Ctrl-C
@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_stops_the_server_gracefully(tiny_repository, signal_name):
    with serving(tiny_repository) as process:
        line_with(process, "Ready at")
        process.send_signal(getattr(signal, signal_name))
        log = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert "stopping: no request is running" in log


def test_a_second_sigterm_skips_the_drain_and_a_second_sighup_does_not(tiny_repository, hang_up):
    server = Server(ServerSettings(model_repository=(tiny_repository,)))
    with server.capture_signals():
        for _ in range(2):
            signal.raise_signal(hang_up)  # from the shell, and from the kernel
        assert (server.should_exit, server.force_exit) == (True, False)
        signal.raise_signal(signal.SIGTERM)
        assert server.force_exit
    assert signal.getsignal(hang_up) is signal.SIG_DFL


def test_under_nohup_sighup_is_ignored(tiny_repository, hang_up):
    server = Server(ServerSettings(model_repository=(tiny_repository,)))
    signal.signal(hang_up, signal.SIG_IGN)
    with server.capture_signals():
        signal.raise_signal(hang_up)
    assert not server.should_exit


STUCK = """
import time

class TritonPythonModel:
    def execute(self, requests):
        print("EXECUTING", flush=True)
        while True:
            time.sleep(1)
"""
ASKED = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}


@pytest.mark.extended  # tests/faults/test_stopping_faults.py has one beside streams
@pytest.mark.parametrize(
    ("drain_s", "signals", "codes"),
    # Signals that arrive together are handled in any order.
    [(0.1, [signal.SIGTERM], {0}), (60, [signal.SIGTERM, signal.SIGINT], {130, 143})],
)
def test_a_hanging_model_does_not_keep_the_server_running(tmp_path, drain_s, signals, codes):
    write_model(tmp_path, "stuck", code=STUCK)
    with serving(tmp_path, f"--drain-s={drain_s}") as process:
        url = line_with(process, "Ready at").split()[2]
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(request_bytes("/v2/models/stuck/infer", ASKED))
            line_with(process, "EXECUTING")
            for number in signals:
                process.send_signal(number)
            if len(signals) == 1:
                answer = client.makefile("rb").read()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])
            process.wait(timeout=30)
    assert process.returncode in codes


def test_a_hanging_load_does_not_keep_the_server_running(tmp_path):
    write_model(
        tmp_path,
        "endless",
        code="""
            import time

            class TritonPythonModel:
                def initialize(self, args):
                    print("LOADING", flush=True)
                    while True:
                        time.sleep(1)
        """,
    )
    with serving(tmp_path, "--drain-s=0") as process:
        line_with(process, "LOADING")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


TALKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("to everybody")
        pb_utils.Logger.log_verbose("to the curious")
"""


@pytest.mark.extended
@pytest.mark.parametrize("verbose", [0, 1])
def test_the_output_of_a_model_is_logged(tmp_path, verbose):
    write_model(tmp_path, "talks", code=TALKS)
    with serving(tmp_path, f"--log-verbose={verbose}") as process:
        line_with(process, "Ready at")
        process.terminate()
        log = process.communicate()[1]
    assert "to everybody" in log
    assert ("to the curious" in log) is bool(verbose)


def test_a_taken_port_is_an_error_with_a_remedy(tiny_repository):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(ServerSettings(model_repository=(tiny_repository,), http_port=port))
        with pytest.raises(GenserveError, match=f"{port}.*--http-port"):
            server.serve_until_stopped()


def test_an_address_of_another_machine_is_rejected_with_the_flag(tiny_repository):
    settings = ServerSettings(
        model_repository=(tiny_repository,), host="192.0.2.1", http_port=0, allow_unauthenticated=True
    )
    server = Server(settings)
    with pytest.raises(GenserveError) as caught:
        server.serve_until_stopped()
    assert caught.value.message.count("192.0.2.1") == 1  # Python's own message repeats the address
    assert "--host" in caught.value.remedy


def test_a_server_without_a_model_does_not_start(tmp_path):
    with pytest.raises(RepositoryError) as caught:
        Server(ServerSettings(model_repository=(tmp_path,), **FREE_PORTS))
    assert f"genserve serve smollm2 --model-repository {tmp_path}`" in caught.value.remedy
    with pytest.raises(RepositoryError) as caught:
        Server(ServerSettings(model_repository=(tmp_path / "none",), **FREE_PORTS))
    assert f"genserve pull smollm2 --model-repository {tmp_path / 'none'}`" in caught.value.remedy


def test_a_missing_model_to_load_is_named(tiny_repository):
    settings = ServerSettings(model_repository=(tiny_repository,), load_model=("nobody",), **FREE_PORTS)
    server = Server(settings)
    with pytest.raises(ModelNotFound, match="nobody"):
        server.serve_until_stopped()


def read_in_thread(server: LiveServer, body: dict):
    texts = []

    def read() -> None:
        with httpx2.Client(base_url=server.url, timeout=60) as http:
            texts.append(http.post("/v1/chat/completions", json=body).text)

    thread = threading.Thread(target=read)
    thread.start()

    def text() -> str:
        thread.join()
        return texts[0]

    return text


def test_absurd_numbers_in_a_request_are_400(tiny_server):
    most = 10**18
    routes = {
        "/v1/completions": [
            {"model": "tiny", "prompt": "a", **absurd}
            for absurd in (
                {"n": most},
                {"best_of": most},
                {"logprobs": most},
                {"stop_token_ids": [most]},
                {"logit_bias": {str(most): 1}},
                {"logit_bias": {str(index): 1 for index in range(200_000)}},
                {"prompt": [most]},
            )
        ],
        "/v2/models/tiny/generate": [
            {"text_input": "a", name: most} for name in ("max_tokens", "min_tokens", "top_k", "beam_width")
        ],
    }
    for route, bodies in routes.items():
        for body in bodies:
            answer = httpx2.post(f"{tiny_server.url}{route}", json=body, timeout=60)
            assert answer.status_code == 400, answer.text
