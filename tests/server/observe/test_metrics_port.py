from __future__ import annotations

import queue
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import trustme

from genserve.errors import GenserveError
from genserve.server.access.access_control import AccessControl
from genserve.server.access.key_ring import KeyRing
from genserve.server.api_server import Server, ServerInfo
from genserve.server.observe.metrics_port import MetricsPort
from genserve.settings import ServerSettings
from tests.support.python_models import write_model


def open_port(
    render: Callable[[], bytes],
    *,
    port: int = 0,
    timeout_s: float = 10,
    ssl_context: ssl.SSLContext | None = None,
) -> MetricsPort:
    settings, host = ServerSettings(), "127.0.0.1"
    access = AccessControl(settings, host=host, keys=KeyRing(settings))
    return MetricsPort(
        render, host=host, port=port, access=access, timeout_s=timeout_s, ssl_context=ssl_context
    )


def test_the_metrics_port_serves_only_metrics():
    port = open_port(lambda: b"a 1\n")
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port.port}") as http:
            answer = http.get("/metrics")
            assert (answer.text, answer.headers["content-type"].split(";")[0]) == ("a 1\n", "text/plain")
            assert (http.get("/other").status_code, http.get("/other").text) == (200, "")
        with pytest.raises(GenserveError) as caught:
            open_port(lambda: b"", port=port.port)
        assert "--metrics-port" in caught.value.remedy
    finally:
        port.close()


def test_the_metrics_port_looks_no_name_up(monkeypatch):
    names = []
    monkeypatch.setattr(socket, "getfqdn", names.append)
    open_port(lambda: b"").close()
    assert names == []


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server with a certificate, and of a client that trusts it."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


def test_the_metrics_port_limits_its_connections(monkeypatch):
    monkeypatch.setattr("genserve.server.observe.metrics_port._MAX_CONNECTIONS", 2)
    port = open_port(lambda: b"x 1\n")
    try:
        idle = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", port.port)) as one_too_many:
            assert one_too_many.recv(1) == b""
        for connection in idle:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert connection.makefile("rb").read().endswith(b"x 1\n")
            connection.close()
    finally:
        port.close()


def test_connections_that_have_not_shaken_hands_count_too(monkeypatch, contexts):
    monkeypatch.setattr("genserve.server.observe.metrics_port._MAX_CONNECTIONS", 2)
    port = open_port(lambda: b"x 1\n", ssl_context=contexts[0])
    try:
        idle = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", port.port)) as one_too_many:
            assert one_too_many.recv(1) == b""
        for connection in idle:
            with contexts[1].wrap_socket(connection, server_hostname="127.0.0.1") as encrypted:
                encrypted.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert encrypted.makefile("rb").read().endswith(b"x 1\n")
    finally:
        port.close()


def test_a_connection_that_gets_no_thread_leaves_its_place_to_others(monkeypatch):
    monkeypatch.setattr("genserve.server.observe.metrics_port._MAX_CONNECTIONS", 2)
    port = open_port(lambda: b"x 1\n")

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", start)
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port.port)) as connection:
                    assert connection.recv(1) == b""
        assert httpx2.get(f"http://127.0.0.1:{port.port}/metrics").text == "x 1\n"
    finally:
        port.close()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n", b"\x16\x03\x01"])
def test_the_metrics_port_closes_a_connection_whose_time_is_over(sent, contexts):
    is_tls = sent[:1] == b"\x16"    # the beginning of a handshake
    port = open_port(lambda: b"", timeout_s=0.2, ssl_context=contexts[0] if is_tls else None)
    try:
        with socket.create_connection(("127.0.0.1", port.port)) as slow:
            slow.sendall(sent)
            assert slow.recv(1) == b""
    finally:
        port.close()


def test_a_blocked_event_loop_does_not_delay_the_metrics_port(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    ready: queue.SimpleQueue[ServerInfo] = queue.SimpleQueue()
    answered = threading.Event()

    def block_the_event_loop(info: ServerInfo) -> None:
        ready.put(info)
        answered.wait(60)

    settings = ServerSettings(model_repository=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0)
    server = Server(settings, on_ready=block_the_event_loop)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        info = ready.get(timeout=60)
        with socket.create_connection(("127.0.0.1", int(info.url.rpartition(":")[2]))) as waiting:
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert "nv_inference" in httpx2.get(info.metrics_url).text
            assert select.select([waiting], [], [], 0)[0] == []
            answered.set()
            assert waiting.recv(2**16).startswith(b"HTTP/1.1 200")
    finally:
        answered.set()
        server.should_exit = True
        thread.join()
