"""Signals while the server works: each answer gets its proper end, and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.faults.shared_server import SharedServer, faults_repository, read_response
from tests.support.live_server import line_with, parents, serving, wait_until
from tests.support.python_models import CONFIG, write_model

# Never returns, and has started another process.
BUSY = """
import subprocess

class TritonPythonModel:
    def execute(self, requests):
        subprocess.Popen(["sleep", "86124"])
        print("BUSY", flush=True)
        while True:
            pass
"""
PROCESS = 'parameters { key: "EXECUTION" value { string_value: "process" } }'
ASKED = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}
# Greedy: this text has no end-of-sequence token, which Anthropic's dialect cannot ignore.
CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": 230, "temperature": 0,
}  # fmt: skip
# Streams that outlast the drain, and what the last event of each begins with.
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (CHAT | {"ignore_eos": True, "stream": True}, "data: [DONE]"),
    "/v1/completions": (
        {"model": "tiny", "prompt": "a", "max_tokens": 230, "ignore_eos": True, "stream": True},
        "data: [DONE]",
    ),
    "/v1/messages": (CHAT | {"stream": True}, "event: error"),
    "/generate_stream": (
        {"inputs": "a", "parameters": {"max_new_tokens": 230, "ignore_eos": True}},
        'data: {"error"',
    ),
}


@pytest.fixture(scope="module")
def repository(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = faults_repository(tiny_repository, tmp_path_factory.mktemp("stopping") / "repository", models=())
    write_model(root, "busy", code=BUSY, config=CONFIG + PROCESS)
    write_model(root, "add")
    return root


class Call(threading.Thread):
    """A request whose answer is read to its end."""

    def __init__(self, host: str, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.path = path
        self.status = 0
        self.text = b""
        self.cut = False
        self._connection = http.client.HTTPConnection(host, timeout=60)
        self._body = body
        self.start()

    def run(self) -> None:
        headers = {"content-type": "application/json"}
        try:
            self._connection.request("POST", self.path, json.dumps(self._body), headers)
            answer = self._connection.getresponse()
            self.status = answer.status
            while chunk := answer.read1():
                self.text += chunk
        except (OSError, http.client.HTTPException):
            self.cut = True
        finally:
            self._connection.close()

    @property
    def last_event(self) -> str:
        return self.text.decode().rstrip("\n").rpartition("\n\n")[2]


class GrpcStream(threading.Thread):
    """A stream of requests over gRPC, whose answers are read to the end.

    Attributes:
        answers: `ModelStreamInferResponse` messages.
        code: the status at the end.
    """

    def __init__(self, address: str, *messages: Any, more: bool) -> None:
        """Send the messages; with `more`, keep the stream open for more of them."""
        super().__init__()
        self.answers: list[Any] = []
        self.code = grpc.StatusCode.OK
        self._address = address
        self._messages = messages
        self._ended = threading.Event()
        if not more:
            self._ended.set()
        self.start()

    def _send(self) -> Iterator[Any]:
        yield from self._messages
        self._ended.wait()

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            try:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                self.answers.extend(stub.ModelStreamInfer(self._send(), timeout=60))
            except grpc.RpcError as error:
                self.code = error.code()
            finally:
                self._ended.set()


def text_message() -> service_pb2.ModelInferRequest:
    """Return a request for a stream that outlasts the drain."""
    message = service_pb2.ModelInferRequest(model_name="tiny")
    words = message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    words.contents.bytes_contents.append(b"tell me")
    message.inputs.add(name="stream", datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(True)
    for name in ("max_tokens", "min_tokens"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 1]).contents.int_contents.append(230)
    return message


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have started."""
    known, found = parents(), {pid}
    while new := {child for child, parent in known.items() if parent in found} - found:
        found |= new
    return found - {pid}


@contextmanager
def at_work(repository: Path) -> Iterator[tuple[subprocess.Popen, str, list[Call], list[GrpcStream]]]:
    """A server with a stream of each kind, over gRPC too, and a Python model that does not return.

    Two of the streams over gRPC have answers, and the last two are open for more requests.
    """
    with serving(repository, "--drain-s=0.2", "--model-control-mode=explicit", "--load-model=*") as process:
        host = line_with(process, "Ready at").split()[2].removeprefix("http://")
        address = line_with(process, "over gRPC at").split()[-1]
        calls = [Call(host, path, body) for path, (body, _) in STREAMS.items()]
        streams = [
            GrpcStream(address, text_message(), more=False),
            GrpcStream(address, text_message(), more=True),
            GrpcStream(address, more=True),
        ]
        calls.append(Call(host, "/v2/models/busy/infer", ASKED))
        line_with(process, "BUSY")
        wait_until(lambda: all(call.text.count(b"data:") > 1 for call in calls[:-1]))
        wait_until(lambda: all(len(stream.answers) > 1 for stream in streams[:-1]))
        yield process, host, calls, streams


def test_sigterm_ends_every_answer_and_every_process(repository: Path) -> None:
    with at_work(repository) as (process, host, calls, streams):
        started = descendants(process.pid)
        reloading = threading.Event()

        def reload() -> None:
            while not reloading.is_set():
                for act in ("unload", "load"):
                    Call(host, f"/v2/repository/models/add/{act}", {}).join()

        thread = threading.Thread(target=reload)
        thread.start()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0  # another status if it had to be ended by force
        reloading.set()
        thread.join()
        for call in calls:
            call.join()
            assert not call.cut, call.path
        for stream in streams:
            stream.join()
        log = process.stderr.read()
    *events, busy = calls
    for call in events:
        assert call.last_event.startswith(STREAMS[call.path][1]), call.text[-500:]
        assert call.text.count(b"server stopped, before the answer was complete") == 1
    assert [stream.code.name for stream in streams] == ["OK", "UNAVAILABLE", "UNAVAILABLE"]
    for stream in streams[:-1]:
        *others, last = [answer.error_message for answer in stream.answers]
        assert not any(others)
        assert last.startswith(("the server stopped, before", "model 'tiny' was unloaded before"))
    assert busy.status == 503
    assert "error" in json.loads(busy.text)
    assert "stopping: waiting for 8 running requests" in log or "stopping: waiting for 9" in log
    assert "Traceback" not in log
    wait_until(lambda: started.isdisjoint(parents()), every_s=0.1)


def test_a_killed_server_leaves_nothing_behind_and_the_next_one_starts_at_once(repository: Path) -> None:
    files = {str(path) for path in repository.rglob("*")}
    with at_work(repository) as (process, host, calls, streams):
        started = descendants(process.pid)
        assert len(started) >= 3  # the model's process, what that has started, the chat template's
        process.kill()
        process.wait()
        for thread in (*calls, *streams):
            thread.join()
        port = host.partition(":")[2]
        with serving(repository, f"--http-port={port}", "--model-control-mode=explicit") as again:
            assert host in line_with(again, "Ready at")
        wait_until(lambda: started.isdisjoint(parents()), timeout_s=20, every_s=0.1)
        assert not shared_memory_of(process.pid)
    assert {str(path) for path in repository.rglob("*")} == files


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("seed", range(16))
def test_a_signal_at_any_moment_leaves_nothing_behind(repository: Path, number: int, seed: int) -> None:
    """Also while the models are loaded and while they are reloaded."""
    moment_s = Random(seed).uniform(0, 5)
    flags = ("--drain-s=0.5", "--model-control-mode=explicit", "--load-model=*")
    ended = threading.Event()

    def load(host: str) -> None:
        while not ended.is_set():
            for path, (body, _) in STREAMS.items():
                calls.append(Call(host, path, body))
            for act in ("unload", "load"):
                calls.append(Call(host, f"/v2/repository/models/add/{act}", {}))
            ended.wait(0.2)

    calls: list[Call] = []
    # Signals before the command has installed its handlers end Python itself.
    with serving(repository, *flags) as process, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: b"genserve" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        listening = pool.submit(lambda: next((line for line in process.stderr if "listening" in line), ""))
        host = listening.result(timeout=30).partition("listening at http://")[2].partition(",")[0]
        loading = threading.Thread(target=load, args=[host])
        loading.start()
        ended.wait(moment_s)
        started = descendants(process.pid)
        process.send_signal(number)
        code = process.wait(timeout=30)
        ended.set()
        loading.join()
        log = process.stderr.read()
    for call in calls:
        call.join()
    assert "Traceback" not in log, log[-3000:]
    wait_until(lambda: started.isdisjoint(parents()), timeout_s=20, every_s=0.1)
    assert not shared_memory_of(process.pid)
    if number == signal.SIGKILL:
        return
    assert code == 0 or "loading the models takes too long" in log, log[-3000:]
    answered = [call for call in calls if call.status == 200 and call.path in STREAMS]
    for call in answered:
        assert not call.cut
        ends = (STREAMS[call.path][1], "event: message_stop")
        assert call.last_event.startswith(ends) or '"generated_text": "' in call.last_event


def shared_memory_of(pid: int) -> list[str]:
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [name for name in names if "genserve" in name or str(pid) in name]


@pytest.mark.parametrize("name", ["SIGPIPE", "SIGWINCH", "SIGCHLD", "SIGURG"])
def test_other_signals_change_nothing(server: SharedServer, name: str) -> None:
    os.kill(server.pid, getattr(signal, name))
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2}).status == 200


def test_a_server_that_was_stopped_for_a_while_goes_on(server: SharedServer) -> None:
    with server.connect() as idle:
        os.kill(server.pid, signal.SIGSTOP)
        threading.Event().wait(5)  # longer than a hanging engine is trusted
        os.kill(server.pid, signal.SIGCONT)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(idle).json() == {"status": "ok"}
    assert not [line for line in server.log_lines() if "hangs" in line]
