"""Metrics port: Prometheus' own port, apart from that of the API, as Triton has it."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from genserve.errors import GenserveError
from genserve.log import quoted
from genserve.server.access_control import AccessControl, address_of
from genserve.server.error_responses import http_status

__all__ = ["MetricsPort"]

logger = logging.getLogger(__name__)


# A scraper needs one connection, for a moment.
_MAX_CONNECTIONS = 32
_PATIENCE_S = 10


class MetricsPort:
    """Answers `GET /metrics`, on a thread: it tells of the server even while the event loop is busy."""

    def __init__(
        self,
        render: Callable[[], bytes],
        *,
        host: str,
        port: int,
        access: AccessControl,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Listen.

        Args:
            render: what `/metrics` answers, in Prometheus' text format.
            host: to listen on.
            port: 0: a free one.
            access: who is answered.
            ssl_context: to speak TLS with; None: plain HTTP.

        Raises:
            GenserveError: the port is taken.
        """
        try:
            self._server = _server(host)((host, port), partial(_Handler, render, access))
        except OSError as error:
            raise GenserveError(
                f"cannot listen on {address_of(host, port)} for metrics: {error.strerror}",
                remedy="choose another port with --metrics-port; 0 takes a free one, "
                "--allow-metrics=false none (they are on the HTTP port too)",
            ) from error
        if ssl_context is not None:
            # The handshake is done by the thread of the connection: whoever delays it delays nobody else.
            self._server.socket = ssl_context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
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
    timeout = _PATIENCE_S  # between two reads, or writes

    def __init__(self, render: Callable[[], bytes], access: AccessControl, *arguments: object) -> None:
        self._render = render
        self._access = access
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:  # the name that http.server calls
        path = self.path.partition("?")[0]
        headers = ((name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items())
        try:
            self._access.check(method="GET", path=path, headers=headers)
        except GenserveError as error:
            client = f"{self.client_address[0]}:{self.client_address[1]}"
            logger.warning("%s %s %s was refused: %s", client, self.command, quoted(path), error.code)
            self._answer(f"{error}\n".encode(), status=HTTPStatus(http_status(error)))
            return
        # Other paths are empty, and fine, as they are on Triton's.
        if path == "/metrics":
            self._answer(self._render(), content_type=CONTENT_TYPE_LATEST)
        else:
            self._answer(b"")

    def _answer(
        self,
        body: bytes,
        *,
        status: HTTPStatus = HTTPStatus.OK,
        content_type: str = "text/plain; charset=utf-8",
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def version_string(self) -> str:
        """Say what answers, and not by which Python."""
        return "genserve"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # http.server's name
        """Scrapes are no news."""


def _server(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        allow_reuse_address = True

        def __init__(self, *arguments: Any) -> None:
            self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
            super().__init__(*arguments)

        def process_request(self, request: Any, client_address: Any) -> None:
            """Answer a connection on a thread of its own, or close it where there are too many."""
            if self._free.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Log a failure; that a client leaves, or shakes no hands, is none."""
            error = sys.exc_info()[1]
            if not isinstance(error, OSError):
                logger.error("the metrics port failed", exc_info=error)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self._free.release()

    return Server
