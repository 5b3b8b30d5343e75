"""Faults of gRPC: messages, calls and connections that the server has to reject or to survive."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from genserve.server.kserve.grpc import grpc_server
from tests.faults.shared_server import SharedServer
from tests.server.live_kserve import copy_models
from tests.support.live_server import LiveServer

SERVICE = "/inference.GRPCInferenceService"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9     # kinds of frames
END_STREAM, END_HEADERS = 1, 4      # their flags
LIMIT = 10_000
RECEIVED = "grpc.max_receive_message_length"
NAMES = {":method": "POST", ":scheme": "http", ":authority": "localhost"}
NAMES |= {"content-type": "application/grpc", "te": "trailers"}


@pytest.fixture
def channel(server: SharedServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as connected:
        yield connected


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def infer(**fields: Any) -> service_pb2.ModelInferRequest:
    """Return a valid request to identity_fp32, with other fields."""
    message = service_pb2.ModelInferRequest(**{"model_name": "identity_fp32", **fields})
    message.inputs.add(name="X", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(bytes(16))
    return message


def text() -> service_pb2.ModelInferRequest:
    """Return a request for 200 tokens of the text model."""
    message = service_pb2.ModelInferRequest(model_name="tiny")
    words = message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    words.contents.bytes_contents.append(b"far away")
    for name in ("max_tokens", "min_tokens"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 1]).contents.int_contents.append(200)
    return message


def repeated(count: int) -> service_pb2.ModelInferRequest:
    """Return a request for many responses."""
    message = service_pb2.ModelInferRequest(model_name="repeat")
    message.inputs.add(name="N", datatype="INT32", shape=[1]).contents.int_contents.append(count)
    return message


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


START = PREFACE + frame(SETTINGS, 0, 0)


def read_until(kind: int, received: BinaryIO) -> None:
    """Read frames up to the first of a kind."""
    found = -1
    while found != kind:
        start = received.read(9)
        found = start[3]
        received.read(int.from_bytes(start[:3], "big"))


def head(stream: int, *, method: str = "ServerLive", flags: int = END_HEADERS, **more: str) -> bytes:
    """Return a HEADERS frame whose names and values are literals, without compression."""
    names = {**NAMES, ":path": f"{SERVICE}/{method}", **more}
    ordered = sorted(names.items(), key=lambda item: not item[0].startswith(":"))
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in ordered
    )
    return frame(HEADERS, flags, stream, block)


def status(call: Any, *arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=20, **options)
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(
    "path",
    [
        f"{SERVICE}/Nothing",
        "/nothing/ModelInfer",
        "/",
        f"{SERVICE}/modelinfer",
        "/grpc.channelz.v1.Channelz/GetServers",    # would show the connections of others
    ],
)
def test_an_unknown_method(channel: grpc.Channel, path: str) -> None:
    assert status(channel.unary_unary(path), b"")[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["ModelInfer", "RepositoryModelLoad", "ModelConfig"])
@pytest.mark.parametrize(
    "content",
    [
        random.Random(1).randbytes(1000),
        infer().SerializeToString()[:-3],
        b"\x0b" * 10_000,
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a\x02\xff\xfe",
    ],
    ids=["random", "truncated", "groups-nested", "length-beyond-the-end", "name-is-no-utf-8"],
)
def test_bytes_that_are_no_message(channel: grpc.Channel, method: str, content: bytes) -> None:
    code, details = status(channel.unary_unary(f"{SERVICE}/{method}"), content)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The gRPC address of a server that takes messages of `LIMIT` bytes: its own limit is 2 GiB."""
    root = tmp_path_factory.mktemp("limited")
    copy_models(("identity_fp32",), root)
    with pytest.MonkeyPatch.context() as patch:
        others = [option for option in grpc_server._OPTIONS if option[0] != RECEIVED]
        patch.setattr(grpc_server, "_OPTIONS", (*others, (RECEIVED, LIMIT)))
        with LiveServer(root) as live:
            yield live.grpc_url


def sized(size: int) -> service_pb2.ModelInferRequest:
    """Return a valid request of this many bytes."""
    message = infer(id="x" * 1000)
    message.id = "x" * (1000 + size - message.ByteSize())
    return message


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_message_of_about_the_limit(limited: str, method: str) -> None:
    with grpc.insecure_channel(limited) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def send(size: int) -> Any:
            if method == "ModelInfer":
                return stub.ModelInfer(sized(size), timeout=20)
            [answer] = stub.ModelStreamInfer(iter([sized(size)]), timeout=20)
            return answer.infer_response

        for size in (LIMIT - 1, LIMIT):
            assert send(size).raw_output_contents == [bytes(16)]
        with pytest.raises(grpc.RpcError) as caught:
            send(LIMIT + 1)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert send(LIMIT).raw_output_contents == [bytes(16)]


def test_a_message_beyond_the_default_limit_of_grpc_is_accepted(server: SharedServer) -> None:
    with grpc.insecure_channel(server.grpc_address, options=[(RECEIVED, -1)]) as channel:
        infer_model = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        assert infer_model(sized(5 * 2**20), timeout=20).model_name == "identity_fp32"


def test_unknown_fields_are_ignored(channel: grpc.Channel) -> None:
    content = infer().SerializeToString() + b"\xfa\x3f\x04more"
    answer = channel.unary_unary(f"{SERVICE}/ModelInfer")(content, timeout=20)
    assert service_pb2.ModelInferResponse.FromString(answer).raw_output_contents == [bytes(16)]


def test_a_stream_ends_at_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
    answers = call(iter([infer().SerializeToString(), b"\xff"]), timeout=20)
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("num_answers", [0, 5], ids=["before-the-first-token", "while-streaming"])
def test_a_stream_is_cancelled(stub: Any, num_answers: int) -> None:
    answers = stub.ModelStreamInfer(iter([text(), repeated(100_000 if num_answers else 0)]), timeout=20)
    for _ in range(num_answers):
        assert next(answers).error_message == ""
    assert answers.cancel()
    assert not answers.cancel()     # once is enough
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("timeout_s", [0.001, 0.05, 0.2], ids=["at-once", "while-waiting", "mid-stream"])
def test_a_deadline_passes(stub: Any, timeout_s: float) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.ModelStreamInfer(iter([text(), repeated(100_000)]), timeout=timeout_s))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_many_calls_are_cancelled_at_once(stub: Any) -> None:
    calls = [stub.ModelInfer.future(infer()) for _ in range(200)]
    for call in calls:
        call.cancel()
    assert stub.ModelInfer(infer(), timeout=20).model_name == "identity_fp32"


@pytest.mark.parametrize(
    "metadata",
    [
        [("x-long", "x" * 100_000)],
        [(f"x-{number}", "value") for number in range(1000)],
        [("x-text-bin", b"\xff\x00" * 20_000)],
    ],
    ids=["100-kb", "1000-keys", "binary-40-kb"],
)
def test_metadata_beyond_the_limit(stub: Any, metadata: list[tuple[str, Any]]) -> None:
    code, _ = status(stub.ServerLive, service_pb2.ServerLiveRequest(), metadata=metadata)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=20).live


@pytest.mark.parametrize(
    "sent",
    [
        lambda: START + frame(PING, 0, 0, bytes(8)) * 5000,
        lambda: PREFACE + frame(SETTINGS, 0, 0) * 5000,
        lambda: START + b"".join(head(n) + frame(RST_STREAM, 0, n, bytes(4)) for n in range(1, 10_001, 2)),
        lambda: START + b"".join(map(head, range(1, 20_001, 2))),
        lambda: START + frame(HEADERS, END_HEADERS, 1, b"\xff" * 100),
        lambda: START + head(1, flags=0) + frame(CONTINUATION, 0, 1, bytes(16_000)) * 100,
        lambda: PREFACE + frame(DATA, 0, 1, b"no headers"),
        lambda: b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda: random.Random(2).randbytes(100_000),
    ],
    ids=[
        "pings", "settings", "calls-and-resets", "10000-calls-without-an-end", "headers-that-are-no-hpack",
        "headers-without-an-end", "data-before-headers", "http-1", "random-bytes",
    ],
)  # fmt: skip
def test_a_connection_that_breaks_the_rules_of_http_2(
    server: SharedServer, stub: Any, sent: Callable[[], bytes]
) -> None:
    with server.connect(port="grpc") as connection:
        with suppress(ConnectionError):     # closed while it still sent
            connection.sendall(sent())
        assert stub.ModelInfer(infer(), timeout=20).model_name == "identity_fp32"


def test_grpc_to_the_http_port_is_told_what_it_is(server: SharedServer) -> None:
    with server.connect() as connection:
        connection.sendall(START + head(1))
        assert b"400" in connection.recv(100)


@pytest.mark.parametrize("end", ["closed", "reset"])
def test_a_connection_ends_while_its_calls_run(server: SharedServer, end: str) -> None:
    message = text().SerializeToString()
    body = b"\0" + struct.pack(">I", len(message)) + message
    with server.connect(port="grpc") as connection:
        if end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for number in range(20):
            stream = 2 * number + 1
            connection.sendall(
                (START if not number else b"")
                + head(stream, method="ModelStreamInfer") + frame(DATA, END_STREAM, stream, body)
            )
        connection.recv(65536)


@pytest.mark.parametrize("end", ["call-reset", "connection-closed"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_client_leaves_without_its_answer(server: SharedServer, stub: Any, method: str, end: str) -> None:
    message = infer().SerializeToString()
    no_window = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))     # for the data of the answer
    with server.connect(port="grpc") as connection, connection.makefile("rb") as received:
        body = b"\0" + struct.pack(">I", len(message)) + message
        connection.sendall(PREFACE + no_window + head(1, method=method) + frame(DATA, END_STREAM, 1, body))
        read_until(HEADERS, received)
        if end == "call-reset":
            connection.sendall(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)) + frame(PING, 0, 0, bytes(8)))
            read_until(PING, received)
    assert stub.ModelInfer(infer(), timeout=20).model_name == "identity_fp32"
