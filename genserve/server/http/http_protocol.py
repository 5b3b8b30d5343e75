"""HTTP protocol: connections with limits of time, size and number, which uvicorn's own protocol lacks.

A client may be slow, silent or malformed; it holds one connection, for a bounded time, and no work. What is
wrong with a request is answered by the application as any other error, in the dialect of its route.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from genserve.errors import GenserveError
from genserve.server.http.connection_errors import (
    BodyTooLarge,
    HeadTooLarge,
    MalformedRequest,
    RequestTimeout,
    TooManyConnections,
    UriTooLong,
    set_connection_error,
)
from genserve.settings import ServerSettings

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

logger = logging.getLogger(__name__)

# The request line and all header fields together. Browsers send the cookies of all local servers; nginx and
# Node.js accept as much.
MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
MAX_URI_BYTES = 8 * 1024
# As in Triton. A chunk costs more than its bytes.
MAX_CHUNKS = 65_536
# A client that pipelines more does not wait for its answers.
_MAX_PIPELINED = 256
# The least rate of a body and of a reader; each is measured over its whole timeout.
_MIN_BYTES_PER_S = 1024
# What a client sends after its last answer is dropped for this time: a connection that is closed at once is
# reset, and the answer may be lost.
_LINGER_S = 2
# Longer rests of bodies that have been answered end their connection.
_MAX_DROPPED_BYTES = 2**20
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")  # RFC 3986, section 3.2.2
_CHECKED = frozenset({b"expect", b"host", b"transfer-encoding"})


@dataclass(slots=True)
class Handover:
    """Whether a server leaves its port to another one: each connection then ends with its next answer."""

    begun: bool = False


# What a connection reads; nothing before a request begins. Members of an Enum would be slower.
_NOTHING, _HEAD, _BODY = range(3)


class HttpProtocol(HttpToolsProtocol):
    """One connection, under the limits of the settings; call `check_progress` about twice a second."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        settings: ServerSettings,
        handover: Handover,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = settings
        self._handover = handover
        self._is_surplus = False
        self.reading = _NOTHING
        self.num_requests = 0  # that have begun
        self._num_hosts = 0  # Host headers of the current one
        self._is_chunked = False
        self._data_bytes = 0  # that are being parsed
        self._unparsed_bytes = 0  # the bytes of a head that is not complete
        self.body_bytes = self._num_chunks = 0  # what the current request has sent so far
        self._max_body_bytes = math.inf  # set when the rest is not needed
        self._ended = False  # what arrives from now on is dropped
        self._lingering_since_s: float | None = None
        self._pace = _Pace(self, settings)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin. A connection too many is answered: a client would not understand why it is closed."""
        super().connection_made(transport)
        self._is_surplus = len(self.connections) > self._settings.max_connections

    def data_received(self, data: bytes) -> None:
        """Parse what a client sends, until a request is malformed or the last one is complete."""
        if self._ended:
            return
        self._data_bytes = len(data)
        is_in_head, request = self.reading == _HEAD, self.num_requests
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.fail(_malformed(error))
        else:
            if self.reading == _BODY:
                if self.body_bytes > self._max_body_bytes:  # of a body whose answer has ended
                    self._linger()
            elif is_in_head and self.reading == _HEAD and request == self.num_requests:
                # The parser keeps an unfinished header field to itself.
                self._unparsed_bytes += len(data)
                if self._unparsed_bytes > MAX_HEAD_BYTES:
                    self.fail(_head_too_large())

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request that offers WebSocket or HTTP/2 again, as one of HTTP/1.1.

        Java's HttpClient offers HTTP/2 with each first request, and the parser would skip its body.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":  # which is an upgrade without the headers of one
            self.fail(MalformedRequest("the server is not a proxy"))
            return
        head = _head_without_upgrade(method, self.url, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.reading = _HEAD
        self.num_requests += 1
        self._num_hosts = 0
        self._is_chunked = False
        self._unparsed_bytes = self.body_bytes = self._num_chunks = 0
        self._max_body_bytes = math.inf

    def on_url(self, url: bytes) -> None:
        """Take a part of the target; raises UriTooLong."""
        self.url += url
        if len(self.url) > MAX_URI_BYTES:
            raise _uri_too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field; raises MalformedRequest. A trailer comes after the request was admitted."""
        if self.reading == _BODY:
            return
        name = name.lower()
        if name in _CHECKED:
            self._check_header(name, value)
        self.headers.append((name, value))

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"host":
            self._num_hosts += 1
            if self._num_hosts > 1 or _HOST.fullmatch(value) is None:
                raise MalformedRequest("the Host header does not name one host")
        elif value.lower() == b"chunked":
            self._is_chunked = True
        else:
            raise MalformedRequest("`chunked` is the only transfer coding that is supported")

    def on_headers_complete(self) -> None:
        """Begin the answer; raises HeadTooLarge and MalformedRequest."""
        if len(self.headers) > MAX_HEADERS or self._is_too_large():
            raise _head_too_large()
        if self.parser.should_upgrade():
            return  # `_ignore_upgrade` follows
        if not self._num_hosts and self.parser.get_http_version() == "1.1":
            raise MalformedRequest("the Host header is missing")
        if self._is_chunked and self.parser.get_http_version() == "1.0":
            raise MalformedRequest("HTTP/1.0 has no transfer codings", remedy="send Content-Length")
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise MalformedRequest(f"more than {_MAX_PIPELINED} requests wait for their answers")
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self, self.cycle)  # type: ignore[assignment]
        self.reading = _BODY
        if self._handover.begun:
            self.cycle.keep_alive = False
        if self._is_surplus:
            self.cycle.keep_alive = False
            too_many = TooManyConnections("the server has too many connections", remedy="try again later")
            set_connection_error(self.scope, too_many)

    def _is_too_large(self) -> bool:
        if self._unparsed_bytes + self._data_bytes <= MAX_HEAD_BYTES:
            return False
        # More than the head may have arrived.
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        return num_bytes > MAX_HEAD_BYTES

    def on_chunk_header(self) -> None:
        """Count a chunk of a body; the last one is empty and has no `on_body`."""
        self._num_chunks += 1

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; raises BodyTooLarge."""
        if self._num_chunks > MAX_CHUNKS:
            raise _too_many_chunks()
        self.body_bytes += len(body)
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """End a request."""
        if self.reading == _BODY:
            self.reading = _NOTHING
            self.cycle.more_body = False
            self.cycle.message_event.set()

    # What the answers call.

    def on_response_complete(self) -> None:
        """Begin the answer to the next request, unless this was the last one."""
        self.server_state.total_requests += 1
        if self._lingering_since_s is not None:
            return
        # Not uvicorn's method: its timer of an idle connection costs more than all that is done here.
        if self.reading == _BODY:
            self._max_body_bytes = self.body_bytes + _MAX_DROPPED_BYTES
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())

    def close_after_answer(self) -> None:
        """Close the connection after its last answer."""
        if self._ended or self.reading == _BODY:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close the connection when the client has closed it, or soon: it may still be sending."""
        self._ended = True
        if self._lingering_since_s is None and not self.transport.is_closing():
            self._lingering_since_s = self.loop.time()
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    # Failures, and clients that are slow.

    def fail(self, error: GenserveError) -> None:
        """Let the application answer the request that is being received with an error; then close."""
        self._ended = True
        if self.reading != _BODY:
            if self.reading == _NOTHING:
                self.on_message_begin()
            self._answer_head(error)
            return
        set_connection_error(self.cycle.scope, error)
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self._linger()
        else:
            self.cycle.message_event.set()

    def _answer_head(self, error: GenserveError) -> None:
        """Begin the answer to a request of which perhaps only a part of the head is known."""
        _set_target(self.scope, self.url, self.parser)
        set_connection_error(self.scope, error)
        previous = self.cycle
        self.cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        self.cycle.transport = _AnswerTransport(self, self.cycle)  # type: ignore[assignment]
        self.cycle.more_body = False
        if previous is None or previous.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def check_progress(self, now_s: float) -> None:
        """By the event loop's time, reject a request that is too slow; drop a client that does not read."""
        if not self._ended:
            self._pace.check_sender(now_s)
        if num_waiting := self.transport.get_write_buffer_size():
            self._pace.check_reader(num_waiting + _num_sent_and_unread(self.transport), now_s)
        elif self._lingering_since_s is not None and now_s - self._lingering_since_s > _LINGER_S:
            self.transport.abort()


class _Progress(NamedTuple):
    """How far a client was when its time began."""

    phase: object  # which part of which request a sender sends
    since_s: float
    num_bytes: int  # received of the body, or waiting for the reader


class _Pace:
    """How quickly the client of a connection sends and reads."""

    def __init__(self, connection: HttpProtocol, settings: ServerSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._sender: _Progress | None = None
        self._reader: _Progress | None = None

    def check_sender(self, now_s: float) -> None:
        """Reject a request that arrives too slowly, and close a connection that is idle for too long."""
        connection, sender, settings = self._connection, self._sender, self._settings
        reading, cycle = connection.reading, connection.cycle
        is_answering = cycle is not None and not cycle.response_complete
        is_waiting = connection.flow.read_paused or (reading == _NOTHING and is_answering)
        phase = (reading, connection.num_requests, is_waiting)
        if sender is None or sender.phase != phase or is_waiting:
            self._sender = _Progress(phase, now_s, connection.body_bytes)
            return
        waited_s = now_s - sender.since_s
        if reading == _NOTHING:
            # A new connection has no more time than a head: browsers open some in advance.
            if waited_s > (settings.keep_alive_s if connection.num_requests else settings.head_timeout_s):
                connection.transport.close()
        elif reading == _HEAD:
            if waited_s > settings.head_timeout_s:
                connection.fail(_too_slow("head"))
        elif waited_s > settings.body_timeout_s:
            if connection.body_bytes - sender.num_bytes < settings.body_timeout_s * _MIN_BYTES_PER_S:
                connection.fail(_too_slow("body"))
            self._sender = _Progress(phase, now_s, connection.body_bytes)

    def check_reader(self, num_waiting: int, now_s: float) -> None:
        """Check a client for which bytes wait; while more of them are being written, it has time."""
        connection, reader, timeout_s = self._connection, self._reader, self._settings.read_timeout_s
        cycle, is_paused = connection.cycle, connection.flow.write_paused
        is_writing = cycle is not None and not cycle.response_complete and not is_paused
        if is_writing or reader is None or num_waiting > reader.num_bytes:
            self._reader = _Progress(None, now_s, num_waiting)
        elif now_s - reader.since_s > timeout_s:
            if reader.num_bytes - num_waiting >= timeout_s * _MIN_BYTES_PER_S:
                self._reader = _Progress(None, now_s, num_waiting)
            else:
                host, port = connection.client or ("-", 0)
                logger.warning(
                    "%s:%d is disconnected: for %g s it has not read its answer", host, port, timeout_s
                )
                connection.transport.abort()


class _AnswerTransport:
    """The transport of one answer: it sends the head with the first part of the body, as ASGI asks."""

    def __init__(self, connection: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._head = b""
        self.is_closing = connection.transport.is_closing
        self.write: Callable[[bytes], None] = self._begin

    def _begin(self, data: bytes) -> None:
        """Write `100 Continue`, keep the head, or write it with the first part of the body."""
        cycle, transport = self._cycle, self._connection.transport
        if self._head:
            transport.writelines((self._head, data))
            self.write = transport.write
        elif cycle.response_started and cycle.scope["method"] != "HEAD":
            self._head = data
        else:
            transport.write(data)

    def close(self) -> None:
        """Close the connection, in some seconds if the client may not have sent everything."""
        self._connection.close_after_answer()


def check_progress(connections: Iterable[object], *, now_s: float) -> None:
    """Check all connections of a server; see `HttpProtocol.check_progress`."""
    for connection in tuple(connections):
        if isinstance(connection, HttpProtocol):
            connection.check_progress(now_s)


def _num_sent_and_unread(transport: asyncio.BaseTransport) -> int:
    """Return how many sent bytes the other side has not acknowledged: the system takes some MB at a time."""
    if sys.platform != "linux":
        return 0
    import fcntl
    import termios

    with suppress(OSError):  # it has just been closed
        answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(answer, sys.byteorder)
    return 0


def _head_without_upgrade(method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    head = [method, b" ", url, b" HTTP/1.1\r\n"]
    for name, value in headers:
        if name not in (b"connection", b"upgrade"):
            head += (name, b": ", value, b"\r\n")
    return b"".join((*head, b"\r\n"))


def _set_target(scope: HTTPScope, url: bytes, parser: httptools.HttpRequestParser) -> None:
    """Set the method and the target of a request whose head is perhaps not complete."""
    path, _, query = url.partition(b"?")
    is_known = path.startswith(b"/") and path.isascii()
    scope["method"] = parser.get_method().decode() if is_known else "-"
    scope["path"] = path.decode() if is_known else "/"
    scope["raw_path"] = path
    scope["query_string"] = query


def _malformed(error: httptools.HttpParserError) -> GenserveError:
    cause = error.__context__
    if isinstance(cause, GenserveError):
        return cause
    # The parser's messages are constant texts; that of another error may quote the request.
    is_of_target = isinstance(error, httptools.HttpParserCallbackError)
    reason = "invalid request target" if is_of_target else str(error)
    return MalformedRequest(f"the request is not valid HTTP/1.1: {reason}")


def _too_slow(part: str) -> RequestTimeout:
    return RequestTimeout(f"the {part} of the request arrives too slowly", remedy="send the request again")


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"the head of the request has more than {MAX_HEADERS} fields, or more than {MAX_HEAD_BYTES} bytes",
        remedy="send fewer or shorter header fields",
    )


def _uri_too_long() -> UriTooLong:
    return UriTooLong(f"the URI is longer than {MAX_URI_BYTES} bytes", remedy="send parameters in the body")


def _too_many_chunks() -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has more than {MAX_CHUNKS} chunks", remedy="send larger chunks, or Content-Length"
    )
