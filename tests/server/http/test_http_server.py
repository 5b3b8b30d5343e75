"""A server that leaves a shared port to another one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from genserve.server.http import http_server
from genserve.server.http.http_server import HttpServer, open_http_port
from genserve.settings import ServerSettings

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the system shares no ports")

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, kw_only=True)
class Running:
    server: HttpServer
    listener: socket.socket
    port: int


@asynccontextmanager
async def running(name: str, *, port: int = 0) -> AsyncIterator[Running]:
    """A server whose answers are its name."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(len(name)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": name.encode()})

    settings = ServerSettings(http_port=port, reuse_http_port=True)
    server = HttpServer(app, settings=settings, tls=None, drain_s=None)
    listener = open_http_port(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0)
    yield Running(server=server, listener=listener, port=listener.getsockname()[1])
    server.should_exit = True
    await serving


async def connected(port: int) -> Stream:
    return await asyncio.open_connection("127.0.0.1", port)


async def ask(stream: Stream) -> str:
    """The answer over a connection, head included; empty: there was none."""
    reader, writer = stream
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        return (head + await reader.readexactly(3)).decode()
    except asyncio.IncompleteReadError:
        return ""


async def test_who_has_connected_gets_an_answer_and_others_connect_to_the_next_server() -> None:
    async with running("old") as old:
        kept = await connected(old.port)
        assert (await ask(kept)).endswith("old")
        unseen = socket.create_connection(("127.0.0.1", old.port))
        async with running("new", port=old.port):   # which the connection above does not know
            handing = asyncio.create_task(old.server.hand_over(old.listener))
            await asyncio.sleep(0)
            late, new = await asyncio.open_connection(sock=unseen), await connected(old.port)
            assert (await ask(new)).endswith("new")
            for stream in (kept, late):
                answer = await ask(stream)
                assert answer.endswith("old")
                assert "connection: close" in answer
                assert await ask(stream) == ""
            for _, writer in (kept, late, new):
                writer.close()
            await handing


async def test_an_idle_connection_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_LAST_REQUEST_S", 0.01)
    async with running("old") as old:
        reader, writer = await connected(old.port)
        await ask((reader, writer))
        await old.server.hand_over(old.listener)
        old.server.should_exit = True
        assert await reader.read() == b""
        writer.close()
