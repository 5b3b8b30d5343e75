"""Inference over HTTP: JSON, binary tensors, and everything that is refused."""

from __future__ import annotations

import numpy as np

from tests.conformance.triton.exchange import Topic
from tests.conformance.triton.scenarios.asking import (
    binary,
    http,
    infer,
    infer_path,
    post,
    raw,
    settled,
    talk,
    tensor,
    text,
)

__all__ = ["TOPICS"]

_DATA = {
    "BOOL": [True, False, True],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 65535],
    "UINT32": [0, 1, 4294967295],
    "UINT64": [0, 1, 18446744073709551615],
    "INT8": [-128, 0, 127],
    "INT16": [-32768, 0, 32767],
    "INT32": [-2147483648, 0, 2147483647],
    "INT64": [-9223372036854775808, 0, 9223372036854775807],
    "FP32": [0.1, -2.5, 1e30],
    "FP64": [0.1, -2.5, 1e300],
    "BYTES": ["", "a", 'grüße\n"quoted"'],
}
_NUMPY = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
_ROW = tensor("X", "FP32", [1, 4], [1, 2, 3, 4])
_A = tensor("A", "FP32", [1, 2], [1, 2])
_B = tensor("B", "FP32", [1, 2], [10, 20])
_IDENTITY = infer_path("identity_fp32")
_BINARY_Y = [{"name": "Y", "parameters": {"binary_data": True}}]
_BINARY_ALL = {"binary_data_output": True}


def _with(parameters: dict, **more: object) -> dict:
    return infer("identity_fp32", _ROW, parameters=parameters, **more)


def _input(**fields: object) -> dict:
    return infer("identity_fp32", {key: value for key, value in (_ROW | fields).items() if value is not None})


_JSON = Topic(
    name="infer_json",
    run="all",
    exchanges=(
        *(
            talk(
                f"type_{name.lower()}",
                infer("types", tensor(name, name, [3], data), outputs=[{"name": f"OUT_{name}"}]),
            )
            for name, data in _DATA.items()
        ),
        talk("all_outputs_by_default", infer("add_sub", _A, _B), counted=("add_sub",)),
        talk("empty_list_of_outputs_is_all", infer("add_sub", _A, _B, outputs=[])),
        talk("one_output", infer("add_sub", _A, _B, outputs=[{"name": "DIFFERENCE"}])),
        talk(
            "outputs_in_the_order_asked_for",
            infer("add_sub", _A, _B, outputs=[{"name": "DIFFERENCE"}, {"name": "SUM"}]),
        ),
        talk("inputs_in_any_order", infer("add_sub", _B, _A)),
        talk("output_of_optional_not_given", infer("types", tensor("INT8", "INT8", [1], [1]))),
        talk(
            "batch_of_three",
            infer("identity_fp32", tensor("X", "FP32", [3, 4], list(range(12)))),
            counted=("identity_fp32",),
        ),
        talk(
            "nested_data", infer("identity_fp32", tensor("X", "FP32", [2, 4], [[1, 2, 3, 4], [5, 6, 7, 8]]))
        ),
        talk(
            "nesting_is_not_looked_at", infer("identity_fp32", tensor("X", "FP32", [1, 4], [[1], [2, 3], 4]))
        ),
        talk("integers_and_floats_mixed", _input(data=[1, 2.0, 3, 4.25])),
        talk(
            "nan_and_infinity",
            text(
                _IDENTITY,
                '{"inputs":[{"name":"X","datatype":"FP32","shape":[1,4],'
                '"data":[NaN,Infinity,-Infinity,-0.0]}]}',
            ),
        ),
        talk("large_and_small_floats", _input(data=[3.4e38, 1e-40, 16777217, 1e-7])),
        talk("without_batching", infer("fixed", tensor("X", "INT32", [2, 3], [1, 2, 3, 4, 5, 6]))),
        talk("zero_elements", infer("types", tensor("INT32", "INT32", [0], []))),
        talk("zero_strings", infer("identity_string", tensor("X", "BYTES", [0], []))),
        talk("strings_nested", infer("identity_string", tensor("X", "BYTES", [2], [["a"], ["b"]]))),
        talk("string_with_nul", infer("identity_string", tensor("X", "BYTES", [1], ["a\0b"]))),
        talk("with_id", _with({}, id="42")),
        talk("with_empty_id", _with({}, id="")),
        talk("with_version", infer("identity_fp32", _ROW, version="1")),
        talk(
            "reshaped",
            infer(
                "reshaped",
                tensor("SCALAR", "INT64", [2, 1], [7, 8]),
                tensor("ROWS", "FP32", [2, 1, 4], list(range(8))),
            ),
        ),
        talk(
            "optional_given",
            infer("optional", tensor("A", "FP32", [1, 1], [1]), tensor("B", "FP32", [1, 1], [2])),
        ),
        talk("optional_left_out", infer("optional", tensor("A", "FP32", [1, 1], [1]))),
        talk("auto_completed_model", infer("auto_complete", tensor("X", "FP32", [2, 2], [1, 2, 3, 4]))),
        talk(
            "auto_completed_model_with_its_optional",
            infer(
                "auto_complete",
                tensor("X", "FP32", [1, 2], [1, 2]),
                tensor("SCALE", "FP32", [1, 1], [3]),
            ),
        ),
        talk("model_without_inputs", infer("bare"), counted=("bare",)),
        talk("sibling_modules", infer("imports", tensor("X", "INT32", [1], [3]))),
        talk("async_execute", infer("asynchronous", _ROW)),
        talk("unknown_keys_are_ignored", infer("identity_fp32", _ROW | {"extra": [1]}, nonsense={"a": 1})),
        talk("warmup_came_first", infer("warm", tensor("X", "FP32", [1, 2], [0, 0]), id="client")),
        talk(
            "gzip_is_sent_on_request",
            http(
                "POST",
                _IDENTITY,
                json={"inputs": [_ROW]},
                headers={"Accept-Encoding": "gzip"},
            ),
        ),
        talk(
            "unknown_content_encoding",
            http(
                "POST",
                _IDENTITY,
                json={"inputs": [_ROW]},
                headers={"Content-Encoding": "br"},
            ),
        ),
    ),
)

_ERRORS = Topic(
    name="infer_errors",
    run="all",
    exchanges=(
        talk("unknown_model", infer("nowhere", _ROW)),
        talk("unknown_model_with_version", infer("nowhere", _ROW, version="1")),
        talk("unknown_version", infer("identity_fp32", _ROW, version="9")),
        talk("version_that_is_no_number", infer("identity_fp32", _ROW, version="x")),
        talk("failed_model", infer("broken_initialize", tensor("X", "INT32", [1], [1]))),
        talk("model_whose_config_is_broken", infer("broken_config", tensor("X", "INT32", [1], [1]))),
        talk("malformed_json", text(_IDENTITY, "{inputs}")),
        talk("cut_json", text(_IDENTITY, '{"inputs": [')),
        talk("empty_object", text(_IDENTITY, "{}")),
        talk("json_array", text(_IDENTITY, "[1, 2]")),
        talk("json_number", text(_IDENTITY, "3")),
        talk("inputs_is_no_list", text(_IDENTITY, '{"inputs": 3}')),
        talk("input_is_no_object", text(_IDENTITY, '{"inputs": [3]}')),
        talk("no_inputs", infer("identity_fp32")),
        talk("no_inputs_of_two", infer("add_sub", id="r")),
        talk("one_input_of_two", infer("add_sub", _A)),
        talk("no_inputs_where_some_are_optional", infer("optional")),
        talk("only_the_optional_input", infer("optional", tensor("B", "FP32", [1, 1], [2]))),
        talk("unexpected_input", infer("identity_fp32", _ROW | {"name": "Q"})),
        talk("too_many_inputs", infer("identity_fp32", _ROW, _ROW | {"name": "Q"})),
        talk("input_for_a_model_without_inputs", infer("bare", tensor("X", "INT32", [1], [1]))),
        talk("duplicate_input", infer("identity_fp32", _ROW, _ROW)),
        talk("input_without_name", _input(name=None)),
        talk("input_without_datatype", _input(datatype=None)),
        talk("input_without_shape", _input(shape=None)),
        talk("input_without_data", _input(data=None)),
        talk("wrong_datatype", _input(datatype="INT32")),
        talk("unknown_datatype", _input(datatype="FLOAT")),
        talk("lower_case_datatype", _input(datatype="fp32")),
        talk("wrong_shape", _input(shape=[1, 3], data=[1, 2, 3])),
        talk(
            "wrong_shape_without_batching", infer("fixed", tensor("X", "INT32", [3, 2], [1, 2, 3, 4, 5, 6]))
        ),
        talk("rank_too_small", _input(shape=[4])),
        talk("empty_shape", _input(shape=[], data=[1])),
        talk("negative_shape", _input(shape=[-1, 4])),
        talk("batch_too_large", _input(shape=[9, 4], data=[0] * 36)),
        talk("batch_of_zero", _input(shape=[0, 4], data=[])),
        talk("batches_of_different_sizes", infer("add_sub", _A, tensor("B", "FP32", [2, 2], [1, 2, 3, 4]))),
        talk("too_few_data", _input(data=[1, 2, 3])),
        talk("too_many_data", _input(data=[1, 2, 3, 4, 5])),
        talk("strings_for_numbers", _input(data=["a", "b", "c", "d"])),
        talk("bools_for_numbers", _input(data=[True, False, True, False])),
        talk("null_in_data", _input(data=[1, None, 3, 4])),
        talk("data_is_no_list", _input(data=3)),
        talk("numbers_for_strings", infer("identity_string", tensor("X", "BYTES", [1], [3]))),
        talk("numbers_for_bools", infer("types", tensor("BOOL", "BOOL", [2], [1, 0]))),
        talk("floats_for_integers", infer("pass", tensor("X", "INT32", [1], [1.5]))),
        talk("integer_out_of_range", infer("types", tensor("INT8", "INT8", [2], [300, -129]))),
        talk("negative_for_unsigned", infer("types", tensor("UINT8", "UINT8", [1], [-1]))),
        talk("too_few_strings", infer("identity_string", tensor("X", "BYTES", [3], ["a", "b"]))),
        talk("fp16_as_json", infer("types", tensor("FP16", "FP16", [1], [1.5]))),
        talk("bf16_as_json", infer("identity_bf16", tensor("X", "BF16", [1], [1.5]))),
        talk("fp16_answer_as_json", binary("types", raw("FP16", "FP16", np.ones(1, np.float16)))),
        talk("unknown_output", infer("identity_fp32", _ROW, outputs=[{"name": "NOPE"}])),
        talk("output_without_name", infer("identity_fp32", _ROW, outputs=[{}])),
        talk("outputs_is_no_list", infer("identity_fp32", _ROW, outputs={"name": "Y"})),
        talk("reserved_parameter", _with({"triton_x": 1})),
        talk("parameter_is_a_list", _with({"x": [1]})),
        talk("parameter_is_null", _with({"x": None})),
        talk("parameters_is_no_object", infer("identity_fp32", _ROW, parameters=[1])),
        talk("priority_is_a_string", _with({"priority": "high"})),
        talk("priority_is_negative", _with({"priority": -1})),
        talk("timeout_is_a_string", _with({"timeout": "long"})),
        talk("sequence_start_is_a_number", _with({"sequence_start": 1})),
        talk("sequence_id_is_a_list", _with({"sequence_id": [1]})),
        talk("binary_data_output_is_a_number", _with({"binary_data_output": 1})),
        talk("id_is_a_number", infer("identity_fp32", _ROW, id=42)),
        talk("error_with_id", infer("identity_fp32", _ROW | {"datatype": "INT32"}, id="r9")),
        talk("decoupled_model", infer("repeat", tensor("N", "INT32", [1], [1]))),
        talk("decoupled_ensemble", infer("ensemble_decoupled", tensor("N", "INT32", [1], [1]))),
        talk(
            "refused_requests_are_not_counted_as_failed",
            infer("pass", tensor("X", "INT64", [1], [1])),
            infer("pass", tensor("X", "INT32", [2], [1, 2])),
            counted=("pass",),
        ),
        talk(
            "shared_memory_region_unknown",
            infer(
                "identity_fp32",
                {
                    "name": "X",
                    "datatype": "FP32",
                    "shape": [1, 4],
                    "parameters": {"shared_memory_region": "nowhere", "shared_memory_byte_size": 16},
                },
            ),
        ),
        talk(
            "output_to_unknown_shared_memory",
            infer(
                "identity_fp32",
                _ROW,
                outputs=[
                    {
                        "name": "Y",
                        "parameters": {"shared_memory_region": "nowhere", "shared_memory_byte_size": 16},
                    }
                ],
            ),
        ),
    ),
)

_X = np.array([[1, 2, 3, 4]], np.float32)


def _bytes(model: str, body: bytes, length: str | None) -> dict:
    import base64

    headers = {} if length is None else {"headers": {"Inference-Header-Content-Length": length}}
    return post(infer_path(model), base64=base64.b64encode(body).decode(), **headers)


_BINARY = Topic(
    name="infer_binary",
    run="all",
    exchanges=(
        *(
            talk(
                f"type_{name.lower()}",
                binary(
                    "types",
                    raw(name, name, np.array(_DATA.get(name, [0.5, -2, 65504]), dtype)),
                    outputs=[{"name": f"OUT_{name}", "parameters": {"binary_data": True}}],
                ),
            )
            for name, dtype in _NUMPY.items()
        ),
        talk(
            "type_bf16",
            binary(
                "identity_bf16",
                raw("X", "BF16", np.array([0x3F80, 0xC000], np.uint16)),
                outputs=_BINARY_Y,
            ),
        ),
        talk(
            "type_bytes",
            binary(
                "identity_string",
                raw("X", "BYTES", [b"", b"\xff\x00", "ü".encode()]),
                outputs=_BINARY_Y,
            ),
        ),
        talk("answer_as_json", binary("identity_fp32", raw("X", "FP32", _X)), counted=("identity_fp32",)),
        talk(
            "all_outputs_binary",
            binary(
                "add_sub",
                raw("A", "FP32", _X),
                raw("B", "FP32", _X),
                parameters=_BINARY_ALL,
            ),
        ),
        talk(
            "listed_outputs_do_not_heed_binary_data_output",
            binary(
                "add_sub",
                raw("A", "FP32", _X),
                raw("B", "FP32", _X),
                parameters=_BINARY_ALL,
                outputs=[{"name": "SUM"}, {"name": "DIFFERENCE", "parameters": {"binary_data": True}}],
            ),
        ),
        talk(
            "one_input_binary_and_one_json",
            binary(
                "add_sub",
                raw("A", "FP32", _X),
                (tensor("B", "FP32", [1, 4], [1, 1, 1, 1]), b""),
                outputs=[{"name": "SUM"}],
            ),
        ),
        talk("json_request_binary_answer", infer("identity_fp32", _ROW, outputs=_BINARY_Y)),
        talk(
            "binary_data_false",
            binary(
                "identity_fp32",
                raw("X", "FP32", _X),
                outputs=[{"name": "Y", "parameters": {"binary_data": False}}],
            ),
        ),
        talk(
            "zero_elements",
            binary("types", raw("INT32", "INT32", np.zeros(0, np.int32)), parameters=_BINARY_ALL),
        ),
        talk("extra_bytes", binary("identity_fp32", raw("X", "FP32", _X), tail=b"12")),
        talk(
            "bytes_missing",
            binary(
                "identity_fp32",
                raw("X", "FP32", _X, binary_data_size=22),
            ),
        ),
        talk(
            "size_too_small_for_the_shape",
            binary(
                "identity_fp32",
                raw("X", "FP32", _X[:, :3], binary_data_size=12),
                id="s",
            ),
            infer(
                "identity_fp32",
                {"name": "X", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 12}},
            ),
        ),
        talk(
            "size_does_not_fit_the_shape",
            binary(
                "identity_fp32",
                (
                    {
                        "name": "X",
                        "datatype": "FP32",
                        "shape": [1, 4],
                        "parameters": {"binary_data_size": 12},
                    },
                    b"\0" * 12,
                ),
            ),
        ),
        talk(
            "strings_cut",
            binary(
                "identity_string",
                (
                    {"name": "X", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
                    b"\x05\0\0\0ab",
                ),
            ),
        ),
        talk(
            "strings_too_few",
            binary(
                "identity_string",
                (
                    {"name": "X", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 6}},
                    b"\x02\0\0\0ab",
                ),
            ),
        ),
        talk(
            "strings_too_many",
            binary(
                "identity_string",
                (
                    {"name": "X", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 12}},
                    b"\x02\0\0\0ab\x02\0\0\0cd",
                ),
            ),
        ),
        talk(
            "data_and_size_both",
            binary(
                "identity_fp32",
                (
                    _ROW | {"parameters": {"binary_data_size": 16}},
                    _X.tobytes(),
                ),
            ),
        ),
        talk("header_length_beyond_the_body", _bytes("identity_fp32", b"{}", "99")),
        talk("header_length_is_no_number", _bytes("identity_fp32", b"{}", "many")),
        talk("header_length_negative", _bytes("identity_fp32", b"{}", "-1")),
        talk("raw_request", _bytes("identity_fp32", _X.tobytes(), "0")),
        talk("raw_request_of_a_dynamic_shape", _bytes("identity_bf16", b"\x80\x3f\x00\xc0", "0")),
        talk("raw_request_of_a_string", _bytes("fails", b"hello", "0")),
        talk("raw_request_of_strings_of_a_dynamic_shape", _bytes("identity_string", b"hello", "0")),
        talk("raw_request_of_a_wrong_size", _bytes("identity_fp32", b"\0" * 12, "0")),
        talk("raw_request_to_two_inputs", _bytes("add_sub", b"\0" * 16, "0")),
        talk("raw_request_to_an_unknown_model", _bytes("nowhere", b"\0" * 16, "0")),
        talk("empty_body", post(infer_path("identity_fp32"))),
        talk("empty_body_to_a_string", post(infer_path("fails"))),
        talk("bytes_that_are_no_text_as_json", binary("identity_string", raw("X", "BYTES", [b"\xff\xfe"]))),
    ),
)

_STATISTICS = Topic(
    name="statistics",
    run="all",
    exchanges=(
        talk(
            "of_a_model_freshly_loaded",
            post("/v2/repository/models/cold/unload"),
            settled(http("GET", "/v2/models/cold/ready")),
            post("/v2/repository/models/cold/load"),
            http("GET", "/v2/models/cold/stats"),
            infer("cold", tensor("X", "INT32", [1, 1], [1])),
            infer("cold", tensor("X", "INT32", [3, 1], [1, 2, 3])),
            infer("cold", tensor("X", "INT32", [3, 1], [1, 2, 3])),
            settled(http("GET", "/v2/models/cold/stats")),
            settled(http("GET", "/v2/models/cold/versions/1/stats")),
            settled({"protocol": "grpc", "method": "ModelStatistics", "message": {"name": "cold"}}),
        ),
        talk("of_an_unknown_model", http("GET", "/v2/models/nowhere/stats")),
        talk("of_an_unknown_version", http("GET", "/v2/models/pass/versions/9/stats")),
        talk("of_a_failed_model", http("GET", "/v2/models/broken_initialize/stats")),
        talk(
            "grpc_of_an_unknown_model",
            {
                "protocol": "grpc",
                "method": "ModelStatistics",
                "message": {"name": "nowhere"},
            },
        ),
        talk(
            "a_failure_of_the_model",
            infer("fails", tensor("MODE", "BYTES", [1], ["UNAVAILABLE"])),
            counted=("fails",),
        ),
        talk(
            "an_exception_of_the_model",
            infer("fails", tensor("MODE", "BYTES", [1], ["raise"])),
            counted=("fails",),
        ),
        talk(
            "a_success_of_an_ensemble",
            infer("ensemble_linear", _A, _B),
            counted=("ensemble_linear", "add_sub"),
        ),
        talk(
            "a_failure_of_an_ensemble",
            infer("ensemble_fails", tensor("MODE", "BYTES", [1], ["INTERNAL"])),
            counted=("ensemble_fails", "fails", "identity_string"),
        ),
        talk(
            "a_batch",
            infer("add_sub", tensor("A", "FP32", [5, 1], [1] * 5), tensor("B", "FP32", [5, 1], [1] * 5)),
            counted=("add_sub",),
        ),
    ),
)

TOPICS = (_JSON, _ERRORS, _BINARY, _STATISTICS)
