"""Raw client: HTTP requests over plain sockets, which can leave at any point.

It shares the cores with the measured server, so it does minimal work: it keeps the bytes of an answer, and
looks only for its end.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-fA-F]+)\r\n")
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_NO_LINGER = struct.pack("ii", 1, 0)    # close() sends RST instead of FIN


@dataclass(slots=True)
class Answer:
    """The answer to one request; times come from `time.perf_counter`."""

    sent_s: float
    first_s: float = 0.0        # when the first byte after the head came; 0: none came
    end_s: float = 0.0
    status: int = 0             # 0: no head came
    head: bytes = b""
    body: bytes = b""
    is_complete: bool = False   # the last byte came
    has_left: bool = False      # we closed the connection

    @property
    def retry_after_s(self) -> float:
        """Seconds until the server wants a rejected request again."""
        found = re.search(rb"\r\nretry-after-ms: *(\d+)", self.head, re.IGNORECASE)
        return int(found[1]) / 1000 if found else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """When a client closes its connection, unless the answer is complete before."""

    after_s: float
    reset: bool                 # close with RST instead of FIN


class Connection(asyncio.Protocol):
    """One kept-alive connection, for one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._missing: int | None = None        # bytes of the body; None: it is chunked
        self._parts: list[bytes] = []
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self.is_open = True
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._finish()

    async def ask(self, request: bytes, *, leave: Leave | None = None, timeout_s: float = 120) -> Answer:
        """Send a request and return its answer, which is incomplete if either side has left."""
        answer = self._answer = Answer(sent_s=time.perf_counter())
        self._parts, self._tail, self._missing = [], b"", None
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        if self.is_open:
            self._transport.write(request)
        else:
            self._finish()
        timer = loop.call_later(timeout_s if leave is None else leave.after_s, self._finish)
        await self._ended
        timer.cancel()
        if self.is_open and not answer.is_complete:
            answer.has_left = leave is not None
            self.close(reset=leave is not None and leave.reset)
        self._answer = None
        answer.end_s = time.perf_counter()
        answer.body = b"".join(self._parts)
        if self._missing is None:
            answer.body = dechunked(answer.body)
        return answer

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if not answer.status:
            answer.head += data
            head, end, data = answer.head.partition(b"\r\n\r\n")
            if not end:
                return
            answer.head, answer.status = head, int(head[9:12])
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else None
        if data:
            answer.first_s = answer.first_s or time.perf_counter()
            self._parts.append(data)
        if self._missing is None:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK):]
            answer.is_complete = self._tail == _LAST_CHUNK or self._tail == _LAST_CHUNK[2:]
        else:
            self._missing -= len(data)
            answer.is_complete = self._missing <= 0
        if answer.is_complete:
            self._finish()

    def close(self, *, reset: bool = False) -> None:
        """Close the connection with FIN, or with RST."""
        if self.is_open and reset:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        elif self.is_open:
            self._transport.close()
        self.is_open = False

    def _finish(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class RawClient:
    """Connections to one port; an idle connection is reused while it is young."""

    def __init__(self, port: int, *, keepalive_s: float = 2.0) -> None:
        self._port = port
        self._keepalive_s = keepalive_s
        self._idle: list[tuple[Connection, float]] = []

    async def connect(self) -> Connection:
        """Return a new connection; raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    async def ask(self, request: bytes, *, leave: Leave | None = None) -> Answer:
        """Send a request over an idle or a new connection."""
        while self._idle:
            connection, used_s = self._idle.pop()
            if connection.is_open and time.perf_counter() - used_s < self._keepalive_s:
                break
            connection.close()
        else:
            connection = await self.connect()
        answer = await connection.ask(request, leave=leave)
        if answer.is_complete and connection.is_open and b"connection: close" not in answer.head.lower():
            self._idle.append((connection, answer.end_s))
        else:
            connection.close()
        return answer

    async def post(self, path: str, body: Any, *, leave: Leave | None = None) -> Answer:
        """Send JSON."""
        return await self.ask(post_bytes(path, json.dumps(body).encode()), leave=leave)

    async def get(self, path: str) -> Answer:
        """Send a GET request."""
        return await self.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def close(self) -> None:
        """Close the idle connections."""
        for connection, _ in self._idle:
            connection.close()


def post_bytes(path: str, body: bytes, *, headers: str = "") -> bytes:
    """Return the bytes of a POST request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{headers}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def dechunked(body: bytes) -> bytes:
    """Return the content of a chunked body, which may have been cut."""
    parts, place = [], 0
    while found := _CHUNK.match(body, place):
        size = int(found[1], 16)
        parts.append(body[found.end() : found.end() + size])
        place = found.end() + size + 2
    return b"".join(parts)
