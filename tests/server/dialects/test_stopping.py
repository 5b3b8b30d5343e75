"""Ctrl-C at every state of `genserve serve`: the command, and the signals that a terminal sends."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.live_server import line_with, serving
from tests.support.python_models import write_model

# Executes, and is loaded, once the file `go` is there.
GATED = """
import pathlib
import threading

class TritonPythonModel:
    def {method}(self, given):
        print("WAITING", flush=True)
        while not pathlib.Path({gate!r}).exists():
            threading.Event().wait(0.01)
"""
ASKED = b'{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}'


def gated_model(folder: Path, *, method: str) -> Path:
    """A repository with a model that waits in a method; returns the file that lets it go on."""
    write_model(folder / "models", "gated", code=GATED.format(method=method, gate=str(folder / "go")))
    return folder / "go"


def log_with(process: subprocess.Popen, words: str) -> str:
    while words not in (line := process.stderr.readline()):
        assert line, "the log has ended"
    return line


@contextmanager
def serving_one_request(folder: Path, *flags: str) -> Iterator[subprocess.Popen]:
    with serving(folder / "models", *flags) as process, ThreadPoolExecutor(1) as pool:
        host = line_with(process, "Ready at").split()[2].removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("POST", "/v2/models/gated/infer", ASKED)
        line_with(process, "WAITING")
        answered = pool.submit(connection.getresponse)
        yield process
        process.wait(timeout=30)
        answered.exception()  # the connection may be cut
        connection.close()


def test_the_first_ctrl_c_says_what_it_waits_for_and_waits(tmp_path: Path) -> None:
    gate = gated_model(tmp_path, method="execute")
    with serving_one_request(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        line = log_with(process, "stopping: waiting for 1 running request, 30 s at most")
        assert line.endswith("; a second Ctrl-C ends the server at once\n")
        gate.touch()
        log_with(process, "POST /v2/models/gated/infer")
        log_with(process, "stopped")
    assert process.returncode == 0


def test_the_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    gated_model(tmp_path, method="execute")
    with serving_one_request(tmp_path, "--drain-s=60") as process:
        process.send_signal(signal.SIGTERM)
        log_with(process, "a second SIGTERM ends the server at once")
        process.send_signal(signal.SIGTERM)
        log_with(process, "stopping at once")
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.extended  # test_api_server.py has a load that hangs
def test_ctrl_c_while_the_models_are_loaded(tmp_path: Path) -> None:
    gate = gated_model(tmp_path, method="initialize")
    with serving(tmp_path / "models") as process:
        line_with(process, "WAITING")
        process.send_signal(signal.SIGINT)
        log_with(process, "waiting for the models that are being loaded, 30 s at most")
        gate.touch()
        process.wait(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "smollm2", "--http-port=0"),
        pytest.param(("chat", "smollm2", "Hi"), marks=pytest.mark.extended),
    ],
)
def test_ctrl_c_during_a_download(tmp_path: Path, words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts, and never answers
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        environment = os.environ | {
            "GENSERVE_HOME": str(tmp_path),
            "GENSERVE_CACHE": str(tmp_path / "cache"),
            "PIP_INDEX_URL": url,
            "UV_INDEX_URL": url,
            "PIP_CONFIG_FILE": "/dev/null",
        }
        with (
            ThreadPoolExecutor(1) as pool,
            subprocess.Popen(
                [sys.executable, "-m", "genserve", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            ) as process,
        ):
            connection, _ = pool.submit(index.accept).result(timeout=60)
            process.send_signal(signal.SIGINT)  # a terminal sends it to the installer, too, which may miss it
            stdout, stderr = process.communicate(timeout=60)
            connection.close()
    assert (process.returncode, stdout) == (130, "")
    assert "stopped: `genserve pull smollm2` goes on with it" in stderr
    assert "Traceback" not in stderr
    assert not list((tmp_path / "cache").glob("[!.]*"))
    assert not (tmp_path / "model_repository" / "smollm2").exists()
