from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import httpx2
import pytest

from tests.server.live_kserve import LiveKServe, copy_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKServe]:
    folder = tmp_path_factory.mktemp("models")
    copy_models(("generate", "generate_batch", "repeat", "fails", "add_sub"), folder)
    (folder / "endless" / "1").mkdir(parents=True)
    (folder / "endless" / "config.pbtxt").write_text(ENDLESS_CONFIG)
    (folder / "endless" / "1" / "model.py").write_text(ENDLESS)
    (folder / "odd" / "1").mkdir(parents=True)
    (folder / "odd" / "config.pbtxt").write_text(ODD_CONFIG)
    (folder / "odd" / "1" / "model.py").write_text(ODD)
    with LiveKServe(folder) as live:
        yield live


ODD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0].decode()
        parameters = json.loads(text)
        if "raise" in parameters:
            raise ValueError(parameters["raise"])
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.ones(1, np.int32))], parameters=parameters)
"""
ODD_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
ENDLESS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            while count and not sender.is_cancelled():
                count -= 1
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.ones(2048, np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENDLESS_CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }
model_transaction_policy { decoupled: true }
"""


def post(server: LiveKServe, model: str, body: object, *, how: str = "generate") -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(f"{server.url}/v2/models/{model}/{how}", content=content)


def events(response: httpx2.Response) -> list[dict[str, object]]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_members_other_than_inputs_are_parameters(server) -> None:
    body = {"text_input": "a b", "max_tokens": 2, "id": "q1", "foo": 1, "parameters": {"bar": "x"}}
    answer = post(server, "generate", body)
    assert answer.json() == {
        "id": "q1",
        "model_name": "generate",
        "model_version": "1",
        "parameters_seen": '{"bar": "x", "foo": 1, "id": "q1"}',
        "text_output": "a b",
    }
    assert list(answer.json()) == sorted(answer.json())


def test_each_response_is_an_event(server) -> None:
    body = {"text_input": "a b c", "max_tokens": 3, "stream": True}
    answer = post(server, "generate", body, how="generate_stream")
    assert [event["text_output"] for event in events(answer)] == ["a", "b", "c"]


def test_parameters_of_a_response_cannot_replace_our_members(server) -> None:
    evil = dict.fromkeys(("id", "model_name", "model_version", "Y"), "evil")
    answer = post(server, "odd", {"X": json.dumps(evil), "id": "q"})
    assert answer.json() == {"id": "q", "model_name": "odd", "model_version": "1", "Y": 1}


@pytest.mark.parametrize("how", ["generate", "generate_stream", "infer"])
def test_an_output_without_json_representation_is_an_error(server, how: str) -> None:
    body: dict[str, object] = {"X": json.dumps({"half": "\ud800"})}
    if how == "infer":
        body = {"inputs": [{"name": "X", "datatype": "BYTES", "shape": [1], "data": [body["X"]]}]}
    answer = post(server, "odd", body, how=how)
    body = events(answer)[0] if how == "generate_stream" else answer.json()
    assert (answer.status_code, body["error"]) == (
        500 if how == "infer" else 400,
        "the server failed; its log has the reason",
    )


def test_an_error_message_with_invalid_utf_8_is_sent(server) -> None:
    answer = post(server, "odd", {"X": json.dumps({"raise": "bad \ud800"})})
    assert "bad ?" in answer.json()["error"]


@pytest.mark.parametrize(("grid", "shape"), [([1, 2, 3, 4], [1, 2, 2]), ([], [1, 0, 2])])
def test_a_flat_list_fills_the_last_variable_dimension(server, grid, shape) -> None:
    assert post(server, "generate_batch", {"PROMPT": "a", "GRID": grid}).json()["SHAPE"] == shape


def test_a_list_that_fits_no_shape_is_rejected(server) -> None:
    answer = post(server, "generate_batch", {"PROMPT": "a", "GRID": [1, 2, 3]})
    text = "The schema can not convert input 'GRID' to tensor with proper shape"
    assert (answer.status_code, answer.json()) == (400, {"error": text})


def test_several_responses_are_an_error_in_generate(server) -> None:
    answer = post(server, "repeat", {"N": 2})
    assert answer.status_code == 200
    assert answer.json()["error"].startswith("generate expects model to produce exactly 1 response")


def test_the_first_response_decides_the_status(server) -> None:
    first = post(server, "repeat", {"N": 2, "ERROR_AT": 0}, how="generate_stream")
    assert (first.status_code, events(first)[0]) == (400, {"error": "no response 0"})
    second = post(server, "repeat", {"N": 3, "ERROR_AT": 1}, how="generate_stream")
    assert second.status_code == 200
    assert [event.get("error") for event in events(second)] == [None, "no response 1", None]


def test_no_response_is_an_empty_stream(server) -> None:
    answer = post(server, "repeat", {"N": 0}, how="generate_stream")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"[]", 400, "attempt to get members for non-object"),
        (b'{"text_input":"a","text_input":"b"}', 400, "input 'text_input' already exists in request"),
        (b'{"foo":null}', 400, "parameter 'foo' has invalid type"),
        (b'{"parameters":{"a":{}}}', 400, "Converting keyword: 'parameters': parameter 'a' has invalid type"),
        (b'{"parameters":[]}', 400, "Expected JSON object for keyword: 'parameters'"),
        (b'{"text_input":5}', 400, "Unable to parse JSON bytes array: attempt to access JSON non-string"),
        (b'{"max_tokens":{}}', 400, "Unable to parse 'data': attempt to access JSON non-signed-integer"),
    ],
)
def test_invalid_bodies_are_rejected_with_tritons_message(
    server, body: bytes, status: int, text: str
) -> None:
    answer = post(server, "generate", body)
    assert answer.status_code == status
    assert text in answer.json()["error"]


def test_a_disconnect_cancels_a_stream(server, caplog) -> None:
    caplog.set_level(logging.DEBUG, logger="genserve")
    body = b'{"N": 100000000}'
    with server.connect() as connection:
        path = "/v2/models/endless/generate_stream"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(16).startswith(b"HTTP/1.1 200")
    # There is one instance: it answers once the endless request has noticed that nobody reads it.
    assert post(server, "endless", {"N": 1}).status_code == 200
    # Said once, and as no failure of the server.
    [left] = [line for line in caplog.messages if "generate_stream" in line]
    assert "error=" not in left
