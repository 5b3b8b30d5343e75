from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import httpx2
import pytest

from genserve.errors import GenserveError
from genserve.server.access_control import AccessControl
from genserve.server.key_ring import KeyRing
from genserve.server.metrics_port import MetricsPort
from genserve.settings import ServerSettings


def open_port(render: Callable[[], bytes], *, port: int = 0, timeout_s: float = 10) -> MetricsPort:
    settings, host = ServerSettings(), "127.0.0.1"
    access = AccessControl(settings, host=host, keys=KeyRing(settings))
    return MetricsPort(render, host=host, port=port, access=access, timeout_s=timeout_s)


def test_the_metrics_port_serves_only_metrics():
    port = open_port(lambda: b"a 1\n")
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port.port}") as http:
            answer = http.get("/metrics")
            assert (answer.text, answer.headers["content-type"].split(";")[0]) == ("a 1\n", "text/plain")
            assert (http.get("/other").status_code, http.get("/other").text) == (200, "")
        with pytest.raises(GenserveError, match="for metrics") as caught:
            open_port(lambda: b"", port=port.port)
        assert "--metrics-port" in caught.value.remedy
    finally:
        port.close()


def test_the_metrics_port_limits_its_connections(monkeypatch):
    monkeypatch.setattr("genserve.server.metrics_port._MAX_CONNECTIONS", 2)
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


def test_a_connection_that_gets_no_thread_leaves_its_place_to_others(monkeypatch):
    monkeypatch.setattr("genserve.server.metrics_port._MAX_CONNECTIONS", 2)
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


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"])
def test_the_metrics_port_closes_a_connection_whose_time_is_over(sent):
    port = open_port(lambda: b"", timeout_s=0.2)
    try:
        with socket.create_connection(("127.0.0.1", port.port)) as slow:
            slow.sendall(sent)
            assert slow.recv(1) == b""
    finally:
        port.close()
