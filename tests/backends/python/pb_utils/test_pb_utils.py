"""pb_utils as a model.py finds it, and as a user's own test does."""

from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pytest

from genserve.backends.python import pb_utils
from genserve.backends.python.pb_utils import InferenceRequest, InferenceResponse, Tensor, TritonError

X = Tensor("X", np.zeros(1, np.float32))

# dir() of the module in a Triton server, and of its classes.
SURFACE = """
    InferenceRequest InferenceResponse Logger MetricFamily ModelConfig PreferredMemory TRITONSERVER_MEMORY_CPU
    TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_END TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    TRITONSERVER_REQUEST_RELEASE_ALL TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
    TRITONSERVER_RESPONSE_COMPLETE_FINAL
    TRITON_STRING_TO_NUMPY Tensor TritonError TritonModelException deserialize_bytes_tensor
    get_input_config_by_name get_input_tensor_by_name get_model_dir get_output_config_by_name
    get_output_tensor_by_name is_model_ready json load_model np numpy_to_triton_type serialize_byte_tensor
    struct
    triton_string_to_numpy triton_to_numpy_type unload_model using_decoupled_model_transaction_policy
"""


@pytest.mark.parametrize("name", SURFACE.split())
def test_the_module_has_all_names_of_tritons(name):
    assert hasattr(pb_utils, name)


def test_tritons_names_import_it_lazily(tmp_path):
    (tmp_path / "model.py").write_text(
        "import triton_python_backend_utils as pb_utils\nhere = pb_utils.Tensor"
    )
    program = """
import sys
import genserve, genserve.backends.backend
assert "triton_python_backend_utils" not in sys.modules
import genserve.backends.python.pb_utils
import model
import c_python_backend_utils
assert model.here is c_python_backend_utils.Tensor
assert "torch" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)}
    )


def test_a_model_can_be_run_without_a_server():
    class TritonPythonModel:
        def execute(self, requests):
            return [InferenceResponse([Tensor("Y", r.inputs()[0].as_numpy() + 1)]) for r in requests]

    request = InferenceRequest(model_name="m", inputs=[X], requested_output_names=[])
    [response] = TritonPythonModel().execute([request])
    assert pb_utils.get_output_tensor_by_name(response, "Y").as_numpy() == [1]
    assert pb_utils.get_output_tensor_by_name(response, "Z") is None
    assert pb_utils.get_input_tensor_by_name(request, "X") is X
    pb_utils.Logger.log("fine")
    for needs_a_server in (request.exec, pb_utils.get_model_dir, lambda: pb_utils.load_model("m")):
        with pytest.raises(pb_utils.TritonModelException):
            needs_a_server()
    with pytest.raises(pb_utils.TritonModelException, match="metrics not supported"):
        pb_utils.MetricFamily("c", "d", pb_utils.MetricFamily.COUNTER)


def request(**fields):
    return InferenceRequest(**{"model_name": "a", "inputs": [X], "requested_output_names": ["b"]} | fields)


def test_a_request_has_getters_for_its_arguments():
    made = request(correlation_id="s", parameters={"a": 1, "b": True, "c": "é"})
    assert (made.request_id(), made.correlation_id(), made.flags(), made.timeout()) == ("", "s", 0, 0)
    assert made.parameters() == '{"a": 1, "b": true, "c": "\\u00e9"}'
    assert made.requested_output_names() == {"b"}
    assert made.inputs() == [X]
    assert not made.is_cancelled()
    assert made.trace().get_context() is None


def test_the_arguments_of_a_request_have_tritons_order():
    memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)
    made = InferenceRequest("7", 3, [X], ["Y"], "m", 2, 1, 9, memory, X and made_trace(), {"a": 1})
    assert (made.request_id(), made.correlation_id(), made.flags(), made.timeout()) == ("7", 3, 1, 9)


def made_trace():
    return request().trace()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": [None]}, "Input tensor for request with id '' and model name 'a' should not be empty."),
        (
            {"requested_output_names": [""]},
            "Requested output name for request with id '' and model name 'a' should not be empty.",
        ),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"inputs": [X, X]}, "input 'X' already exists in request"),
        (
            {"parameters": {"a": 1.5}},
            "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        ({"parameters": {1: 1}}, "Expect parameters keys to have type str, found type <class 'int'>"),
    ],
)
def test_an_invalid_request_is_rejected_in_tritons_words(fields, text):
    with pytest.raises(pb_utils.TritonModelException) as raised:
        request(**fields)
    assert str(raised.value) == text


@pytest.mark.parametrize("missing", ["model_name", "inputs", "requested_output_names"])
def test_a_request_needs_a_model_inputs_and_outputs(missing):
    with pytest.raises(TypeError):
        request(**{missing: None})


def test_a_sender_of_a_bls_request_cannot_send():
    with pytest.raises(pb_utils.TritonModelException, match="has no reference to the decoupled state"):
        request().get_response_sender().send(flags=1)


def test_a_response_has_getters_for_its_arguments():
    made = InferenceResponse([X], TritonError("no"), parameters={"a": 1})
    assert made.has_error()
    assert (made.error().message(), made.error().code()) == ("no", TritonError.INTERNAL)
    assert made.output_tensors() == [X]
    assert not InferenceResponse().has_error()
    assert InferenceResponse().error() is None


def test_a_response_with_none_is_rejected():
    with pytest.raises(
        pb_utils.TritonModelException, match=r"^Output tensor for inference response should not be empty\.$"
    ):
        InferenceResponse([None])
    for wrong in ({"output_tensors": [3]}, {"error": "no"}):
        with pytest.raises(TypeError):
            InferenceResponse(**wrong)


@pytest.mark.parametrize("make", [request, InferenceResponse])
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 1 << 20000], ids=["above", "below", "far"])
def test_a_parameter_that_no_protocol_can_send_is_rejected(make, number):
    with pytest.raises(pb_utils.TritonModelException, match="64 bits with their sign: 'a' does not"):
        make(parameters={"a": number})
    assert make(parameters={"a": -(2**63)}).parameters().endswith("9223372036854775808}")


def test_codes_have_tritons_numbers():
    words = "UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED"
    assert [int(getattr(TritonError, word)) for word in words.split()] == list(range(8))
    assert (int(pb_utils.TRITONSERVER_MEMORY_GPU), int(pb_utils.TRITONSERVER_MEMORY_CPU)) == (0, 1)


def test_data_types_have_numpy_types():
    assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")
    for number in range(1, 14):
        assert pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number)) == number
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None


def test_strings_are_serialized_after_their_lengths():
    array = np.array([[b"ab", "ü"], [3, b""]], dtype=object)
    encoded = pb_utils.serialize_byte_tensor(array)
    assert encoded == b"".join(
        struct.pack("<I", len(text)) + text for text in (b"ab", "ü".encode(), b"3", b"")
    )
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"ab", "ü".encode(), b"3", b""]
    assert pb_utils.serialize_byte_tensor(np.array([])) == ()
    assert pb_utils.serialize_byte_tensor(np.array([1.0])) is None
    assert pb_utils.deserialize_bytes_tensor(b"").dtype == object
