"""ModelStreamInfer through the generated stub and tritonclient, over a real socket."""

from __future__ import annotations

import logging
import queue
import re
import struct
from collections.abc import Iterator
from functools import partial

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client
import tritonclient.grpc.aio as aio_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.server.kserve.grpc.grpc_models import Blocking, all_models
from tests.server.kserve.grpc.live_grpc import LiveGrpc
from tests.support.live_server import slow_down, wait_until

EMPTY_FINAL = {"triton_enable_empty_final_response": service_pb2.InferParameter(bool_param=True)}
UNKNOWN = service_pb2.ModelInferRequest(model_name="zzz", id="bad")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveGrpc]:
    with LiveGrpc(all_models()) as live:
        yield live


def request(model: str, data: bytes, datatype: str, **fields) -> service_pb2.ModelInferRequest:
    shape = [1, 1] if model == "batched" else [1]
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[data], **fields)
    message.inputs.add(name="X", datatype=datatype, shape=shape)
    return message


def repeats(count: int, **fields) -> service_pb2.ModelInferRequest:
    return request("repeat", struct.pack("<i", count), "INT32", **fields)


def plain(model: str = "batched", **fields) -> service_pb2.ModelInferRequest:
    return request(model, b"\0\0\0\0", "FP32", **fields)


def failing(**fields) -> service_pb2.ModelInferRequest:
    return request("fail", b"\x08\0\0\0INTERNAL", "BYTES", **fields)


def seen(message: service_pb2.ModelStreamInferResponse) -> tuple:
    """Return id, value (None: no output), whether it is the last, and the error."""
    response = message.infer_response
    value = response.raw_output_contents[0][0] if response.outputs else None
    final = None
    if "triton_final_response" in response.parameters:
        final = response.parameters["triton_final_response"].bool_param
    return response.id, value, final, message.error_message


def ask(stub, *requests, metadata=None) -> list[tuple]:
    return [seen(m) for m in stub.ModelStreamInfer(iter(requests), metadata=metadata, timeout=20)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (2, [("a", 0, False, ""), ("a", 1, False, "")]),
        (-2, [("a", 0, False, ""), ("a", 1, True, "")]),
        (0, []),
        (100, [("a", 0, False, ""), ("a", None, True, "bad luck")]),
    ],
)
def test_the_last_response_of_a_decoupled_model_is_marked_final(stub, count, expected):
    assert ask(stub, repeats(count, id="a")) == expected
    empty = [("a", None, True, "")] if count >= 0 and count < 100 else []
    assert ask(stub, repeats(count, id="a", parameters=EMPTY_FINAL)) == expected + empty


def test_an_empty_stream_ends(stub):
    assert ask(stub) == []


def test_the_only_response_of_a_model_is_marked_final(stub):
    assert ask(stub, plain(id="1")) == [("1", 0, True, "")]


def test_an_error_is_a_message_and_the_stream_goes_on(stub):
    answers = ask(stub, UNKNOWN, failing(id="f"), plain(id="ok"))
    assert answers == [
        ("bad", None, None, "Request for unknown model: 'zzz' is not found"),
        ("f", None, True, "failed with INTERNAL"),
        ("ok", 0, True, ""),
    ]


FAILED = "the server failed; its log has the reason"


@pytest.mark.parametrize("model", ["unwritable", "unwritable_stream"])
def test_a_response_that_cannot_be_written_is_an_error_and_the_stream_goes_on(stub, model):
    answers = ask(stub, plain(id="1"), plain(model, id="bad"), plain(id="2"))
    assert sorted(answers) == [("1", 0, True, ""), ("2", 0, True, ""), ("bad", None, True, FAILED)]


def test_an_internal_error_is_a_message_and_the_stream_goes_on(monkeypatch):
    def fail(_: object) -> None:
        raise ZeroDivisionError

    models = all_models()
    [broken] = [model for model in models if model.name == "describe"]
    monkeypatch.setattr(broken.scheduler, "submit", fail)
    with LiveGrpc(models) as server, grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        bad = request("describe", b"\0\0\0\0", "BYTES", id="bad")
        answers = ask(stub, plain(id="1"), bad, plain(id="2"))
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(bad, timeout=20)
    assert answers == [("1", 0, True, ""), ("bad", None, None, FAILED), ("2", 0, True, "")]
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, FAILED)


def test_a_stream_that_cannot_be_parsed_ends_with_a_status(server):
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([b"no message"]), timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_with_triton_grpc_error_the_stream_ends_at_an_error_of_a_model(stub):
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, UNKNOWN, failing(id="f"), plain(id="ok"), metadata=(("triton_grpc_error", "true"),))
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.INTERNAL,
        "failed with INTERNAL",
    )


def test_responses_keep_the_order_of_requests_except_of_decoupled_models():
    blocking = Blocking()
    models = [*all_models(), blocking.model]
    with LiveGrpc(models) as server, grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests = (plain("blocking", id="slow"), UNKNOWN, repeats(1, id="dec"), plain(id="fast"))
        answers = stub.ModelStreamInfer(iter(requests), timeout=20)
        first = seen(next(answers))[0]
        blocking.go.set()
        assert [first, *(seen(answer)[0] for answer in answers)] == ["dec", "slow", "bad", "fast"]


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_stream_that_is_cancelled_cancels_its_inferences(decoupled):
    blocking = Blocking(decoupled=decoupled)
    with LiveGrpc([blocking.model]) as server, grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests: queue.SimpleQueue[service_pb2.ModelInferRequest] = queue.SimpleQueue()
        requests.put(plain("blocking", id="1"))
        answers = stub.ModelStreamInfer(iter(requests.get, None))
        blocking.started.get(timeout=10)
        answers.cancel()
        assert blocking.ended.get(timeout=10) == "cancelled"
        requests.put(None)


def test_a_cancelled_stream_of_a_text_model_is_logged_with_its_client(tiny_server, caplog, monkeypatch):
    slow_down(tiny_server, monkeypatch)
    text = service_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"tell me")
    request = service_pb2.ModelInferRequest(model_name="tiny", inputs=[text])
    with caplog.at_level(logging.INFO), grpc.insecure_channel(tiny_server.grpc_url) as channel:
        answers = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request] * 4))
        wait_until(lambda: tiny_server.model.engine.num_running == 4)
        answers.cancel()
        wait_until(lambda: caplog.text.count("gRPC ModelStreamInfer CANCELLED") == 4)
        wait_until(lambda: tiny_server.model.engine.num_accepted == 0)
    assert len(re.findall(r" 127\.0\.0\.1:\d+ gRPC", caplog.text)) == 4


def test_a_disconnect_cancels_the_inferences_of_a_stream():
    blocking = Blocking()
    with LiveGrpc([blocking.model]) as server:
        channel = grpc.insecure_channel(server.address)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([plain("blocking")]))
        blocking.started.get(timeout=10)
        channel.close()
        assert blocking.ended.get(timeout=10) == "cancelled"
        with pytest.raises(grpc.RpcError):
            next(answers)


def test_tritonclient_streams(server):
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with client.InferenceServerClient(server.address) as triton:
        triton.start_stream(partial(lambda result, error: answers.put((result, error))))
        x = client.InferInput("X", [1], "INT32")
        x.set_data_from_numpy(np.array([3], np.int32))
        triton.async_stream_infer("repeat", [x], request_id="q", enable_empty_final_response=True)
        values = []
        while True:
            result, error = answers.get(timeout=10)
            assert error is None
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            values += result.as_numpy("Y").tolist()
        triton.stop_stream()
    assert values == [0, 1, 2]


async def test_the_asynchronous_tritonclient_streams(server):
    x = client.InferInput("X", [1], "INT32")
    x.set_data_from_numpy(np.array([-2], np.int32))

    async def requests():
        yield {"model_name": "repeat", "inputs": [x]}
        yield {"model_name": "zzz", "inputs": [x]}

    async with aio_client.InferenceServerClient(server.address) as triton:
        answers = [answer async for answer in triton.stream_infer(requests())]
    assert sorted(result.as_numpy("Y").tolist() for result, error in answers if error is None) == [[0], [1]]
    [error] = [error for _, error in answers if error is not None]
    assert "Request for unknown model: 'zzz' is not found" in str(error)


def test_two_hundred_requests_in_one_stream_are_all_answered_in_order(stub):
    ids = [str(number) for number in range(200)]
    assert [answer[0] for answer in ask(stub, *(plain(id=name) for name in ids))] == ids
