"""Live servers on free ports of 127.0.0.1: in a thread of the test's process, or as the command."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from genserve.server.api_server import Server, ServerInfo
from genserve.settings import ServerSettings
from genserve.textmodel.text_model import TextModel


class LiveServer:
    """`with LiveServer(repository) as server: ... server.url ...`"""

    def __init__(self, repository: Path, **settings: Any) -> None:
        ready: queue.SimpleQueue[ServerInfo] = queue.SimpleQueue()
        self.server = Server(
            ServerSettings(
                model_repository=(repository,),
                **{"http_port": 0, "grpc_port": 0, "metrics_port": 0, **settings},
            ),
            on_ready=ready.put,
        )
        self.thread = threading.Thread(target=self.server.serve_until_stopped)
        self.thread.start()
        self.info = ready.get(timeout=60)
        self.url = self.info.url
        self.grpc_url = self.info.grpc_address

    @property
    def model(self) -> TextModel:
        return self.server.services.repository.text_model()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def children() -> set[int]:
    """The live child processes."""
    return {pid for pid, parent in parents().items() if parent == os.getpid()}


def parents() -> dict[int, int]:
    """The parent of each live process of the machine."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The state and the parent follow the name, which may contain anything.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # the process has ended meanwhile
            continue
        if state != "Z":
            found[int(stat.parent.name)] = int(parent)
    return found


def request_bytes(path: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def slow_down(server: LiveServer, monkeypatch, *, step_s: float = 0.01) -> None:
    """Make each step of the tiny model take a while, as a real one would."""
    model = server.model.engine._engine._runner._model
    forward = model.forward

    def slow(batch):
        time.sleep(step_s)
        return forward(batch)

    monkeypatch.setattr(model, "forward", slow)


def wait_until(holds, what: str = "it", *, timeout_s: float = 30, every_s: float = 0.001) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} never came true"
        time.sleep(every_s)


@contextmanager
def serving(
    repository: Path, *flags: str, key: str = "", **process: Any
) -> Iterator[subprocess.Popen]:
    """Run `genserve serve` within the block, with an API key if one is given.

    `process` are arguments of Popen, such as another `stderr` than a pipe.
    """
    command = [sys.executable, "-m", "genserve", "serve", "--http-port=0", "--grpc-port=0"]
    command += ["--metrics-port=0", f"--model-repository={repository}", *flags]
    environment = os.environ | ({"GENSERVE_API_KEY": key} if key else {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **(pipes | process), text=True, env=environment) as running:
        try:
            yield running
        finally:
            running.kill()


def line_with(process: subprocess.Popen, words: str) -> str:
    while words not in (line := process.stdout.readline()):
        assert process.poll() is None
    return line
