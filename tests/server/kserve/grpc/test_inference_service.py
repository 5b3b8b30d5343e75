"""The unary methods through tritonclient and the generated stub, over a real socket."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from multiprocessing import shared_memory
from uuid import uuid4

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client
import tritonclient.grpc.aio as aio_client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from genserve.config.schema import new_model_config
from genserve.errors import GenserveError, Status
from tests.server.kserve.grpc.grpc_models import DATA_TYPES, Blocking, all_models
from tests.server.kserve.grpc.live_grpc import LiveGrpc


@pytest.fixture(scope="module")
def server() -> Iterator[LiveGrpc]:
    with LiveGrpc(all_models(), grpc_header_forward_pattern="^X-") as live:
        yield live


@pytest.fixture(scope="module")
def triton(server: LiveGrpc) -> Iterator[client.InferenceServerClient]:
    with client.InferenceServerClient(server.address) as connected:
        yield connected


def tensor(array: np.ndarray, datatype: str = "FP32") -> client.InferInput:
    tensor = client.InferInput("X", array.shape, datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def request(model="batched", *, shape=(1, 2), data=b"\0" * 8, datatype="FP32", **fields):
    message = service_pb2.ModelInferRequest(model_name=model, **fields)
    message.inputs.add(name="X", datatype=datatype, shape=shape)
    if data is not None:
        message.raw_input_contents.append(data)
    return message


def rejection(call, *arguments) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=10)
    return caught.value.code(), caught.value.details()


def described(result: client.InferResult) -> dict:
    return json.loads(result.as_numpy("Y")[0])


_VALUES = {"STRING": [b"a", b"", "ß".encode()], "BOOL": [True, False, True]}


@pytest.mark.parametrize("word", [word for word in DATA_TYPES if word != "BF16"])
def test_every_data_type_comes_back_as_it_was_sent(triton, word):
    datatype = "BYTES" if word == "STRING" else word
    values = _VALUES.get(word, [0, 1, 100])
    array = np.array(values, dtype=triton_to_np_dtype(datatype))
    result = triton.infer(f"id_{word}", [tensor(array, datatype)])
    np.testing.assert_array_equal(result.as_numpy("Y"), array)
    assert result.get_output("Y").datatype == datatype


def test_raw_bf16_comes_back_as_it_was_sent(stub):
    response = stub.ModelInfer(request("id_BF16", shape=[2], data=b"abcd", datatype="BF16"))
    assert (response.outputs[0].datatype, response.raw_output_contents[0]) == ("BF16", b"abcd")


@pytest.mark.parametrize(
    ("word", "field", "values", "raw"),
    [
        ("BOOL", "bool_contents", [True, False], b"\1\0"),
        ("INT8", "int_contents", [1, -1, -128], b"\1\xff\x80"),
        ("INT16", "int_contents", [-2], b"\xfe\xff"),
        ("INT32", "int_contents", [1], b"\1\0\0\0"),
        ("INT64", "int64_contents", [-1], b"\xff" * 8),
        ("UINT8", "uint_contents", [255], b"\xff"),
        ("UINT16", "uint_contents", [258], b"\2\1"),
        ("UINT32", "uint_contents", [2**32 - 1], b"\xff" * 4),
        ("UINT64", "uint64_contents", [2**64 - 1], b"\xff" * 8),
        ("FP32", "fp32_contents", [1.0], b"\0\0\x80\x3f"),
        ("FP64", "fp64_contents", [1.0], b"\0\0\0\0\0\0\xf0\x3f"),
        ("STRING", "bytes_contents", [b"a", b""], b"\1\0\0\0a\0\0\0\0"),
    ],
)
def test_typed_contents_equal_raw_contents(stub, word, field, values, raw):
    datatype = "BYTES" if word == "STRING" else word
    message = request(f"id_{word}", shape=[len(values)], data=None, datatype=datatype)
    getattr(message.inputs[0].contents, field).extend(values)
    assert stub.ModelInfer(message).raw_output_contents[0] == raw


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("INT8", "int_contents", 300),
        ("INT16", "int_contents", -40000),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 70000),
    ],
)
def test_an_integer_beyond_its_type_is_rejected_with_its_place(stub, word, field, value):
    message = request(f"id_{word}", shape=[2], data=None, datatype=word)
    getattr(message.inputs[0].contents, field).extend([0, value])
    with pytest.raises(grpc.RpcError, match=f"element 1 of input 'X' is {value}") as caught:
        stub.ModelInfer(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_tensor_without_elements_is_served(stub):
    response = stub.ModelInfer(request(shape=[1, 0], data=b""))
    assert list(response.outputs[0].shape) == [1, 0]


def test_id_parameters_sequence_and_outputs_reach_the_model(triton):
    result = triton.infer(
        "describe",
        [tensor(np.array([b"x"], dtype=object), "BYTES")],
        request_id="q",
        sequence_id=7,
        sequence_start=True,
        priority=2,
        timeout=1000,
        outputs=[client.InferRequestedOutput("Y")],
        parameters={"int": 1, "bool": True, "text": "t", "real": 1.5},
        headers={"x-user": "me", "other": "no"},
    )
    assert described(result) == {
        "id": "q",
        "correlation_id": 7,
        "flags": 1,
        "priority": 2,
        "timeout_us": 1000,
        "parameters": {"int": 1, "bool": True, "text": "t", "real": 1.5, "x-user": "me"},
        "outputs": ["Y"],
    }
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("q", "describe", "1")
    assert response.parameters["n"].int64_param == 1
    assert response.parameters["x"].double_param == 0.5


def test_sequence_ids_may_be_text(triton):
    result = triton.infer(
        "describe", [tensor(np.array([b"x"], dtype=object), "BYTES")], sequence_id="s1", sequence_end=True
    )
    assert (described(result)["correlation_id"], described(result)["flags"]) == ("s1", 2)


async def test_the_asynchronous_client_gets_the_same_answers(server):
    async with aio_client.InferenceServerClient(server.address) as triton:
        assert await triton.is_server_ready()
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        result = await triton.infer("batched", [tensor(array)])
        np.testing.assert_array_equal(result.as_numpy("Y"), array)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("sequence_id", {"bool_param": True}, "expected int64_param or string_param."),
        ("sequence_start", {"int64_param": 1}, "expected bool_param."),
        ("sequence_end", {"string_param": "x"}, "expected bool_param."),
        ("priority", {"string_param": "1"}, "expected int64_param or uint64_param."),
        ("timeout", {"uint64_param": 1}, "expected int64_param."),
        ("mine", {"uint64_param": 1}, "expected int64_param, bool_param, or string_param."),
        ("mine", {}, "expected int64_param, bool_param, or string_param."),
        ("triton_enable_empty_final_response", {"int64_param": 1}, "expected bool_param."),
    ],
)
def test_a_parameter_of_the_wrong_type_is_rejected_with_tritons_message(stub, name, value, text):
    message = request(parameters={name: service_pb2.InferParameter(**value)})
    code, details = rejection(stub.ModelInfer, message)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == f"invalid value type for '{name}' parameter, {text}"


_ODD = {
    "short": (
        request(data=b"abc"),
        "[request id: <id_unknown>] input byte size mismatch for input 'X' for model 'batched'. "
        "Expected 8, got 3",
    ),
    "long": (
        request(data=b"\0" * 12, id="r"),
        "[request id: r] input byte size mismatch for input 'X' for model 'batched'. Expected 8, got 12",
    ),
    "no data": (
        request(data=None),
        "unable to find data for input tensor 'X' for model 'batched' in request.",
    ),
    "no type": (
        request(datatype="FOO"),
        "[request id: <id_unknown>] inference input 'X' data-type is '<invalid>', "
        "but model 'batched' expects 'FP32'",
    ),
    "negative": (
        request(shape=[1, -1]),
        "[request id: <id_unknown>] All input dimensions should be specified for input 'X' "
        "for model 'batched', got [1,-1]",
    ),
    "few strings": (
        request("id_STRING", shape=[3], data=b"\1\0\0\0a", datatype="BYTES"),
        "[request id: <id_unknown>] expected 3 string elements for inference input 'X' "
        "for model 'id_STRING', got 1",
    ),
    "many strings": (
        request("id_STRING", shape=[1], data=b"\0" * 8, datatype="BYTES"),
        "[request id: <id_unknown>] unexpected number of string elements 2 for inference input 'X' "
        "for model 'id_STRING', expecting 1",
    ),
    "cut string": (
        request("id_STRING", shape=[1], data=b"\2\0\0\0a", datatype="BYTES"),
        "incomplete string data for inference input 'X', expecting string of length 2 "
        "but only 1 bytes available",
    ),
    "cut length": (
        request("id_STRING", shape=[1], data=b"\2\0", datatype="BYTES"),
        "[request id: <id_unknown>] incomplete string length indicator for inference input 'X' for model "
        "'id_STRING', expecting 4 bytes but only 2 bytes available. Please make sure the string length "
        "indicator is in one buffer.",
    ),
    "version": (
        request(model_version="x"),
        "failed to get model version from specified version string 'x' (details: stol), "
        "version should be an integral value > 0",
    ),
    "minus": (
        request(model_version="-5"),
        "invalid model version specified '-5' , version should be an integral value > 0",
    ),
    "reserved": (
        request(parameters={"triton_x": service_pb2.InferParameter(bool_param=True)}),
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
        "starting with 'triton_' are allowed: triton_enable_empty_final_response",
    ),
    "priority": (
        request(parameters={"priority": service_pb2.InferParameter(int64_param=-1)}),
        "invalid value for 'priority', expected value >= 0.",
    ),
}


@pytest.mark.parametrize("case", _ODD)
def test_a_contradictory_request_is_rejected_with_tritons_message(stub, case):
    message, text = _ODD[case]
    assert rejection(stub.ModelInfer, message) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_unknown_inputs_and_outputs_are_rejected(stub):
    other, nothing = request(), request()
    other.inputs[0].name = "Q"
    nothing.outputs.add(name="NOPE")
    texts = [rejection(stub.ModelInfer, message)[1] for message in (other, nothing)]
    assert texts == [
        "unexpected inference input 'Q' for model 'batched'",
        "unexpected inference output 'NOPE' for model 'batched'",
    ]


def test_a_repeated_input_is_rejected(stub):
    message = request(shape=[1, 2])
    message.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    message.raw_input_contents.append(b"\0" * 8)
    text = "[request id: <id_unknown>] input 'X' already exists in request"
    assert rejection(stub.ModelInfer, message) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_a_repeated_output_is_rejected(stub):
    message = request(shape=[1, 2], id="7")
    for _ in range(2):
        message.outputs.add(name="Y")
    text = "[request id: 7] output 'Y' already exists in request"
    assert rejection(stub.ModelInfer, message) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_an_unknown_output_is_reported_before_an_unknown_input(stub):
    message = request(shape=[1, 2])
    message.inputs[0].name = "NOPE"
    message.outputs.add(name="DUMMY")
    text = "unexpected inference output 'DUMMY' for model 'batched'"
    assert rejection(stub.ModelInfer, message) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_typed_contents_with_raw_ones_or_in_a_wrong_field_are_rejected(stub):
    mixed = request()
    mixed.inputs[0].contents.fp32_contents.extend([1, 2])
    wrong = request(data=None)
    wrong.inputs[0].contents.fp64_contents.extend([1, 2])
    many = request(data=None, id="m")
    many.inputs[0].contents.fp32_contents.extend([1, 2, 3])
    texts = [rejection(stub.ModelInfer, message)[1] for message in (mixed, wrong, many)]
    assert texts == [
        "contents field must not be specified when using raw_input_contents for 'X' for model 'batched'",
        "unexpected explicit tensor data for input tensor 'X' for model 'batched' of type 'FP64', "
        "expected datatype 'FP32'",
        "[request id: m] input byte size mismatch for input 'X' for model 'batched'. Expected 8, got 12",
    ]


_CODES = {
    Status.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Status.INTERNAL: grpc.StatusCode.INTERNAL,
    Status.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Status.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    Status.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Status.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Status.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Status.CANCELLED: grpc.StatusCode.CANCELLED,
}


@pytest.mark.parametrize("status", list(Status))
def test_the_status_of_a_models_error_becomes_the_grpc_status(stub, status):
    word = status.value.encode()
    message = request("fail", shape=[1], data=len(word).to_bytes(4, "little") + word, datatype="BYTES")
    assert rejection(stub.ModelInfer, message) == (_CODES[status], f"failed with {status.value}")


def test_the_remedy_of_an_error_is_in_the_trailing_metadata(stub):
    message = request("fail", shape=[1], data=b"\x08\0\0\0INTERNAL", datatype="BYTES")
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message)
    assert ("genserve-remedy", "be ? better") in caught.value.trailing_metadata()


def test_a_long_error_message_is_truncated_and_keeps_its_status(stub):
    def ask(count: int) -> tuple[grpc.StatusCode, str]:
        message = request("fail_at_length", shape=(1,), data=struct.pack("<i", count), datatype="INT32")
        return rejection(stub.ModelInfer, message)

    assert ask(100) == (grpc.StatusCode.INVALID_ARGUMENT, "ß%\n" * 100)
    code, text = ask(10000)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(text) > 900
    assert ("ß%\n" * 10000).startswith(text)


def test_a_decoupled_model_needs_a_stream(stub):
    message = request("repeat", shape=[1], data=b"\1\0\0\0", datatype="INT32")
    assert rejection(stub.ModelInfer, message) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


def test_a_model_that_ends_without_a_response_is_an_error_not_a_hang(stub):
    code, details = rejection(stub.ModelInfer, request("silent"))
    assert (code, details) == (
        grpc.StatusCode.INTERNAL,
        "model 'silent' ended the request without a response",
    )


def test_unknown_models_and_versions_are_not_found(triton):
    for model, version, text in (
        ("zzz", "", "Request for unknown model: 'zzz' is not found"),
        ("batched", "9", "Request for unknown model: 'batched' version 9 is not found"),
    ):
        for call in (triton.get_model_metadata, triton.get_model_config):
            with pytest.raises(InferenceServerException) as caught:
                call(model, version)
            assert (caught.value.status(), caught.value.message()) == ("StatusCode.NOT_FOUND", text)


def test_a_cancelled_call_cancels_its_inference():
    blocking = Blocking()
    with LiveGrpc([blocking.model]) as server, grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelInfer.future(request("blocking"))
        blocking.started.get(timeout=10)
        call.cancel()
        assert blocking.ended.get(timeout=10) == "cancelled"


def test_a_deadline_that_passes_cancels_the_inference():
    blocking = Blocking()
    with LiveGrpc([blocking.model]) as server, grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request("blocking"), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert blocking.ended.get(timeout=10) == "cancelled"


def test_classification_replaces_values(triton):
    outputs = [client.InferRequestedOutput("Y", class_count=2)]
    array = np.array([[1, 3, 2], [9, 7, 8]], dtype=np.float32)
    result = triton.infer("batched", [tensor(array)], outputs=outputs)
    assert result.as_numpy("Y").tolist() == [
        [b"3.000000:1:dog", b"2.000000:2:bird"],
        [b"9.000000:0:cat", b"8.000000:2:bird"],
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"int64_param": 0}, "invalid value for 'classification' parameter, expected >= 0"),
        ({"string_param": "1"}, "invalid value type for 'classification' parameter, expected int64_param"),
    ],
)
def test_an_invalid_number_of_classes_is_rejected(stub, value, text):
    message = request()
    message.outputs.add(name="Y").parameters["classification"].MergeFrom(service_pb2.InferParameter(**value))
    assert rejection(stub.ModelInfer, message) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_tensors_may_be_in_shared_memory(triton):
    array = np.arange(4, dtype=np.float32).reshape(1, 4)
    region = shared_memory.SharedMemory(create=True, size=64, name=f"genserve-{uuid4().hex}")
    try:
        region.buf[8:24] = array.tobytes()
        triton.register_system_shared_memory("r", f"/{region.name}", 64)
        [status] = triton.get_system_shared_memory_status("r").regions.values()
        assert (status.name, status.key, status.byte_size) == ("r", f"/{region.name}", 64)
        x = client.InferInput("X", array.shape, "FP32")
        x.set_shared_memory("r", 16, offset=8)
        y = client.InferRequestedOutput("Y")
        y.set_shared_memory("r", 16, offset=32)
        output = triton.infer("batched", [x], outputs=[y]).get_output("Y")
        assert bytes(region.buf[32:48]) == array.tobytes()
        assert output.parameters["shared_memory_offset"].int64_param == 32
        triton.unregister_system_shared_memory("r")
        assert not triton.get_system_shared_memory_status().regions
    finally:
        region.close()
        region.unlink()


@pytest.mark.parametrize(("offset", "size"), [(-8, 64), (4096, 2048)])
def test_a_range_outside_of_shared_memory_is_rejected_and_the_server_survives(triton, stub, offset, size):
    region = shared_memory.SharedMemory(create=True, size=8192, name=f"genserve-{uuid4().hex}")
    try:
        triton.register_system_shared_memory("outside", f"/{region.name}", 8192)
        os.truncate(f"/dev/shm/{region.name}", size)
        message = request(data=None)
        for name, value in (("region", "outside"), ("byte_size", 8), ("offset", offset)):
            field = "string_param" if name == "region" else "int64_param"
            setattr(message.inputs[0].parameters[f"shared_memory_{name}"], field, value)
        code, text = rejection(stub.ModelInfer, message)
        triton.unregister_system_shared_memory("outside")
    finally:
        region.close()
        region.unlink()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith("Invalid offset")


_MISPLACED = {
    "no size": (
        {"shared_memory_region": {"string_param": "r"}},
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
        "parameter for tensor 'X'",
    ),
    "no region": (
        {"shared_memory_byte_size": {"int64_param": 8}},
        "'shared_memory_byte_size' can not be specified without 'shared_memory_region' "
        "parameter for tensor 'X'",
    ),
    "wrong type": (
        {"shared_memory_region": {"int64_param": 1}},
        "invalid value type for 'shared_memory_region' parameter for tensor 'X', expected string_param.",
    ),
}


@pytest.mark.parametrize("case", _MISPLACED)
def test_incomplete_parameters_of_shared_memory_are_rejected(stub, case):
    parameters, text = _MISPLACED[case]
    message = request(data=None)
    for name, value in parameters.items():
        message.inputs[0].parameters[name].MergeFrom(service_pb2.InferParameter(**value))
    assert rejection(stub.ModelInfer, message) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_metadata_config_and_statistics(server, triton):
    metadata = triton.get_server_metadata()
    assert metadata.name == "genserve"
    assert "binary_tensor_data" in metadata.extensions
    model = triton.get_model_metadata("batched")
    assert (list(model.versions), model.platform) == (["1"], "python")
    assert list(model.inputs[0].shape) == [-1, -1]
    config = new_model_config()
    config.MergeFromString(triton.get_model_config("batched").config.SerializeToString())
    assert config == server.inference_server.find("batched").config.message
    names = [stats.name for stats in triton.get_inference_statistics().model_stats]
    assert names == sorted(names)
    statistics = triton.get_inference_statistics("batched", "1").model_stats[0]
    assert (statistics.name, statistics.version) == ("batched", "1")
    assert statistics.inference_stats.success.count <= statistics.inference_count
    with pytest.raises(InferenceServerException, match="requested model 'zzz' is not available"):
        triton.get_inference_statistics("zzz")


def test_readiness_of_server_and_models(server, triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("batched", "1")
    assert not triton.is_model_ready("zzz")
    assert not triton.is_model_ready("batched", "9")


def test_the_repository_is_listed_and_controlled(server, triton, stub):
    lines = {line.name: line for line in triton.get_model_repository_index().models}
    assert (lines["batched"].state, lines["zz_broken"].reason) == ("READY", "no weights")
    assert (lines["zz_new"].version, lines["zz_new"].state) == ("", "")
    ready = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True)).models
    assert {line.state for line in ready} == {"READY"}
    triton.load_model("batched", config="{}", files={"file:1/model.py": b"pass"})
    assert server.inference_server.loaded[-1] == ("batched", "{}", {"1/model.py": b"pass"})
    triton.unload_model("batched", unload_dependents=True)
    assert server.inference_server.unloaded[-1] == ("batched", True)
    with pytest.raises(InferenceServerException, match="failed to load 'zzz', failed to poll"):
        triton.load_model("zzz")


def test_invalid_parameters_of_repository_methods_are_rejected(stub):
    load, unload = service_pb2.RepositoryModelLoadRequest, service_pb2.RepositoryModelUnloadRequest
    value = service_pb2.ModelRepositoryParameter
    for call, message, text in (
        (stub.RepositoryModelLoad, load(parameters={"foo": value()}), "unrecognized load parameter 'foo'."),
        (
            stub.RepositoryModelLoad,
            load(parameters={"config": value(int64_param=1)}),
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            stub.RepositoryModelUnload,
            unload(parameters={"unload_dependents": value(int64_param=1)}),
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
        (
            stub.RepositoryModelLoad,
            load(repository_name="r"),
            "'repository_name' specification is not supported",
        ),
    ):
        assert rejection(call, message)[1] == text


def test_trace_and_log_settings_are_shown_and_changed(triton):
    assert dict(triton.get_log_settings(as_json=True)["settings"])["log_info"] == {"bool_param": True}
    changed = triton.update_log_settings({"log_verbose_level": 1, "log_info": False})
    assert changed.settings["log_verbose_level"].uint32_param == 1
    triton.update_log_settings({"log_verbose_level": 0, "log_info": True})
    with pytest.raises(InferenceServerException, match="expect boolean for 'log_info'"):
        triton.update_log_settings({"log_info": None})
    assert list(triton.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    faster = triton.update_trace_settings("batched", {"trace_rate": "5"})
    assert list(faster.settings["trace_rate"].value) == ["5"]
    cleared = triton.update_trace_settings("batched", {"trace_rate": None})
    assert list(cleared.settings["trace_rate"].value) == ["1000"]
    with pytest.raises(InferenceServerException, match="Request for unknown model : zzz"):
        triton.get_trace_settings("zzz")


def test_there_is_no_cuda_shared_memory(triton):
    assert not triton.get_cuda_shared_memory_status().regions
    with pytest.raises(InferenceServerException) as caught:
        triton.register_cuda_shared_memory("r", b"eA==", 0, 8)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_disabled_shared_memory_disables_cuda_shared_memory_too():
    with (
        LiveGrpc([], allow_client_shm=False) as server,
        client.InferenceServerClient(server.address) as triton,
    ):
        for change in (
            lambda: triton.register_cuda_shared_memory("r", b"eA==", 0, 8),
            triton.unregister_cuda_shared_memory,
        ):
            with pytest.raises(InferenceServerException, match="Client shared memory is disabled"):
                change()


def test_the_standard_health_service_follows_readiness():
    with LiveGrpc([]) as server, grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
        statuses = health_pb2.HealthCheckResponse
        assert health.Check(request).status == statuses.SERVING
        watch = health.Watch(request)
        assert next(watch).status == statuses.SERVING
        server.inference_server.ready = False
        assert next(watch).status == statuses.NOT_SERVING
        assert health.Check(request).status == statuses.NOT_SERVING
        server.services.draining = True
        assert list(watch) == []


def test_a_draining_server_rejects_new_requests(stub):
    with LiveGrpc(all_models()) as server, grpc.insecure_channel(server.address) as channel:
        server.services.draining = True
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stopping = (grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        assert rejection(stub.ModelInfer, request()) == stopping
        assert not stub.ServerReady(service_pb2.ServerReadyRequest()).ready


def test_with_an_api_key_every_call_except_the_health_check_needs_it():
    with LiveGrpc(all_models(), api_key="secret") as server, grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        live, key = service_pb2.ServerLiveRequest(), (("authorization", "Bearer secret"),)
        for call in (stub.ServerLive, lambda *_, timeout: list(stub.ModelStreamInfer(iter([request()])))):
            assert rejection(call, live)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert stub.ServerLive(live, metadata=key).live
        assert list(stub.ModelStreamInfer(iter([request()]), metadata=key))
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status


def test_a_port_that_is_taken_is_an_error_with_a_remedy():
    with LiveGrpc([]) as server, pytest.raises(GenserveError, match=server.address) as caught:
        server.open_again()
    assert "--grpc-port" in caught.value.remedy
