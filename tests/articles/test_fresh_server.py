"""A server in a process of its own, in which no model's package has been imported before."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("load_threads", [1, 4])
def test_models_that_import_torch_each_in_its_way_load_in_one_process(
    articles_repository: Path, load_threads: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "genserve", "serve", f"--http-port={port}", "--grpc-port=0"]
    command += ["--metrics-port=0", f"--model-repository={articles_repository}"]
    command += [f"--model-load-thread-count={load_threads}", "--exit-on-error=false"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Ready at"):
                break
        index = requests.post(f"http://127.0.0.1:{port}/v2/repository/index", timeout=30).json()
        process.terminate()
        process.stdout.read()
    assert {entry["name"]: entry.get("state") for entry in index} == dict.fromkeys(
        (entry["name"] for entry in index), "READY"
    ), "".join(lines)
