"""Metrics port: Prometheus' own port, apart from that of the API, as Triton has it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST

from genserve.errors import GenserveError
from genserve.server.address import address_of

__all__ = ["MetricsPort"]


class MetricsPort:
    """Answers `GET /metrics`, on a thread: it tells of the server even while the event loop is busy."""

    def __init__(self, render: Callable[[], bytes], *, host: str, port: int) -> None:
        """Listen.

        Args:
            render: what `/metrics` answers, in Prometheus' text format.
            host: to listen on.
            port: 0: a free one.

        Raises:
            GenserveError: the port is taken.
        """
        try:
            self._server = _server(host)((host, port), partial(_Handler, render))
        except OSError as error:
            raise GenserveError(
                f"cannot listen on {address_of(host, port)} for metrics: {error.strerror}",
                remedy="choose another port with --metrics-port; 0 takes a free one, "
                "--allow-metrics=false none (they are on the HTTP port too)",
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=partial(self._server.serve_forever, poll_interval=0.1), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, render: Callable[[], bytes], *arguments: object) -> None:
        self._render = render
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:  # the name that http.server calls
        # Other paths are empty, and fine, as they are on Triton's.
        is_found = self.path.partition("?")[0] == "/metrics"
        body = self._render() if is_found else b""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST if is_found else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # http.server's name
        """Scrapes are no news."""


def _server(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        allow_reuse_address = True

    return Server
