from __future__ import annotations

import gc
import gzip
import json
import math
import os
import re
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.server.live_kserve import LiveKServe, copy_models
from tests.support.live_server import wait_until

NAMES = (
    "add_sub", "fails", "identity_bf16", "identity_string", "labelled", "pass", "repeat", "told", "types"
)  # fmt: skip
NUMBERS = [
    "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64"
]  # fmt: skip
PATIENT = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0]:
            while not request.is_cancelled():
                time.sleep(0.001)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.int32))])
"""
PATIENT_CONFIG = """
backend: "python"
input { name: "WAIT" data_type: TYPE_BOOL dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKServe]:
    folder = tmp_path_factory.mktemp("models")
    copy_models(NAMES, folder)
    (folder / "patient" / "1").mkdir(parents=True)
    (folder / "patient" / "config.pbtxt").write_text(PATIENT_CONFIG)
    (folder / "patient" / "1" / "model.py").write_text(PATIENT)
    with LiveKServe(folder, allow_client_shm=True, http_header_forward_pattern="^x-") as live:
        yield live


def post(server: LiveKServe, model: str, body: object, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(f"{server.url}/v2/models/{model}/infer", content=content, headers=named)


def input_of(name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def add_sub_inputs(*, binary: bool = True) -> list[triton.InferInput]:
    a, b = np.array([[1, 2.5]], np.float32), np.array([[0.1, -2]], np.float32)
    return [input_of("A", a, "FP32", binary=binary), input_of("B", b, "FP32", binary=binary)]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_numbers_round_trip_in_binary_and_in_json(client, binary_in: bool, binary_out: bool) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("SUM", "DIFFERENCE")]
    result = client.infer("add_sub", add_sub_inputs(binary=binary_in), outputs=outputs, request_id="7")
    np.testing.assert_array_equal(result.as_numpy("SUM"), np.array([[1 + np.float32(0.1), 0.5]], np.float32))
    assert result.get_response()["id"] == "7"


def test_without_requested_outputs_all_are_returned(client) -> None:
    result = client.infer("add_sub", add_sub_inputs())
    assert result.as_numpy("SUM").shape == result.as_numpy("DIFFERENCE").shape == (1, 2)


async def test_the_asyncio_client_is_served_too(server) -> None:
    async with triton_aio.InferenceServerClient(server.address) as client:
        result = await client.infer("add_sub", add_sub_inputs(binary=True))
        assert result.as_numpy("DIFFERENCE")[0, 1] == 4.5


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_requests_and_responses_can_be_compressed(client, algorithm: str) -> None:
    result = client.infer(
        "add_sub",
        add_sub_inputs(),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert result.as_numpy("SUM")[0, 1] == 0.5


def test_invalid_compression_is_rejected(server) -> None:
    rejected = post(server, "add_sub", b"no gzip", content_encoding="gzip")
    assert (rejected.status_code, rejected.json()["error"]) == (
        400,
        "the body is not gzip, as its Content-Encoding says",
    )
    cut = zlib.compress(b"{}" * 1000)[:-8]
    assert post(server, "add_sub", cut, content_encoding="deflate").status_code == 400


def test_unknown_compression_is_rejected_with_the_supported_ones(server) -> None:
    answer = post(server, "add_sub", {}, content_encoding="br")
    assert (answer.status_code, answer.headers["accept-encoding"]) == (501, "gzip, deflate")


@pytest.mark.parametrize("datatype", NUMBERS)
def test_every_type_of_numbers_passes_unchanged(client, datatype: str) -> None:
    name = {"BOOL": "bool"}.get(datatype, datatype.lower().replace("fp", "float"))
    array = np.array([0, 1, 1, 0, 1]).astype(name)
    result = client.infer("types", [input_of(datatype, array, datatype)])
    np.testing.assert_array_equal(result.as_numpy(f"OUT_{datatype}"), array)


def test_bf16_passes_in_binary(server) -> None:
    entry = {"name": "X", "shape": [2], "datatype": "BF16", "parameters": {"binary_data_size": 4}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    answer = post(server, "identity_bf16", head + b"abcd", inference_header_content_length=str(len(head)))
    assert answer.content.endswith(b"abcd"), answer.content


@pytest.mark.parametrize("binary", [True, False])
def test_strings_pass_unchanged(client, binary: bool) -> None:
    texts = np.array(["", "é\n\"", "😀" * 3], dtype=np.object_)
    outputs = [triton.InferRequestedOutput("Y", binary_data=binary)]
    result = client.infer("identity_string", [input_of("X", texts, "BYTES", binary=binary)], outputs=outputs)
    answered = [x.decode() if isinstance(x, bytes) else x for x in result.as_numpy("Y")]
    assert answered == texts.tolist()


def test_nan_and_infinities_pass_in_json(server) -> None:
    body = b'{"inputs":[{"name":"FP64","shape":[3],"datatype":"FP64","data":[NaN,Infinity,-Infinity]}]}'
    assert b'"data":[NaN,Infinity,-Infinity]' in post(server, "types", body).content


def test_fp32_is_printed_as_a_double(server) -> None:
    body = {"inputs": [{"name": "FP32", "shape": [2], "datatype": "FP32", "data": [0.1, [1]]}]}
    assert b'"data":[0.10000000149011612,1.0]' in post(server, "types", body).content


def test_inputs_after_a_string_are_aligned_and_writable(server) -> None:
    head = json.dumps(
        {
            "inputs": [
                {"name": "BYTES", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}},
                {"name": "FP64", "shape": [1], "datatype": "FP64", "parameters": {"binary_data_size": 8}},
            ]
        }
    ).encode()
    body = head + b"\x01\0\0\0a" + np.array([2.5]).tobytes()
    answer = post(server, "types", body, inference_header_content_length=str(len(head))).json()
    assert {output["name"]: output["data"] for output in answer["outputs"]} == {
        "OUT_BYTES": ["a"],
        "OUT_FP64": [2.5],
    }


def test_a_raw_body_is_the_only_input(server) -> None:
    answer = post(server, "pass", np.int32(5).tobytes(), inference_header_content_length="0")
    head_length = int(answer.headers["inference-header-content-length"])
    assert np.frombuffer(answer.content[head_length:], np.int32) == [5]


def test_classification_includes_labels(client) -> None:
    outputs = [triton.InferRequestedOutput("Y", class_count=2)]
    x = np.array([[1, 3, 2], [9, 8, 7]], np.float32)
    result = client.infer("labelled", [input_of("X", x, "FP32")], outputs=outputs)
    assert result.as_numpy("Y").tolist() == [
        [b"3.000000:1:dog", b"2.000000:2:bird"],
        [b"9.000000:0:cat", b"8.000000:1:dog"],
    ]


def test_a_repeated_output_is_rejected(client) -> None:
    outputs = [triton.InferRequestedOutput("SUM") for _ in range(2)]
    with pytest.raises(InferenceServerException, match="output 'SUM' already exists in request"):
        client.infer("add_sub", add_sub_inputs(binary=True), outputs=outputs)


def test_parameters_and_matching_headers_reach_the_model(client) -> None:
    result = client.infer(
        "told",
        [input_of("X", np.ones((1, 1), np.int32), "INT32")],
        outputs=[triton.InferRequestedOutput("REQUEST")],
        sequence_id=5,
        sequence_start=True,
        timeout=9,
        parameters={"depth": 1.5, "word": "w"},
        headers={"X-Who": "me", "Other-X-Who": "no"},
    )
    request = json.loads(result.as_numpy("REQUEST").reshape(-1)[0])
    assert request["parameters"] == {"depth": 1.5, "word": "w", "x-who": "me"}
    assert (request["correlation"], request["flags"], request["timeout"]) == (5, 1, 9)


def test_system_shared_memory_carries_inputs_and_outputs(client) -> None:
    path = Path("/dev/shm") / f"genserve-test-{os.getpid()}"
    path.write_bytes(np.array([[1, 2]], np.float32).tobytes() + bytes(24))
    try:
        client.register_system_shared_memory("region", f"/{path.name}", 32)
        inputs = add_sub_inputs()
        inputs[0].set_shared_memory("region", 8)
        output = triton.InferRequestedOutput("SUM")
        output.set_shared_memory("region", 8, offset=16)
        result = client.infer("add_sub", inputs, outputs=[output])
        assert "data" not in result.get_output("SUM")
        np.testing.assert_array_equal(
            np.frombuffer(path.read_bytes(), np.float32)[4:6], np.array([1.1, 0], np.float32)
        )
        assert client.get_system_shared_memory_status()[0]["byte_size"] == 32
        output.set_shared_memory("region", 4, offset=16)
        with pytest.raises(InferenceServerException, match=r"\(4 bytes\) should be at least 8 bytes"):
            client.infer("add_sub", inputs, outputs=[output])
        client.unregister_system_shared_memory("region")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'region'"):
            client.infer("add_sub", inputs)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("code", "status"), [("NOT_FOUND", 404), ("UNAVAILABLE", 503), ("UNSUPPORTED", 501), ("CANCELLED", 400)]
)
def test_an_error_of_the_model_has_the_status_of_its_code(server, code: str, status: int) -> None:
    body = {"inputs": [{"name": "MODE", "shape": [1], "datatype": "BYTES", "data": [code]}]}
    answer = post(server, "fails", body)
    assert (answer.status_code, answer.json()) == (status, {"error": f"this is {code}"})


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (b"[" * 5000, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
        (b"{}", 400, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (
            b'{"inputs":[{"name":"A","shape":[1,-1],"datatype":"FP32","data":[1]}]}',
            400,
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            b'{"inputs":[{"name":"A","shape":[1,2],"datatype":"FP32","data":[1,true]}]}',
            400,
            "Unable to parse 'data': attempt to access JSON non-number as double",
        ),
        (
            b'{"parameters":{"triton_x":1},"inputs":[]}',
            400,
            "parameter keys starting with 'triton_' are reserved for Triton usage "
            "and should not be specified.",
        ),
    ],
)
def test_invalid_requests_are_rejected_with_tritons_message(
    server, body: bytes, status: int, text: str
) -> None:
    answer = post(server, "add_sub", body)
    assert (answer.status_code, answer.json()["error"]) == (status, text)


def test_json_beyond_the_size_limit_is_rejected(tmp_path: Path) -> None:
    copy_models(("pass",), tmp_path)
    with LiveKServe(tmp_path, http_max_input_size=100) as small:
        answer = post(small, "pass", b" " * 101)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("request JSON size of 101 bytes exceeds the maximum allowed")


def test_infer_of_a_decoupled_model_is_rejected_with_a_remedy(server) -> None:
    answer = post(server, "repeat", {})
    assert answer.status_code == 501
    assert "generate_stream" in answer.json()["remedy"]


def test_a_disconnect_cancels_the_inference(server, client) -> None:
    waiting = input_of("WAIT", np.array([True]), "BOOL", binary=False)
    body = json.dumps({"inputs": [waiting._get_tensor()]}).encode()
    with server.connect() as connection:
        head = "POST /v2/models/patient/infer HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        # This request is answered while the other one waits, so the other one has arrived.
        client.infer("pass", [input_of("X", np.ones(1, np.int32), "INT32")])
    # There is one instance: it answers once the first request has noticed that nobody waits.
    client.infer("patient", [input_of("WAIT", np.array([False]), "BOOL")])


@pytest.mark.parametrize(
    ("size", "cut_text"), [(2**20, "gzip"), (2**22, "Decompressed data size")]
)
def test_a_compressed_body_is_limited_after_decompression(tmp_path: Path, size: int, cut_text: str) -> None:
    copy_models(("pass",), tmp_path)
    compressor = zlib.compressobj(wbits=31)
    body = compressor.compress(bytes(size)) + compressor.flush()
    with LiveKServe(tmp_path, http_max_input_size=2**20) as live:
        url = f"{live.url}/v2/models/pass/infer"
        answer = httpx2.post(url, content=body, headers={"Content-Encoding": "gzip"})
        cut = httpx2.post(url, content=body[:-1], headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert cut.status_code == 400
    assert cut_text in cut.json()["error"]
    if size > 2**20:  # what comes after the first byte too many was not looked at
        text = f"Decompressed data size exceeds the maximum allowed value of {2**20} bytes"
        assert text in answer.json()["error"]


@pytest.mark.parametrize(("size", "status"), [(4, 200), (8, 400)])
def test_a_raw_body_is_limited_too(tmp_path: Path, size: int, status: int) -> None:
    copy_models(("pass",), tmp_path)
    with LiveKServe(tmp_path, http_max_input_size=4) as live:
        headers = {"Inference-Header-Content-Length": "0"}
        answer = httpx2.post(f"{live.url}/v2/models/pass/infer", content=bytes(size), headers=headers)
    assert answer.status_code == status
    if status == 400:
        assert "Raw input has a byte_size (8 bytes) that exceeds" in answer.json()["error"]


def test_a_rejected_request_leaves_no_garbage(tmp_path: Path) -> None:
    copy_models(("pass",), tmp_path)
    body = gzip.compress(bytes(2**20))
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "9999999"}
    gc.disable()    # which would find cycles now and then
    try:
        with LiveKServe(tmp_path) as live, httpx2.Client() as client:
            url = f"{live.url}/v2/models/pass/infer"
            assert client.post(url, content=body, headers=headers).status_code == 400
            tracemalloc.start()
            for _ in range(10):
                client.post(url, content=body, headers=headers)
            # The last answer may arrive before its request is forgotten.
            wait_until(lambda: tracemalloc.get_traced_memory()[0] < 2**20, timeout_s=5)
    finally:
        tracemalloc.stop()
        gc.enable()


MANY = "9" * 5000


@pytest.mark.parametrize(
    ("path", "header", "text"),
    [
        (f"pass/versions/{MANY}/infer", "", "failed to get model version from specified version string"),
        ("pass/infer", MANY, "inference header size should be in range"),
    ],
)
def test_a_number_with_thousands_of_digits_is_rejected(server, path: str, header: str, text: str) -> None:
    headers = {"Inference-Header-Content-Length": header} if header else {}
    answer = httpx2.post(f"{server.url}/v2/models/{path}", content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["error"][: len(text)]) == (400, text)


@pytest.mark.parametrize("before", ["", "NaN,"])
def test_a_number_with_thousands_of_digits_is_not_data(server, before: str) -> None:
    entry = {"name": "X", "shape": [1], "datatype": "INT32", "data": [0]}
    body = json.dumps({"inputs": [entry]}).replace("[0]", f"[{before}-{MANY}]").encode()
    for how, content in (("infer", body), ("generate", b'{"X": %s}' % MANY.encode())):
        answer = httpx2.post(f"{server.url}/v2/models/pass/{how}", content=content)
        assert "Number too big to be stored in double. at " in answer.json()["error"]


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [1] * 100, [2**40, 2**40]])
def test_an_impossible_shape_is_rejected(server, shape: list[int]) -> None:
    entry = {"name": "INPUT0", "shape": shape, "datatype": "FP32"}
    for more in ({"data": []}, {"data": [1.0]}):
        answer = post(server, "add_sub", {"inputs": [entry | more]})
        assert answer.status_code == 400
        assert "the server failed" not in answer.text


@pytest.mark.parametrize("shape", [(60_000,), (20_000, 3)])
@pytest.mark.parametrize("datatype", ["FP32", "INT64"])
def test_a_long_list_of_numbers_in_json_is_the_tensor(server, datatype, shape):
    values = np.arange(math.prod(shape)).reshape(shape) / (4 if datatype == "FP32" else 1)
    numbers = values.astype({"FP32": np.float32, "INT64": np.int64}[datatype])
    x = {"name": datatype, "datatype": datatype, "shape": [numbers.size], "data": numbers.tolist()}
    response = post(server, "types", {"inputs": [x]})
    [y] = response.json()["outputs"]
    assert y["data"] == numbers.reshape(-1).tolist()


@pytest.mark.parametrize("broken", ["1,,2", "[1", "NaN]", "nothing", "1.2.3", '"a"', "1e400", "true"])
def test_a_long_list_has_the_errors_of_a_short_one(server, broken):
    def message(*numbers: str) -> str:
        data = f"[{','.join([*numbers, broken])}]"
        body = f'{{"inputs": [{{"name": "INT64", "datatype": "INT64", "shape": [1], "data": {data}}}]}}'
        response = post(server, "types", body.encode())
        assert response.status_code >= 400
        return re.sub(r"\d+", "N", response.json()["error"])

    assert message(*["25"] * 60_000) == message("25")
