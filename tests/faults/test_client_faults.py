"""Servers that cut, stall or garble answers: a client raises a typed error, and never returns a part."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from genserve.client import Client, api_calls, reply_errors, sse_decoder
from genserve.errors import GenserveError, StreamBroken, Unreachable
from genserve.prompt import read_chat
from tests.client.scripted_server import read_request
from tests.faults.shared_server import SharedServer

# With a terminating zero-window RST instead of FIN.
_RESET = struct.pack("ii", 1, 0)
Play = Callable[[socket.socket], None]


class Player:
    """A server that lets a function answer each connection, after its request."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.num_requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # a client may leave at any time
                connection.settimeout(20)
                read_request(connection)
                self.num_requests += 1
                self.play(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@contextmanager
def playing(play: Play) -> Iterator[Player]:
    player = Player(play)
    try:
        yield player
    finally:
        player.close()


def sending(data: bytes, *, reset: bool = False) -> Play:
    def play(connection: socket.socket) -> None:
        connection.sendall(data)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    return play


def read_stream(client: Client) -> tuple[str, GenserveError | None]:
    """The text that a chat's stream yields, and the error that ends it, if any."""
    text = ""
    try:
        with client.chat_stream("hi", max_tokens=4) as stream:
            for delta in stream:
                text += delta.text
    except GenserveError as error:
        return text, error
    return text, None


@pytest.fixture(scope="module")
def recorded(shared_server: SharedServer) -> bytes:
    """The bytes of a whole answer, with its head and the frames of its chunks."""
    chunks: list[bytes] = []
    request = api_calls.chat_stream(
        read_chat("hi"), model="tiny", options={"max_tokens": 4}, return_progress=False
    ).request
    lines = (
        f"POST {request.path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(request.body)}",
    )
    with shared_server.connect() as connection:
        connection.sendall("\r\n".join((*lines, "\r\n")).encode() + request.body)
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def test_a_stream_that_ends_after_any_byte_is_never_a_success(recorded: bytes) -> None:
    _head, _, rest = recorded.partition(b"\r\n\r\n")
    body = b""
    while rest:  # the rest of the chunked body
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    call = api_calls.chat_stream(
        read_chat("hi"), model="tiny", options={"max_tokens": 4}, return_progress=False
    )
    whole = body.index(b"data: [DONE]")
    for offset in range(len(body)):
        decoder = call.decoder()
        deltas = list(decoder.feed(body[:offset]))
        if offset >= whole:
            decoder.end()
            assert deltas[-1].finish_reason == "length"
        else:
            with pytest.raises(StreamBroken):
                decoder.end()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_connection_that_is_cut_at_any_byte_is_never_a_success(recorded: bytes, *, reset: bool) -> None:
    whole = recorded.index(b"data: [DONE]")  # the answer is complete before
    with playing(sending(recorded)) as player, Client(player.url, max_retries=0) as client:
        text, error = read_stream(client)
        assert error is None
        for offset in range(0, len(recorded), 13):
            player.play = sending(recorded[:offset], reset=reset)
            part, error = read_stream(client)
            assert text.startswith(part)
            if error is None:
                assert offset >= whole
                assert part == text
            else:
                assert isinstance(error, (StreamBroken, Unreachable)), error
                assert error.remedy


HTML = b"<!doctype html><html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
NESTED = b"[" * 200_000


def reply(status: int, content_type: str, body: bytes, **headers: str) -> bytes:
    lines = {"content-type": content_type, "connection": "close", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body


GARBAGE = {
    "no-http": b"SSH-2.0-OpenSSH_9.6\r\n",
    "nothing": b"",
    "an-html-502": reply(502, "text/html", HTML),
    "an-html-200": reply(200, "text/html", HTML),
    "a-json-list": reply(200, "application/json", b"[]"),
    "deep-json": reply(200, "text/event-stream", b"data: " + NESTED + b"\n\n"),
    "a-deep-error": reply(500, "application/json", NESTED),
    "an-event-that-is-no-json": reply(200, "text/event-stream", b"data: {oops\n\n"),
    "an-event-of-another-api": reply(200, "text/event-stream", b'data: {"hello": 1}\n\ndata: [DONE]\n\n'),
    "only-comments": reply(200, "text/event-stream", b": ping\n\n" * 100),
    "only-the-end": reply(200, "text/event-stream", b"data: [DONE]\n\n"),
    "invalid-utf-8": reply(200, "text/event-stream", b"data: \xff\xfe\n\n"),
    "no-gzip": reply(200, "text/event-stream", b"data: {}\n\n", **{"content-encoding": "gzip"}),
    "an-endless-redirection": reply(307, "text/plain", b"", location="/v1/chat/completions"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_a_typed_error(name: str) -> None:
    with playing(sending(GARBAGE[name])) as player, Client(player.url, max_retries=0) as client:
        _, error = read_stream(client)
        assert isinstance(error, GenserveError)
        assert len(str(error)) < 1000
        with pytest.raises(GenserveError):
            client.chat("hi")


@pytest.mark.parametrize("kind", ["a-line", "an-event", "an-answer", "an-error"])
def test_an_endless_reply_takes_bounded_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (sse_decoder, "_MAX_EVENT_BYTES"),
        (reply_errors, "MAX_ANSWER_BYTES"),
        (reply_errors, "MAX_ERROR_BYTES"),
    ):
        monkeypatch.setattr(module, name, 1 << 20)
    piece = b"data: " + b"x" * 60_000 + b"\n" if kind == "an-event" else b"x" * 60_000
    num_sent = 0

    def read(client: Client) -> object:
        return client.chat("hi") if kind == "an-answer" else list(client.chat_stream("hi"))

    def play(connection: socket.socket) -> None:
        nonlocal num_sent
        content_type = "text/event-stream" if kind in ("a-line", "an-event") else "application/json"
        connection.sendall(reply(500 if kind == "an-error" else 200, content_type, b"data: "))
        while True:
            connection.sendall(piece)
            num_sent += len(piece)

    with (
        playing(play) as player,
        Client(player.url, max_retries=0) as client,
        pytest.raises((StreamBroken, Unreachable), match="1 MiB"),
    ):
        read(client)
    assert num_sent < 32 << 20


@pytest.mark.parametrize("num_bytes", [0, 30, -40], ids=["before-the-head", "in-the-head", "in-the-stream"])
def test_a_reply_that_stalls_ends_with_the_timeout(recorded: bytes, num_bytes: int) -> None:
    def play(connection: socket.socket) -> None:
        connection.sendall(recorded[: num_bytes or 0])
        connection.recv(1)  # until the client leaves

    with playing(play) as player, Client(player.url, timeout_s=0.1) as client:
        _, error = read_stream(client)
        assert player.num_requests == 1  # the server may still work on it
    assert isinstance(error, (StreamBroken, Unreachable))


@pytest.mark.parametrize("code", ["closed", "request_timeout", "overloaded", "model_not_ready", None])
@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_rejection_that_did_no_work_is_retried(status: int, code: str) -> None:
    error = json.dumps({"error": {"message": "later", "type": "server_error", "param": None, "code": code}})
    headers = {"retry-after-ms": "1", "retry-after": "1"}
    rejecting = sending(reply(status, "application/json", error.encode(), **headers))
    with playing(rejecting) as player, Client(player.url, max_retries=1) as client:
        with pytest.raises(GenserveError, match="later"):
            client.chat("hi")
        assert player.num_requests == 2


def test_nothing_is_sent_again_after_the_first_byte_of_a_stream(recorded: bytes) -> None:
    part = recorded[: recorded.index(b"data: [DONE]") - 400]
    with playing(sending(part)) as player, Client(player.url) as client:
        _, error = read_stream(client)
        assert player.num_requests == 1
    assert isinstance(error, StreamBroken)
