"""Faults of tensors: KServe requests that contradict themselves or their model, over HTTP and gRPC."""

from __future__ import annotations

import gzip
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx2
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.faults.shared_server import CANARY, SharedServer
from tests.server.live_kserve import copy_models
from tests.support.live_server import LiveServer

X = {"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
A = {"name": "A", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
B = {**A, "name": "B"}
IDENTITY, STRING, ADD_SUB, TYPES = "identity_fp32", "identity_string", "add_sub", "types"
RAW = {"name": "X", "datatype": "FP32", "shape": [1, 4]}
TEXT = {"name": "X", "datatype": "BYTES", "shape": [2]}
FP16 = {"name": "FP16", "datatype": "FP16", "shape": [2]}


@pytest.fixture
def stub(server: SharedServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def x(**fields: Any) -> dict[str, Any]:
    """Return the input of identity_fp32 with other fields; None leaves one out."""
    return {name: value for name, value in {**X, **fields}.items() if value is not None}


def infer(server: SharedServer, model: str, body: Any, *, version: str = "") -> Any:
    return server.post(f"/v2/models/{model}{version}/infer", body)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (IDENTITY, {}),
        (IDENTITY, {"inputs": []}),
        (IDENTITY, {"inputs": X}),
        (IDENTITY, {"inputs": [7]}),
        (IDENTITY, {"inputs": [None]}),
        (IDENTITY, [X]),
        (IDENTITY, {"inputs": [x(name=None)]}),
        (IDENTITY, {"inputs": [x(name=7)]}),
        (IDENTITY, {"inputs": [x(shape=None)]}),
        (IDENTITY, {"inputs": [x(datatype=None)]}),
        (IDENTITY, {"inputs": [x(data=None)]}),
        (IDENTITY, {"inputs": [x(name="Z")]}),
        (IDENTITY, {"inputs": [X, X]}),
        (IDENTITY, {"inputs": [X], "outputs": [{"name": "Z"}]}),
        (IDENTITY, {"inputs": [X], "outputs": [{"name": "Y"}, {"name": "Y"}]}),
        (IDENTITY, {"inputs": [X], "outputs": {"name": "Y"}}),
        (IDENTITY, {"inputs": [x(datatype="FP33")]}),
        (IDENTITY, {"inputs": [x(datatype="fp32")]}),
        (IDENTITY, {"inputs": [x(datatype="INT32")]}),
        (IDENTITY, {"inputs": [x(datatype=32)]}),
        (IDENTITY, {"inputs": [x(shape=[16, 2**60 + 2])]}),
        (IDENTITY, {"inputs": [x(shape=[4, 2**60 + 2])]}),
        (IDENTITY, {"inputs": [x(shape=[10**9])]}),
        (IDENTITY, {"inputs": [x(shape=[1, 10**9])]}),
        (IDENTITY, {"inputs": [x(shape=[1, -4])]}),
        (IDENTITY, {"inputs": [x(shape=[1, 4.0])]}),
        (IDENTITY, {"inputs": [x(shape=["1", "4"])]}),
        (IDENTITY, {"inputs": [x(shape=[1] * 100)]}),
        (IDENTITY, {"inputs": [x(shape=4)]}),
        (IDENTITY, {"inputs": [x(data=[1, 2, 3])]}),
        (IDENTITY, {"inputs": [x(data=[1, 2, 3, 4, 5])]}),
        (IDENTITY, {"inputs": [x(data=[[1, 2], [3]])]}),
        (IDENTITY, {"inputs": [x(data=[])]}),
        (IDENTITY, {"inputs": [x(data="1234")]}),
        (IDENTITY, {"inputs": [x(data=[1, 2, 3, "4"])]}),
        (IDENTITY, {"inputs": [x(data=[1, 2, 3, None])]}),
        (IDENTITY, {"inputs": [x(data=[1, 2, 3, {"4": CANARY}])]}),
        (IDENTITY, {"inputs": [x(shape=[9, 4], data=[0] * 36)]}),
        (IDENTITY, {"inputs": [x(shape=[4])]}),
        (ADD_SUB, {"inputs": [A]}),
        (ADD_SUB, {"inputs": [A, {**B, "shape": [2, 1]}]}),
        (TYPES, {"inputs": [{**FP16, "data": [1.0, 2.0]}]}),
        (TYPES, {"inputs": [{"name": "BOOL", "datatype": "BOOL", "shape": [1], "data": [2]}]}),
        (STRING, {"inputs": [{**TEXT, "data": [1, 2]}]}),
        (IDENTITY, {"inputs": [X], "outputs": [{"name": "Y", "parameters": {"classification": -1}}]}),
        (IDENTITY, {"inputs": [X], "outputs": [{"name": "Y", "parameters": {"classification": "two"}}]}),
        (IDENTITY, {"inputs": [X], "parameters": {"priority": -1}}),
        (IDENTITY, {"inputs": [X], "parameters": {"sequence_start": "yes"}}),
        (IDENTITY, {"inputs": [X], "parameters": {"triton_x": 1}}),
        (IDENTITY, {"inputs": [X], "id": 7}),
    ],
    ids=str,
)
def test_json_that_contradicts_itself_or_the_model(server: SharedServer, model: str, body: Any) -> None:
    response = infer(server, model, body)
    assert response.status == 400, response.body
    assert response.error


@pytest.mark.parametrize("count", [2, 200_000], ids=["short", "read in slices"])
def test_an_integer_that_does_not_fit_is_rejected_with_its_place(server: SharedServer, count: int) -> None:
    data = [*[127] * (count - 1), 128]
    integers = {"name": "INT8", "datatype": "INT8", "shape": [count], "data": data}
    response = infer(server, TYPES, {"inputs": [integers]})
    assert response.status == 400
    assert f"element {count - 1} of input 'INT8' is 128" in response.error


@pytest.mark.parametrize("route", ["infer", "generate", "generate_stream"])
def test_a_number_that_does_not_fit_is_rejected_with_its_place(server: SharedServer, route: str) -> None:
    data = [1, 2, 1e39, 4]
    bodies = [{"X": data}, {"parameters": {"X": data}}] if route != "infer" else [{"inputs": [x(data=data)]}]
    for body in bodies:
        response = server.post(f"/v2/models/{IDENTITY}/{route}", body)
        assert response.status == 400
        assert "element 2 of input 'X' is 1e+39" in response.error


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_come_back_as_they_were_sent(server: SharedServer, name: str) -> None:
    body = json.dumps({"inputs": [X]}).replace("[1, 2, 3, 4]", f"[1, 2, 3, {name}]").encode()
    response = infer(server, IDENTITY, body)
    assert response.status in (200, 400)
    if response.status == 200:
        last = response.json()["outputs"][0]["data"][-1]
        assert math.isnan(last) or math.isinf(last)


def binary(server: SharedServer, model: str, entry: dict[str, Any], tail: bytes, **more: Any) -> Any:
    """Send one input in binary form; `size` and `length` are what the request says of the bytes."""
    size = more.get("size", len(tail))
    head = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": size}}]}).encode()
    length = more.get("length", len(head))
    headers = {"inference_header_content_length": str(length)} if length is not None else {}
    return server.post(f"/v2/models/{model}/infer", head + tail, **headers)


@pytest.mark.parametrize(
    ("entry", "tail", "more"),
    [
        (RAW, bytes(16), {"size": 12}),
        (RAW, bytes(16), {"size": 20}),
        (RAW, bytes(12), {}),
        (RAW, bytes(20), {}),
        (RAW, bytes(16), {"size": -16}),
        (RAW, bytes(16), {"size": "16"}),
        (RAW, bytes(16), {"size": 2**64}),
        (RAW, bytes(16), {"length": None}),
        (RAW, bytes(16), {"length": -1}),
        (RAW, bytes(16), {"length": "abc"}),
        (RAW, bytes(16), {"length": 99999999999}),
        (RAW, bytes(16), {"length": 10**30}),
        (RAW, bytes(16), {"length": 40}),
        (TEXT, struct.pack("<I", 5) + b"ab" + struct.pack("<I", 1) + b"c", {}),
        (TEXT, struct.pack("<I", 2**31) + b"abcdef", {}),
        (TEXT, struct.pack("<I", 1) + b"a", {}),
        (TEXT, (struct.pack("<I", 1) + b"a") * 3, {}),
        (TEXT, b"\0\0", {}),
        (TEXT, (struct.pack("<I", 1) + b"a") * 2 + b"more", {}),
    ],
    ids=str,
)
def test_binary_data_that_contradicts_its_head(
    server: SharedServer, entry: dict[str, Any], tail: bytes, more: dict[str, Any]
) -> None:
    model = STRING if entry is TEXT else IDENTITY
    response = binary(server, model, entry, tail, **more)
    assert response.status == 400, response.body
    assert response.error


@pytest.mark.parametrize(
    ("model", "tail", "status"),
    [
        (IDENTITY, bytes(16), 200),
        (IDENTITY, bytes(15), 400),
        (IDENTITY, b"", 400),
        (ADD_SUB, bytes(16), 400),
        (STRING, b"\xff\xff\xff\xff", 400),
    ],
)
def test_a_body_that_is_only_data(server: SharedServer, model: str, tail: bytes, status: int) -> None:
    response = server.post(f"/v2/models/{model}/infer", tail, inference_header_content_length="0")
    assert response.status == status, response.body


LIMIT = 1000
ONE = {"name": "X", "datatype": "BYTES", "shape": [1]}
TEXT_OF_ONE = {"inputs": [{**ONE, "data": ["one"]}]}
BINARY_TEXT = {"inputs": [{**ONE, "parameters": {"binary_data_size": 5004}}]}
HEADER_LENGTH = "inference-header-content-length"
GENERATE = {"text_input": "one", "max_tokens": 1}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that takes `LIMIT` bytes."""
    root = tmp_path_factory.mktemp("limited")
    copy_models((STRING, "generate"), root)
    config = root / STRING / "config.pbtxt"
    config.write_text(config.read_text().replace("-1", "1"))    # so that it takes a raw body
    with LiveServer(root, http_max_input_size=LIMIT) as live:
        yield live.url


def sized(document: Any, size: int) -> bytes:
    """Return a document of this many bytes."""
    return json.dumps(document).encode().ljust(size)


def in_chunks(content: bytes) -> Iterator[bytes]:
    yield from (content[:100], content[100:])


# A body whose limited part has so many bytes, and its headers.
BODIES: dict[str, Callable[[int], tuple[Any, dict[str, str]]]] = {
    "json": lambda size: (sized(TEXT_OF_ONE, size), {}),
    "json-in-chunks": lambda size: (in_chunks(sized(TEXT_OF_ONE, size)), {}),
    "json-of-a-binary-request": lambda size: (
        sized(BINARY_TEXT, size) + struct.pack("<I", 5000) + bytes(5000), {HEADER_LENGTH: str(size)}
    ),
    "gzip": lambda size: (gzip.compress(sized(TEXT_OF_ONE, size)), {"content-encoding": "gzip"}),
    "deflate": lambda size: (zlib.compress(sized(TEXT_OF_ONE, size)), {"content-encoding": "deflate"}),
    "raw": lambda size: (bytes(size), {HEADER_LENGTH: "0"}),
    "raw-gzip": lambda size: (gzip.compress(bytes(size)), {HEADER_LENGTH: "0", "content-encoding": "gzip"}),
    "generate": lambda size: (sized(GENERATE, size), {}),
}  # fmt: skip


@pytest.mark.parametrize(("beyond", "status"), [(-1, 200), (0, 200), (1, 400)], ids=["below", "at", "beyond"])
@pytest.mark.parametrize("kind", BODIES)
def test_a_body_of_about_the_limit(limited: str, kind: str, beyond: int, status: int) -> None:
    content, headers = BODIES[kind](LIMIT + beyond)
    action = "generate/generate" if kind == "generate" else f"{STRING}/infer"
    response = httpx2.post(f"{limited}/v2/models/{action}", content=content, headers=headers)
    assert response.status_code == status, response.text
    assert status == 200 or "--http-max-input-size" in response.json()["error"]


@pytest.mark.parametrize(
    ("version", "status"),
    [("1", 200), ("01", 200), ("0", 404), ("-1", 404), ("latest", 404), ("1%2F..%2F2", 404), ("9", 404)],
)
def test_versions(server: SharedServer, version: str, status: int) -> None:
    response = infer(server, IDENTITY, {"inputs": [X]}, version=f"/versions/{version}")
    assert response.status == status, response.body


def test_a_tensor_without_elements(server: SharedServer) -> None:
    body = {"inputs": [{"name": "X", "datatype": "BYTES", "shape": [0], "data": []}]}
    response = infer(server, STRING, body)
    assert (response.status, response.json()["outputs"][0]["data"]) == (200, [])


@pytest.mark.parametrize("path", ["", "/ready", "/config", "/stats", "/versions/1", "/trace/setting"])
def test_an_unknown_model(server: SharedServer, path: str) -> None:
    response = server.get(f"/v2/models/nothing{path}")
    assert response.status in (400, 404)


def message(**fields: Any) -> service_pb2.ModelInferRequest:
    return service_pb2.ModelInferRequest(**{"model_name": IDENTITY, **fields})


def entry(**fields: Any) -> service_pb2.ModelInferRequest.InferInputTensor:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 4], **fields}
    return service_pb2.ModelInferRequest.InferInputTensor(**tensor)


Output = service_pb2.ModelInferRequest.InferRequestedOutputTensor


@pytest.mark.parametrize(
    "request_message",
    [
        message(),
        message(inputs=[entry()]),
        message(inputs=[entry(name="")], raw_input_contents=[bytes(16)]),
        message(inputs=[entry(datatype="")], raw_input_contents=[bytes(16)]),
        message(inputs=[entry(datatype="FP64")], raw_input_contents=[bytes(32)]),
        message(inputs=[entry(shape=[])], raw_input_contents=[bytes(16)]),
        message(inputs=[entry(shape=[16, 2**60 + 2])], raw_input_contents=[bytes(16)]),
        message(inputs=[entry(shape=[-1, -4])], raw_input_contents=[bytes(16)]),
        message(inputs=[entry(shape=[9, 4])], raw_input_contents=[bytes(144)]),
        message(inputs=[entry()], raw_input_contents=[bytes(15)]),
        message(inputs=[entry()], raw_input_contents=[bytes(17)]),
        message(inputs=[entry(), entry()], raw_input_contents=[bytes(16), bytes(16)]),
        message(inputs=[entry()], raw_input_contents=[bytes(16)], outputs=[Output(name="Z")]),
        message(inputs=[entry()], raw_input_contents=[bytes(16)], outputs=[Output(name="Y")] * 2),
        message(inputs=[entry()], raw_input_contents=[bytes(16)], model_version="latest"),
        message(
            model_name=STRING, inputs=[entry(datatype="BYTES", shape=[2])], raw_input_contents=[bytes(6)]
        ),
        message(
            model_name=STRING,
            inputs=[entry(datatype="BYTES", shape=[1])],
            raw_input_contents=[struct.pack("<I", 2**31) + b"ab"],
        ),
        message(model_name=ADD_SUB, inputs=[entry(name="A", shape=[1, 2])], raw_input_contents=[bytes(8)]),
        message(
            model_name="tiny_logits",
            inputs=[entry(name="input_ids", datatype="INT64", shape=[0, 0])],
            raw_input_contents=[b""],
        ),
    ],
    ids=lambda request: str(request).replace("\n", " "),
)
def test_a_message_that_contradicts_itself_or_the_model(stub: Any, request_message: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request_message, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    assert caught.value.details()


def test_an_ensemble_gives_a_negative_sequence_id_back(stub: Any) -> None:
    inputs = [entry(name="A", shape=[1, 2]), entry(name="B", shape=[1, 2])]
    asked = message(model_name="ensemble_linear", inputs=inputs, raw_input_contents=[bytes(8)] * 2)
    asked.parameters["sequence_id"].int64_param = -1
    assert stub.ModelInfer(asked, timeout=20).parameters["sequence_id"].int64_param == -1


def test_an_unknown_model_over_grpc(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message(model_name="nothing"), timeout=20)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
