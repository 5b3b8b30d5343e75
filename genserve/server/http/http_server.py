"""HTTP server: the connections of one port, within limits, and how they end."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from contextlib import suppress
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from genserve.errors import GenserveError
from genserve.server.access.access_control import address_of
from genserve.server.access.tls import TlsFiles
from genserve.server.http.http_protocol import Handover, HttpProtocol, check_progress
from genserve.settings import ServerSettings

logger = logging.getLogger(__name__)

# Open files besides the connections of HTTP: models, logs, pipes, gRPC, metrics.
_OTHER_FILES = 1024
_BACKLOG = 2048
# The time that a connection which is kept alive has for its last request, before it is closed.
_LAST_REQUEST_S = 3


class HttpServer(uvicorn.Server):
    """A uvicorn server of connections with limits."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, tls: TlsFiles | None, drain_s: int | None
    ) -> None:
        """Serve an application whose lifespan is the server's.

        Args:
            app: the application.
            settings: the address and the limits of the port.
            tls: the certificate; None: plain HTTP.
            drain_s: how long running requests may take to end after a stop; None: as long as they take.
        """
        self._handover = Handover()
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                server_header=False,
                lifespan="off",
                http=partial(HttpProtocol, settings=settings, handover=self._handover),  # type: ignore[arg-type]
                ws="none",
                backlog=_BACKLOG,
                timeout_graceful_shutdown=drain_s,
                ssl_context_factory=(lambda *_: tls.context) if tls else None,
            )
        )

    async def hand_over(self, listener: socket.socket) -> None:
        """Leave new connections to the other servers of a shared port, and announce the end of those here.

        The system has already accepted some that nobody has seen, which would be reset. A connection that is
        kept alive has some time for a next request, whose answer is its last one.
        """
        self._handover.begun = True
        waiting: list[socket.socket] = []
        with suppress(BlockingIOError):
            while True:
                waiting.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        event_loop = asyncio.get_running_loop()
        opening = [
            event_loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
            for connection in waiting
        ]
        await asyncio.gather(*opening, return_exceptions=True)  # handshakes may fail
        end_s = event_loop.time() + _LAST_REQUEST_S
        while self.server_state.connections and event_loop.time() < end_s:  # noqa: ASYNC110  # as uvicorn does
            await asyncio.sleep(0.1)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}
        )
        return protocol

    async def on_tick(self, counter: int) -> bool:
        """Look for slow clients twice a second; uvicorn calls this ten times."""
        if counter % 5 == 0:
            check_progress(self.server_state.connections, now_s=asyncio.get_running_loop().time())
        return await super().on_tick(counter)


def open_http_port(settings: ServerSettings) -> socket.socket:
    """Listen on the HTTP port of the settings, and let the process have a file for each connection.

    Raises:
        GenserveError: the port is taken, or the address is not one of this machine.
    """
    _allow_open_files(settings.max_connections)
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server(
            (settings.host, settings.http_port),
            family=family,
            backlog=_BACKLOG,
            reuse_port=settings.reuse_http_port,
        )
    except OSError as error:
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise GenserveError(
            # Python's message repeats the address.
            f"cannot listen on {address_of(settings.host, settings.http_port)}: "
            f"{str(error.strerror).partition(' (while ')[0]}",
            remedy="choose another port with --http-port, and for a second server with --grpc-port and "
            "--metrics-port too; 0 takes a free one"
            if is_taken
            else "choose an address of this machine with --host: 127.0.0.1, ::1, or 0.0.0.0 for all",
        ) from error


def _allow_open_files(max_connections: int) -> None:
    """Raise the limit of open files, which is often 1,024, as far as the system allows it."""
    if sys.platform == "win32":
        return
    import resource

    wanted = max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        if allowed < wanted:
            logger.warning(
                "the system allows %d open files: too few for %d connections; raise `ulimit -n`, or lower "
                "--max-connections",
                allowed,
                max_connections,
            )
