"""Static server: answers chats at a known pace, to measure load generators.

    python benchmarks/static_server.py --port 8000 --first-ms 50 --between-ms 10

Every answer has as many tokens as the request asks for, one per chunk. The chunks are prepared, so that the
server is quicker than its clients. With `--between-ms 0` all chunks are sent at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from typing import cast

import uvloop

MODEL = "static"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return data as a chunk of HTTP."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields: object) -> bytes:
    """Return an event in a chunk of its own."""
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return chunk(b"data: " + json.dumps(head | fields).encode() + b"\n\n")


def delta(finish_reason: str | None = None, **fields: str) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


ROLE = delta(role="assistant", content="")
TOKEN = delta(content=" word")
END = delta(finish_reason="length")
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, *, first_s: float, between_s: float) -> None:
        self._first_s = first_s
        self._between_s = between_s
        self._received = b""
        self._left = self._total = 0
        self._due_s = 0.0
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        if not separator or len(body) < int(fields.get(b"content-length", b"0")):
            return
        self._received = b""
        if head.startswith(b"POST"):
            self._answer(json.loads(body))
        else:
            self._send_whole({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def _send_whole(self, document: object) -> None:
        content = json.dumps(document).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(content) + content)

    def _answer(self, body: dict[str, int]) -> None:
        self._left = self._total = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self._due_s = self._loop.time() + self._first_s
        self._transport.write(STREAM_HEAD)
        self._wait()

    def _wait(self) -> None:
        # Each token is due at a time of its own, so a late token does not delay the next.
        self._loop.call_at(self._due_s, self._send_token)

    def _send_token(self) -> None:
        if self._transport.is_closing():
            return
        first = ROLE if self._left == self._total else b""
        num_tokens = 1 if self._between_s else self._left
        self._left -= num_tokens
        self._transport.write(first + TOKEN * num_tokens)
        if self._left:
            self._due_s += self._between_s
            self._wait()
            return
        usage = {"prompt_tokens": 40, "completion_tokens": self._total, "total_tokens": 40 + self._total}
        self._transport.write(END + event(choices=[], usage=usage) + DONE)


async def serve(options: argparse.Namespace) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(first_s=options.first_ms / 1e3, between_s=options.between_ms / 1e3),
        "127.0.0.1",
        options.port,
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=50, help="from a request to its first token")
    parser.add_argument("--between-ms", type=float, default=10, help="between tokens; 0: all at once")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
