"""Streams of the process that cannot be written, and resources that run out: the server answers as before."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from tests.support.live_server import LiveServer, line_with, serving, wait_until
from tests.support.python_models import write_model

ASKED = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adds")
    write_model(folder, "add")
    return folder


def answers(url: str) -> bool:
    with httpx2.Client(base_url=url) as http:
        answer = http.post("/v2/models/add/infer", json=ASKED).json()
    return answer["outputs"][0]["data"] == [2.0]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No more threads can be started once it is called: as root, the tests' process has no such limit."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_without_threads_requests_are_rejected_until_there_are_some(
    tiny_repository: Path, no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    requests = {
        "/v1/completions": completion,
        "/v1/chat/completions": chat | {"stream": True},
        "/generate": {"inputs": "a"},
        "/tokenize": {"prompt": "a"},
        "/v2/models/tiny/generate": {"text_input": "a"},
    }
    with LiveServer(tiny_repository) as server, httpx2.Client(base_url=server.url) as http:
        no_threads()
        rejected = {path: http.post(path, json=body) for path, body in requests.items()}
        ready = [http.get(path).status_code for path in ("/v2/health/live", "/v2/health/ready")]
        monkeypatch.undo()
        again = {path: http.post(path, json=body).status_code for path, body in requests.items()}
    assert {answer.status_code for answer in rejected.values()} == {503}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in rejected.values())
    assert ready == [200, 400]
    assert set(again.values()) == {200}


def test_without_file_descriptors_open_connections_are_served(repository: Path) -> None:
    with serving(repository) as process:
        url = line_with(process, "Ready at").split()[2]
        limit = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert limit[0] >= min(limit[1], 8192)      # the soft limit is raised
        with httpx2.Client(base_url=url) as kept, httpx2.Client(base_url=url) as late:
            assert kept.get("/v2/health/live").status_code == 200
            num_open = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open, limit[1]))
            with pytest.raises(httpx2.TransportError):
                late.get("/v2/health/live")
            assert kept.post("/v2/models/add/infer", json=ASKED).json()["outputs"][0]["data"] == [2.0]
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limit)
            assert late.get("/v2/health/live").status_code == 200


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def is_ready(url: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/v2/health/ready").status_code == 200
    return False


@pytest.mark.parametrize("kind", ["on a full disk", "pipes without a reader"])
def test_streams_that_cannot_be_written_change_nothing(repository: Path, kind: str) -> None:
    if kind == "on a full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    port = free_port()
    flags = [f"--http-port={port}"] + (["--log-file=/dev/full"] if kind == "on a full disk" else [])
    with serving(repository, *flags, stdout=descriptor, stderr=descriptor) as process:
        os.close(descriptor)
        wait_until(lambda: is_ready(f"http://127.0.0.1:{port}") or process.poll() is not None, timeout_s=90)
        assert answers(f"http://127.0.0.1:{port}")
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_a_log_that_nobody_reads_delays_no_request(repository: Path) -> None:
    with serving(repository, "--log-verbose=1") as process:
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)   # Linux only; some 40 lines
        url = line_with(process, "Ready at").split()[2]
        with httpx2.Client(base_url=url) as http:
            for _ in range(200):
                assert http.get("/v2/health/live").status_code == 200
        with ThreadPoolExecutor(1) as pool:
            log = pool.submit(process.stderr.read)      # the reader goes on
            process.terminate()
            assert process.wait(timeout=30) == 0
    assert log.result().count("/v2/health/live") == 200
