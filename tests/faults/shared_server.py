"""Shared server: `genserve serve` in a process, for many tests that send it what it must reject."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.bystanders import Bystanders
from tests.server.live_kserve import copy_models
from tests.support.live_server import line_with, wait_until

# Tests put this into prompts, keys, tensors and names that are secret, so the log must not contain it.
CANARY = "canary-7d1f"
MODELS = (
    "add_sub", "ensemble_linear", "fails", "generate", "identity_fp32", "identity_string", "repeat", "types",
)  # fmt: skip
# A step takes some milliseconds, as with a real model: every stream of a bystander lasts for many requests.
# The oldest of the sequences waits for all.
_DECODER = """
import time

class TritonPythonModel:
    running = []

    async def decode(self, sequence):
        self.running.append(id(sequence))
        try:
            while not sequence.finished:
                sequence.append(await sequence.sample())
                if self.running[0] == id(sequence):
                    time.sleep(0.005)
        finally:
            self.running.remove(id(sequence))
"""
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: ")
_NOT_PUBLIC = re.compile(r"Traceback|site-packages|File \"|/tmp/|0x[0-9a-f]{6}|genserve\.\w+\.|<class ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The first response on a connection; status 0: the connection was closed without one."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    closed: bool  # whether the server says that it closes the connection

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The message of an error, in the dialect of OpenAI, or of KServe and TGI."""
        error = self.json()["error"]
        return error if isinstance(error, str) else error["message"]


def faults_repository(tiny_repository: Path, root: Path, *, models: Sequence[str] = MODELS) -> Path:
    """Write a repository with the model `tiny`, whose steps take a while, and these models."""
    shutil.copytree(tiny_repository, root)
    (root / "tiny_decoder" / "1" / "model.py").write_text(_DECODER)
    # Drafts would make deltas of several tokens, now and then, and so other bytes.
    with (root / "tiny_logits" / "config.pbtxt").open("a") as config:
        config.write('parameters [ { key: "speculation" value: { string_value: "none" } } ]\n')
    copy_models(models, root)
    return root


class SharedServer:
    """A server that many tests share, and the requests that they send to it.

    Attributes:
        process: the server's process.
        url: the URL for HTTP, such as http://127.0.0.1:40123.
        grpc_address: host and port for gRPC.
        metrics_address: host and port for metrics.
        bystanders: streams that run at the same time as the tests.
    """

    def __init__(self, process: subprocess.Popen, log: Path) -> None:
        """Wait until it is ready; its log is the file `log`."""
        self.process = process
        self.url = line_with(process, "Ready at").split()[2]
        self.grpc_address = line_with(process, "over gRPC at").split()[-1]
        self.metrics_address = line_with(process, "Metrics at").split("/")[2]
        self._log = log
        self._num_checked = 0
        self.bystanders = Bystanders(_pair(self.url.removeprefix("http://")))

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self, *, port: str = "http", timeout_s: float = 30) -> socket.socket:
        """Open a connection; `port` is "http", "grpc" or "metrics"."""
        addresses = {"http": self.url.removeprefix("http://"), "grpc": self.grpc_address}
        return socket.create_connection(_pair(addresses.get(port, self.metrics_address)), timeout=timeout_s)

    def exchange(self, data: bytes, *, method: str = "POST", port: str = "http") -> Response:
        """Send bytes on a new connection; return the response, which must show nothing internal.

        Args:
            data: any bytes.
            method: the method of the request, which decides whether the response has a body.
            port: "http" or "metrics".
        """
        with self.connect(port=port) as connection:
            connection.sendall(data)
            return read_response(connection, method=method)

    def post(self, path: str, body: Any, **headers: str) -> Response:
        """Send JSON, or bytes, and more headers, whose names have underscores for hyphens."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"content-type": "application/json", "content-length": str(len(content))}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return self.exchange(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + content)

    def get(self, path: str) -> Response:
        return self.exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), method="GET")

    def log_lines(self) -> list[str]:
        """Return the lines of the log since the last check."""
        return self._log.read_text().splitlines()[self._num_checked :]

    def check(self) -> None:
        """Raise AssertionError unless the server is as healthy as before the test."""
        assert self.process.poll() is None, "the server has exited"
        assert self.get("/v2/health/ready").status == 200
        self.bystanders.check()
        wait_until(lambda: not self._leaked(), timeout_s=10)
        lines = self.log_lines()
        self._num_checked += len(lines)
        for line in lines:
            assert _LOG_LINE.match(line), f"not a line of the log: {line!r}"
            assert CANARY not in line

    def _leaked(self) -> bool:
        """Whether requests other than the bystanders' wait, run or use blocks."""
        text = self.get("/metrics").body.decode()
        values = dict(re.findall(r'^genserve_(\w+)\{model="tiny"\} (\S+)$', text, re.MULTILINE))
        num_streams = self.bystanders.num_streams
        num_blocks = float(values["kv_cache_usage_perc"]) * float(values["kv_cache_num_blocks"])
        blocks_each = 256 / float(values["kv_cache_block_size"])
        return (
            float(values["num_requests_running"]) + float(values["num_requests_waiting"]) > num_streams
            or num_blocks > num_streams * blocks_each
        )


def read_response(connection: socket.socket, *, method: str = "POST") -> Response:
    """Return the next response on a connection; raises AssertionError if it shows something internal."""
    received = http.client.HTTPResponse(connection, method=method)
    try:
        received.begin()
        body = received.read()
    except (http.client.HTTPException, ConnectionError):
        return Response(status=0, headers={}, body=b"", closed=True)
    finally:
        received.close()
    headers = {name.lower(): value for name, value in received.getheaders()}
    if received.status >= 400:
        shown = _NOT_PUBLIC.search(body.decode(errors="replace"))
        assert shown is None, body[:500]
    return Response(status=received.status, headers=headers, body=body, closed=received.will_close)


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
