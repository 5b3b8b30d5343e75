"""Faults of HTTP: what a client may send to any route, over a socket of its own, and what it is told."""

from __future__ import annotations

import json
import re
import socket
import struct
import zlib
from collections.abc import Callable

import pytest

from genserve.server.http.http_protocol import MAX_CHUNKS, MAX_HEAD_BYTES, MAX_HEADERS, MAX_URI_BYTES
from tests.faults.shared_server import CANARY, Response, SharedServer, read_response

HOST = b"Host: localhost\r\n"
BODY = json.dumps({"prompt": CANARY, "max_tokens": 1}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
INFER_PATH = "/v2/models/identity_fp32/infer"
INFER = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def request(
    *lines: bytes, target: bytes = b"GET /v1/models", version: bytes = b"1.1", body: bytes = b""
) -> bytes:
    head = b"".join(line + b"\r\n" for line in lines)
    return target + b" HTTP/" + version + b"\r\n" + head + b"\r\n" + body


def completion(*lines: bytes, body: bytes = BODY, **more: bytes) -> bytes:
    host = HOST.strip()
    return request(host, *lines, target=b"POST /v1/completions", body=body, **more)


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def assert_rejected(response: Response, *, status: int, closes: bool = True) -> None:
    assert (response.status, response.closed) == (status, closes)
    assert response.headers["content-type"] == "application/json"
    assert response.error
    assert CANARY not in response.error


def head_of(num_bytes: int) -> bytes:
    """A request whose target and header fields have so many bytes, as the server counts them."""
    others = len("/v1/models" + "Host: localhost\r\n" + "\r\n")
    return request(b"Host: localhost", b"X: ".ljust(num_bytes - others, b"a"))


MALFORMED = {
    "content-length-of-letters": completion(b"Content-Length: abc"),
    "content-length-empty": completion(b"Content-Length: "),
    "content-length-negative": completion(b"Content-Length: -1"),
    "content-length-beyond-64-bits": completion(b"Content-Length: 18446744073709551616"),
    "content-length-with-plus": completion(b"Content-Length: +5"),
    "content-length-in-hexadecimal": completion(b"Content-Length: 0x10"),
    "content-length-list": completion(b"Content-Length: 5,5"),
    "content-length-twice": completion(LENGTH.strip(), LENGTH.strip()),
    "content-length-twice-and-different": completion(LENGTH.strip(), b"Content-Length: 3"),
    "content-length-and-chunked": completion(
        LENGTH.strip(), b"Transfer-Encoding: chunked", body=chunked(BODY)
    ),
    "transfer-encoding-gzip": completion(b"Transfer-Encoding: gzip, chunked", body=chunked(BODY)),
    "transfer-encoding-unknown": completion(b"Transfer-Encoding: xchunked", body=chunked(BODY)),
    "transfer-encoding-twice": completion(b"Transfer-Encoding: chunked, chunked", body=chunked(BODY)),
    "transfer-encoding-in-two-lines": completion(*[b"Transfer-Encoding: chunked"] * 2, body=chunked(BODY)),
    "transfer-encoding-identity": completion(b"Transfer-Encoding: identity", body=chunked(BODY)),
    "chunks-in-version-1.0": completion(b"Transfer-Encoding: chunked", body=chunked(BODY), version=b"1.0"),
    "chunk-size-of-letters": completion(b"Transfer-Encoding: chunked", body=b"zz\r\n" + BODY),
    "chunk-size-beyond-64-bits": completion(b"Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n" + BODY),
    "chunk-longer-than-its-size": completion(b"Transfer-Encoding: chunked", body=b"1\r\n" + BODY),
    "host-missing": request(),
    "host-twice": request(b"Host: localhost", b"Host: localhost"),
    "host-with-a-path": request(b"Host: localhost/v2"),
    "host-with-a-query": request(b"Host: localhost?a"),
    "host-with-a-fragment": request(b"Host: a#@localhost"),
    "host-with-a-space": request(b"Host: local host"),
    "method-unknown": request(b"Host: localhost", target=b"FOO /v1/models"),
    "method-connect": request(b"Host: localhost", target=b"CONNECT localhost:80"),
    "method-connect-to-a-path": request(b"Host: localhost", target=b"CONNECT /v1/models"),
    "target-with-nul": request(b"Host: localhost", target=b"GET /\0"),
    "target-in-overlong-utf-8": request(b"Host: localhost", target=b"GET /\xc0\xaf"),
    "version-9.9": request(b"Host: localhost", version=b"9.9"),
    "http-2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100,
    "line-feeds-alone": b"GET /v1/models HTTP/1.1\nHost: localhost\n\n",
    "header-with-nul": request(b"Host: localhost", b"X: a\0b"),
    "header-with-carriage-return": request(b"Host: localhost", b"X: a\rb"),
    "header-folded": request(b"Host: localhost", b"X: a\r\n b"),
    "header-name-with-a-space": request(b"Host: localhost", b"X : a"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_http_is_rejected_and_its_connection_closed(server: SharedServer, data: bytes) -> None:
    assert_rejected(server.exchange(data), status=400)


# Written by their tests: every process of the tests imports this module.
LIMITS = {
    "header-fields": (lambda: request(b"Host: localhost", *[b"X: 1"] * (MAX_HEADERS - 1)), 200),
    "header-fields-and-one": (lambda: request(b"Host: localhost", *[b"X: 1"] * MAX_HEADERS), 431),
    "header-fields-200000": (lambda: request(b"Host: localhost", *[b"X: 1"] * 200_000), 431),
    "head": (lambda: head_of(MAX_HEAD_BYTES), 200),
    "head-and-one": (lambda: head_of(MAX_HEAD_BYTES + 1), 431),
    "head-of-50-mb": (lambda: head_of(50_000_000), 431),
    "target": (lambda: request(b"Host: localhost", target=b"GET /".ljust(4 + MAX_URI_BYTES, b"a")), 404),
    "target-and-one": (
        lambda: request(b"Host: localhost", target=b"GET /".ljust(5 + MAX_URI_BYTES, b"a")), 414
    ),
    "target-of-100-kb": (lambda: request(b"Host: localhost", target=b"GET /".ljust(100_000, b"a")), 414),
    "chunks-and-one": (
        lambda: completion(b"Transfer-Encoding: chunked", body=chunked(*[b" "] * (MAX_CHUNKS + 1))), 413
    ),
    "chunks-without-end": (
        lambda: completion(b"Transfer-Encoding: chunked", body=chunked(*[b" "] * 200_000)[:-5]), 413
    ),
    "body": (lambda: completion(b"Content-Length: 8388609"), 413),
    "body-of-2^63": (lambda: completion(b"Content-Length: 9223372036854775807"), 413),
}  # fmt: skip


@pytest.mark.parametrize(("data", "status"), LIMITS.values(), ids=LIMITS)
def test_a_limit_holds_exactly(server: SharedServer, data: Callable[[], bytes], status: int) -> None:
    sent = data()
    with server.connect() as connection:
        try:
            connection.sendall(sent)
        except ConnectionError:
            assert status >= 400  # it need not read the rest
        response = read_response(connection)
    if status >= 400:
        assert_rejected(response, status=status, closes=response.closed)
    else:
        assert response.status == status


def test_as_many_chunks_as_allowed_are_one_body(server: SharedServer) -> None:
    padding = [b" "] * (MAX_CHUNKS - len(BODY))     # the last chunk, which is empty, does not count
    parts = [bytes([byte]) for byte in BODY]
    data = completion(b"Transfer-Encoding: chunked", body=chunked(*padding, *parts))
    assert server.exchange(data).status == 200


PATHS = ["/nowhere", "/V2", "/v1/chat/completions/", "/generate/", "/v2/models/", "//v1/models"]


@pytest.mark.parametrize("path", [*PATHS, "/page/%00", "/page/..%2f..%2fapp.py", "/v2/models/..%2f..%2fetc"])
def test_a_path_that_no_route_has_is_404(server: SharedServer, path: str) -> None:
    assert_rejected(server.get(path), status=404, closes=False)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/api/chat", INFER_PATH])
@pytest.mark.parametrize("method", ["PUT", "TRACE", "GET"])
def test_another_method_is_405_and_says_which_one_is_right(
    server: SharedServer, path: str, method: str
) -> None:
    response = server.exchange(request(b"Host: localhost", target=f"{method} {path}".encode()))
    assert_rejected(response, status=405, closes=False)
    assert response.headers["allow"] == "POST"


CODINGS = {
    "gzip": (b"Content-Encoding: gzip", zlib.compress(BODY, wbits=31)),
    "gzip-of-a-plain-body": (b"Content-Encoding: gzip", BODY),
    "deflate": (b"Content-Encoding: deflate", zlib.compress(BODY)),
    "brotli": (b"Content-Encoding: br", BODY),
    "utf-16-declared": (b"Content-Type: application/json; charset=utf-16", BODY),
}


@pytest.mark.parametrize(("line", "body"), CODINGS.values(), ids=CODINGS)
def test_a_coded_body_is_415(server: SharedServer, line: bytes, body: bytes) -> None:
    data = completion(line, b"Content-Length: %d" % len(body), body=body)
    assert_rejected(server.exchange(data), status=415, closes=False)


PLAIN_PATHS = [
    "/v2/models/generate/generate",
    "/v2/models/generate/generate_stream",
    "/v2/repository/index",
    "/v2/repository/models/none/load",
    "/v2/repository/models/none/unload",
    "/v2/logging",
    "/v2/trace/setting",
]


@pytest.mark.parametrize("path", PLAIN_PATHS)
def test_a_coded_body_is_415_on_the_routes_of_kserve_that_do_not_decompress(
    server: SharedServer, path: str
) -> None:
    body = zlib.compress(b"{}", wbits=31)
    lines = (b"Host: localhost", b"Content-Encoding: gzip", b"Content-Length: %d" % len(body))
    response = server.exchange(request(*lines, target=f"POST {path}".encode(), body=body))
    assert_rejected(response, status=415, closes=False)
    assert "'gzip'" in response.error


INFER_BODY = json.dumps(INFER).encode()


def _bomb() -> bytes:
    return zlib.compress(b" " * (64 * 2**20 + 1), wbits=31)


COMPRESSED = {
    "gzip": (b"gzip", lambda: zlib.compress(INFER_BODY, wbits=31), 200),
    "deflate": (b"deflate", lambda: zlib.compress(INFER_BODY), 200),
    "gzip-cut": (b"gzip", lambda: zlib.compress(INFER_BODY, wbits=31)[:-9], 400),
    "gzip-with-a-wrong-checksum": (b"gzip", lambda: zlib.compress(INFER_BODY, wbits=31)[:-8] + bytes(8), 400),
    "gzip-twice": (b"gzip", lambda: zlib.compress(zlib.compress(INFER_BODY, wbits=31), wbits=31), 400),
    "gzip-bomb": (b"gzip", _bomb, 400),
    "gzip-of-a-plain-body": (b"gzip", lambda: INFER_BODY, 400),
}


@pytest.mark.parametrize(("coding", "body", "status"), COMPRESSED.values(), ids=COMPRESSED)
def test_an_infer_body_is_decompressed_up_to_its_limit(
    server: SharedServer, coding: bytes, body: Callable[[], bytes], status: int
) -> None:
    sent = body()
    lines = (b"Host: localhost", b"Content-Encoding: " + coding, b"Content-Length: %d" % len(sent))
    data = request(*lines, target=f"POST {INFER_PATH}".encode(), body=sent)
    response = server.exchange(data)
    assert response.status == status, response.body


def test_an_infer_body_that_is_declared_too_large_is_not_awaited(server: SharedServer) -> None:
    lines = (b"Host: localhost", b"Content-Length: 100000000")
    response = server.exchange(request(*lines, target=f"POST {INFER_PATH}".encode(), body=b"{"))
    assert response.status == 400
    assert "exceeds the maximum allowed input size" in response.error


def test_requests_in_one_packet_are_answered_in_order(server: SharedServer) -> None:
    ids = [f"packet-{number}" for number in range(100)]
    with server.connect() as connection:
        connection.sendall(b"".join(request(b"Host: localhost", f"X-Request-Id: {i}".encode()) for i in ids))
        received = b""
        while received.count(b"x-request-id") < 100:
            received += connection.recv(2**20)
    assert re.findall(r"x-request-id: (\S+)", received.decode()) == ids


def test_what_follows_a_request_is_rejected_after_its_answer(server: SharedServer) -> None:
    with server.connect() as connection:
        connection.sendall(completion(LENGTH.strip()) + b"garbage\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"400"]


def test_more_requests_in_one_packet_than_wait_for_answers_end_the_connection(server: SharedServer) -> None:
    with server.connect() as connection:
        connection.sendall(request(b"Host: localhost", target=b"GET /v2/health/live") * 300)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    statuses = re.findall(rb"HTTP/1.1 (\d+)", received)
    assert set(statuses[:-1]) == {b"200"}
    assert statuses[-1] == b"400"


UPGRADES = {
    "websocket": (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"),
    # As Java's HttpClient does.
    "http-2": (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAI"),
}


@pytest.mark.parametrize("lines", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("pieces", [1, 2])
def test_an_offer_to_upgrade_is_ignored(server: SharedServer, lines: tuple[bytes, ...], pieces: int) -> None:
    data = completion(LENGTH.strip(), *lines)
    with server.connect() as connection:
        for _ in range(2):  # the connection goes on
            if pieces == 2:
                connection.sendall(data[: -len(BODY) // 2])
                data_left = data[-len(BODY) // 2 :]
            else:
                data_left = data
            connection.sendall(data_left)
            assert read_response(connection).status == 200


def test_a_body_is_awaited_with_100_continue(server: SharedServer) -> None:
    with server.connect() as connection:
        connection.sendall(completion(b"Expect: 100-continue", LENGTH.strip(), body=b""))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert read_response(connection).status == 200


def test_head_and_body_of_an_answer_are_one_packet(server: SharedServer) -> None:
    with server.connect() as connection:
        for _ in range(5):
            connection.sendall(completion(LENGTH.strip()))
            head, _, body = connection.recv(2**16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert body.endswith(b"}")


def test_a_trailer_is_no_header(server: SharedServer) -> None:
    trailers = b"0\r\nHost: evil.example\r\nContent-Encoding: gzip\r\n\r\n"
    data = completion(b"Transfer-Encoding: chunked", body=chunked(BODY)[:-5] + trailers)
    assert server.exchange(data).status == 200


IGNORED = [b"Accept: application/xml", b"Range: bytes=0-1", b'If-None-Match: "*"', b"Expect: nothing"]


@pytest.mark.parametrize("line", IGNORED, ids=lambda line: line.partition(b":")[0].decode().lower())
def test_a_header_without_effect_is_ignored(server: SharedServer, line: bytes) -> None:
    response = server.exchange(request(b"Host: localhost", line))
    assert response.status == 200
    assert response.json()["object"] == "list"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", INFER_PATH, "/nowhere"])
@pytest.mark.parametrize("sent", [0, 10, len(BODY)])
def test_a_reset_is_no_fault_of_the_server(server: SharedServer, path: str, sent: int) -> None:
    data = request(b"Host: localhost", LENGTH.strip(), target=f"POST {path}".encode(), body=BODY[:sent])
    connection = server.connect()
    connection.sendall(data)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_head_of_a_rejected_request_has_no_body(server: SharedServer) -> None:
    data = request(b"Host: localhost", target=b"HEAD /" + b"a" * MAX_URI_BYTES)
    with server.connect() as connection:
        connection.sendall(data)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert received.startswith(b"HTTP/1.1 414")
    assert received.endswith(b"\r\n\r\n")


METRICS = {
    "header-fields": (request(b"Host: localhost", *[b"X: 1"] * 200, target=b"GET /metrics"), 431),
    "head": (request(b"Host: localhost", b"X: " + b"a" * 70_000, target=b"GET /metrics"), 431),
    "target": (request(b"Host: localhost", target=b"GET /" + b"a" * 100_000), 414),
    "method": (request(b"Host: localhost", target=b"POST /metrics"), 405),
    "host-twice": (request(b"Host: localhost", b"Host: localhost", target=b"GET /metrics"), 400),
}


@pytest.mark.parametrize(("data", "status"), METRICS.values(), ids=METRICS)
def test_the_metrics_port_has_limits_too(server: SharedServer, data: bytes, status: int) -> None:
    response = server.exchange(data, port="metrics")
    assert (response.status, response.closed) == (status, True)
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert len(response.body) < 200
