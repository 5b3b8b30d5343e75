"""Slow clients: heads, bodies and readers that take too long cost their own connection, and nothing else."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.shared_server import read_response
from tests.server.live_kserve import copy_models
from tests.support.live_server import LiveServer, wait_until

HOST = b"Host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
INFER = b"POST /v2/models/identity_string/infer HTTP/1.1\r\n" + HOST
SIZE = 12_000_000  # more than the buffers of the system hold
TIMES = {"head_timeout_s": 0.5, "body_timeout_s": 0.5, "read_timeout_s": 0.5, "keep_alive_s": 1.0}


@pytest.fixture(scope="module")
def hurried(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with short times, of the model `tiny` and one that returns its text."""
    repository = tmp_path_factory.mktemp("hurried") / "repository"
    shutil.copytree(tiny_repository, repository)
    copy_models(("identity_string",), repository)
    with LiveServer(repository, **TIMES, max_connections=64) as server:
        yield server


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes(2**16))
        time.sleep(0.002)  # without it, this and the server take two cores until the server has had enough


def drip(connection: socket.socket, data: bytes) -> None:
    """Send a byte now and then, until the server has enough of it."""
    try:
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    except ConnectionError:
        pass


SLOW = {
    "head-that-stops": (b"GET /v1/models HTTP/1.1\r\nHost: loc", b""),
    "head-byte-by-byte": (b"GET /v1/models HTTP/1.1\r\n", b"X: 1\r\n" * 6),
    "target-that-stops": (b"GET /v2/mod", b""),
    "body-that-stops": (POST + b"Content-Length: 100\r\n\r\n{", b""),
    "body-byte-by-byte": (POST + b"Content-Length: 100\r\n\r\n", b"{" + b" " * 40),
    "body-of-chunks-that-stops": (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b""),
    "extension-of-a-chunk-byte-by-byte": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 40),
    "body-of-an-inference-that-stops": (INFER + b"Content-Length: 100\r\n\r\n{", b""),
    "body-after-100-continue-that-never-comes": (
        POST + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n", b""
    ),
}  # fmt: skip


@pytest.mark.parametrize(("at_once", "slowly"), SLOW.values(), ids=SLOW)
def test_a_slow_sender_is_told_408_and_disconnected(
    hurried: LiveServer, at_once: bytes, slowly: bytes
) -> None:
    with connect(hurried) as connection, ThreadPoolExecutor(1) as pool:
        connection.sendall(at_once)
        pool.submit(drip, connection, slowly)
        response = read_response(connection)
        assert (response.status, response.closed) == (408, True)
        assert response.error
        assert connection.recv(1) == b""


def test_a_connection_without_a_request_is_closed_without_an_answer(hurried: LiveServer) -> None:
    with connect(hurried) as connection:
        assert connection.recv(1) == b""


def test_an_idle_connection_is_closed_after_its_own_time(hurried: LiveServer) -> None:
    with connect(hurried) as connection:
        for _ in range(2):
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n")
            assert read_response(connection, method="GET").status == 200
            time.sleep(TIMES["head_timeout_s"])  # less than the time of an idle connection
        assert connection.recv(1) == b""


def test_a_body_that_comes_in_time_is_read(hurried: LiveServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with connect(hurried) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 20):
            connection.sendall(body[start : start + 20])
            time.sleep(0.05)
        assert read_response(connection).status == 200


def test_a_rest_of_a_body_that_nobody_reads_ends_the_connection(hurried: LiveServer) -> None:
    with connect(hurried) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 1000000000\r\n\r\n")
        assert read_response(connection).status == 404
        with pytest.raises(ConnectionError):
            send_for_ever(connection)


def test_a_connection_too_many_is_told_so_and_may_ask_for_health(hurried: LiveServer) -> None:
    wait_until(lambda: not hurried.server.server_state.connections)  # left by earlier tests
    models, health = (
        b"GET %b HTTP/1.1\r\n%b\r\n" % (path, HOST) for path in (b"/v1/models", b"/v2/health/ready")
    )
    allowed = [connect(hurried) for _ in range(64)]
    for connection in allowed:
        connection.sendall(models)
    assert {read_response(connection, method="GET").status for connection in allowed} == {200}
    for data, status in ((models, 503), (health, 200)):
        with connect(hurried) as connection:
            connection.sendall(data)
            response = read_response(connection, method="GET")
            assert (response.status, response.closed) == (status, True)
            assert ("retry-after" in response.headers) == (status == 503)
    for connection in allowed:
        connection.close()


def request_text(size: int) -> bytes:
    """A request whose answer has a text of `size` bytes."""
    tensor = {"name": "X", "datatype": "BYTES", "shape": [1], "data": ["a" * size]}
    body = json.dumps({"inputs": [tensor]}).encode()
    return INFER + b"Content-Length: %d\r\n\r\n" % len(body) + body


def receive_rest(connection: socket.socket, *, pause_s: float = 0) -> int:
    """Return the number of bytes until the connection ends, or the text does."""
    received = b""
    with suppress(ConnectionError):
        while not received.endswith(b'aa"]}]}') and (data := connection.recv(2**18)):
            received += data
            time.sleep(pause_s)
    return len(received)


def slow_reader(server: LiveServer, *, buffer_bytes: int = 4096) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(request_text(SIZE))
    return connection


@pytest.mark.parametrize("bytes_per_read", [0, pytest.param(8, marks=pytest.mark.extended)])
def test_a_reader_that_stops_is_disconnected(hurried: LiveServer, bytes_per_read: int, caplog) -> None:
    with slow_reader(hurried) as connection:
        while "has not read its answer" not in caplog.text:
            connection.recv(1, socket.MSG_PEEK)  # the answer has begun
            if bytes_per_read:
                connection.recv(bytes_per_read)
            time.sleep(0.05)
        assert receive_rest(connection) < SIZE


def test_a_slow_reader_that_goes_on_gets_everything(hurried: LiveServer, caplog) -> None:
    with slow_reader(hurried, buffer_bytes=2**18) as connection:
        assert receive_rest(connection, pause_s=0.02) > SIZE
    assert "has not read its answer" not in caplog.text
