"""Metrics port: a separate port for Prometheus, as Triton has one.

The server of prometheus_client has neither an API key, nor a limit of connections, nor a timeout. uvicorn
does not count connections in their TLS handshake, and lets each take a minute; here all count, and all end.
"""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from genserve.errors import GenserveError
from genserve.log import quoted
from genserve.request_context import RequestContext
from genserve.server.access.access_control import ANY_KEY, AccessControl, address_of
from genserve.server.error_formats import error_headers
from genserve.server.error_statuses import http_status

logger = logging.getLogger(__name__)

# A scraper needs one connection for a moment.
_MAX_CONNECTIONS = 32


class MetricsPort(ThreadingHTTPServer):
    """Answers `GET /metrics` on threads, so that a busy event loop does not delay it."""

    daemon_threads = True

    def __init__(
        self,
        render: Callable[[], bytes],
        *,
        host: str,
        port: int,
        access: AccessControl,
        timeout_s: float,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Listen, and answer on a thread.

        Args:
            render: makes the body of `/metrics`, in Prometheus' text format.
            host: the address to listen on.
            port: 0 takes a free one.
            access: decides who is answered.
            timeout_s: how long a connection may be open, its TLS handshake included.
            ssl_context: encrypts connections; None: plain HTTP.

        Raises:
            GenserveError: the port is taken, or the address is not one of this machine.
        """
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._ssl_context = ssl_context
        self._timeout_s = timeout_s
        self._deadlines: dict[socket.socket, float] = {}
        self._free_connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            super().__init__((host, port), partial(_Handler, render, access))
        except OSError as error:
            raise GenserveError(
                f"cannot listen on {address_of(host, port)} for metrics: {error.strerror}",
                remedy="choose another port with --metrics-port; 0 takes a free one, "
                "--allow-metrics=false none (they are on the HTTP port too)",
            ) from error
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(
            target=partial(self.serve_forever, poll_interval=0.1), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Bind the address without asking a name server for its name, as HTTPServer does for CGI."""
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        if self._ssl_context is not None:
            # The connection's thread shakes hands, so that a slow client delays no other client.
            connection = self._ssl_context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection on its own thread, or close it if too many are open."""
        if self._free_connections.acquire(blocking=False):
            self._deadlines[request] = time.monotonic() + self._timeout_s
            try:
                super().process_request(request, client_address)
            except RuntimeError:    # no thread can be started; the caller closes the connection
                self._free(request)
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection; runs on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free(request)

    def _free(self, request: Any) -> None:
        """Let another connection open."""
        del self._deadlines[request]
        self._free_connections.release()

    def service_actions(self) -> None:
        """End the connections that are open for too long; called several times a second."""
        now = time.monotonic()
        for request, deadline in tuple(self._deadlines.items()):
            if now > deadline:
                with suppress(OSError):
                    socket.socket.shutdown(request, socket.SHUT_RDWR)   # its thread closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failure, unless the connection failed: clients leave, and fail TLS handshakes."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.error("the metrics port failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, render: Callable[[], bytes], access: AccessControl, *arguments: object) -> None:
        self._render = render
        self._access = access
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:  # the name that http.server calls
        path = self.path.partition("?")[0]
        headers = ((name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items())
        if len(self.headers.get_all("host", ())) > 1:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        try:
            self._access.admit(RequestContext(id=""), method="GET", headers=headers, rights=ANY_KEY)
        except GenserveError as error:
            client = f"{self.client_address[0]}:{self.client_address[1]}"
            logger.warning("%s %s %s was rejected: %s", client, self.command, quoted(path), error.code)
            self._answer(f"{error}\n".encode(), status=http_status(error), headers=error_headers(error))
            return
        # As in Triton, the answer to any other path is empty, and no error.
        if path == "/metrics":
            self._answer(self._render(), content_type=CONTENT_TYPE_LATEST)
        else:
            self._answer(b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(
        self,
        body: bytes,
        *,
        status: int = HTTPStatus.OK,
        content_type: str = "text/plain; charset=utf-8",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        lines = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
        for name, value in lines.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not valid, or has another method, in plain text."""
        self.close_connection = True
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code)
        headers = {"allow": "GET, HEAD"} if is_method else {}
        self._answer(f"{status.phrase}\n".encode(), status=status, headers=headers)

    def version_string(self) -> str:
        """Return the Server header, without Python's version."""
        return "genserve"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # http.server's name
        """Do not log scrapes."""
