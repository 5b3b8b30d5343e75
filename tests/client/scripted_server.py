"""Scripted server: a real HTTP server on a socket that plays prepared replies in turn."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 20


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The bytes sent for one request; the connection is closed after them."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False            # close before the announced body is complete
    stays_open: bool = False        # send nothing more until the client disconnects
    no_answer: bool = False         # close immediately


@dataclass(frozen=True, kw_only=True)
class Received:
    """One received request."""

    line: str
    headers: dict[str, str]
    body: Any


def json_reply(payload: object, **options: Any) -> Reply:
    return Reply(body=json.dumps(payload).encode(), **options)


def models_reply(*names: str) -> Reply:
    return json_reply({"object": "list", "data": [{"id": name} for name in names]})


def event_reply(*payloads: object, **options: Any) -> Reply:
    """One event per payload; a text goes as it is."""
    texts = [p if isinstance(p, str) else json.dumps(p) for p in payloads]
    body = "".join(f"data:{text}\n\n" for text in texts).encode()
    return Reply(body=body, headers={"content-type": "text/event-stream"}, **options)


class ScriptedServer:
    """Serves one connection after the other, on its own thread."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.received: list[Received] = []
        self.is_answering = threading.Event()       # in the middle of a reply that stays open
        self.client_left = threading.Event()        # and then the client disconnected
        self._replies = list(replies)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(PATIENCE_S)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        self.received.append(read_request(connection))
        reply = self._replies.pop(0)
        if reply.no_answer:
            return
        length = len(reply.body) + (100 if reply.is_cut or reply.stays_open else 0)
        headers = {"content-length": str(length), "connection": "close"} | reply.headers
        head = f"HTTP/1.1 {reply.status} Scripted\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        connection.sendall(head.encode() + b"\r\n" + reply.body)
        if reply.stays_open:
            self.is_answering.set()
            # A client that leaves before it has read everything resets the connection.
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            self.client_left.set()


def read_request(connection: socket.socket) -> Received:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    line, *rows = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (row.partition(": ") for row in rows)}
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(65536)
    return Received(line=line, headers=headers, body=json.loads(body) if body else None)


@contextmanager
def scripted(*replies: Reply) -> Iterator[ScriptedServer]:
    server = ScriptedServer(replies)
    try:
        yield server
    finally:
        server.close()
