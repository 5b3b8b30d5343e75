"""Protocol: routes, settings, shared memory, versions, and what only gRPC has."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from tests.conformance.triton.exchange import Topic
from tests.conformance.triton.scenarios.asking import (
    get,
    grpc,
    grpc_infer,
    http,
    infer,
    message,
    post,
    stream,
    talk,
    tensor,
)

__all__ = ["TOPICS"]

_X = tensor("X", "INT32", [1], [7])
_ROW = tensor("X", "FP32", [1, 4], [1, 2, 3, 4])

_ROUTES = Topic(
    name="routes",
    run="all",
    exchanges=(
        *(
            talk(f"{verb.lower()}_{name}", http(verb, path))
            for verb, name, path in (
                ("GET", "root", "/"),
                ("GET", "unknown", "/v2/nowhere"),
                ("GET", "models", "/v2/models"),
                ("GET", "trailing_slash", "/v2/"),
                ("GET", "model_with_trailing_slash", "/v2/models/pass/"),
                ("GET", "health", "/v2/health"),
                ("GET", "index", "/v2/repository/index"),
                ("GET", "infer", "/v2/models/pass/infer"),
                ("GET", "generate", "/v2/models/generate/generate"),
                ("GET", "load", "/v2/repository/models/pass/load"),
                ("POST", "live", "/v2/health/live"),
                ("POST", "metadata", "/v2"),
                ("POST", "model_metadata", "/v2/models/pass"),
                ("POST", "model_config", "/v2/models/pass/config"),
                ("POST", "model_stats", "/v2/models/pass/stats"),
                ("PUT", "logging", "/v2/logging"),
                ("DELETE", "model", "/v2/models/pass"),
                ("HEAD", "live", "/v2/health/live"),
                ("GET", "live_with_a_query", "/v2/health/live?x=1"),
                ("GET", "unknown_model_route", "/v2/models/pass/nowhere"),
                ("GET", "quoted_name", "/v2/models/pa%73s"),
            )
        ),
    ),
)

_LOG = "/v2/logging"
_TRACE = "/v2/trace/setting"

_SETTINGS = Topic(
    name="settings",
    run="all",
    exchanges=(
        talk("log", get(_LOG)),
        talk(
            "log_is_set",
            post(_LOG, {"log_verbose_level": 1, "log_info": False}),
            get(_LOG),
            post(_LOG, {"log_verbose_level": 0, "log_info": True}),
        ),
        talk("log_format", post(_LOG, {"log_format": "ISO8601"}), post(_LOG, {"log_format": "default"})),
        talk("log_unknown_format", post(_LOG, {"log_format": "xml"})),
        talk("log_negative_level", post(_LOG, {"log_verbose_level": -1})),
        talk("log_wrong_type", post(_LOG, {"log_info": "yes"})),
        talk("log_file", post(_LOG, {"log_file": "x.log"})),
        talk("log_unknown_key", post(_LOG, {"nonsense": 1})),
        talk("log_malformed", http("POST", _LOG, text="{x")),
        talk("log_empty", post(_LOG)),
        talk("grpc_log", grpc("LogSettings", settings={})),
        talk("grpc_log_is_set", grpc("LogSettings", settings={"log_verbose_level": {"uint32_param": 0}})),
        talk(
            "grpc_log_unknown_format", grpc("LogSettings", settings={"log_format": {"string_param": "xml"}})
        ),
        talk("trace", get(_TRACE)),
        talk("trace_of_a_model", get("/v2/models/pass/trace/setting")),
        talk("trace_of_an_unknown_model", get("/v2/models/nowhere/trace/setting")),
        talk(
            "trace_is_set",
            post(_TRACE, {"trace_rate": "5", "trace_count": "2", "log_frequency": "3"}),
            get("/v2/models/pass/trace/setting"),
            post(_TRACE, {"trace_rate": "1000", "trace_count": "-1", "log_frequency": "0"}),
        ),
        talk(
            "trace_of_a_model_is_set_and_cleared",
            post("/v2/models/pass/trace/setting", {"trace_rate": "7"}),
            get(_TRACE),
            post("/v2/models/pass/trace/setting", {"trace_rate": None}),
        ),
        talk("trace_unknown_level", post(_TRACE, {"trace_level": ["NOISE"]})),
        talk("trace_rate_is_no_number", post(_TRACE, {"trace_rate": "fast"})),
        talk("trace_rate_as_number", post(_TRACE, {"trace_rate": 9})),
        talk("trace_file", post(_TRACE, {"trace_file": "x.json"})),
        talk("trace_unknown_key", post(_TRACE, {"nonsense": "1"})),
        talk(
            "trace_is_set_for_an_unknown_model", post("/v2/models/nowhere/trace/setting", {"trace_rate": "7"})
        ),
        talk("grpc_trace", grpc("TraceSetting", settings={})),
        talk("grpc_trace_of_an_unknown_model", grpc("TraceSetting", settings={}, model_name="nowhere")),
        talk(
            "grpc_trace_is_set",
            grpc("TraceSetting", settings={"trace_rate": {"value": ["9"]}}),
            grpc("TraceSetting", settings={"trace_rate": {"value": ["1000"]}}),
        ),
        talk("grpc_trace_rate_is_no_number", grpc("TraceSetting", settings={"trace_rate": {"value": ["x"]}})),
    ),
)

_SYSTEM = "/v2/systemsharedmemory"

_SHARED_MEMORY = Topic(
    name="shared_memory",
    run="all",
    exchanges=(
        talk("status", get(f"{_SYSTEM}/status")),
        talk("status_of_an_unknown_region", get(f"{_SYSTEM}/region/nowhere/status")),
        talk(
            "register_what_is_not_there",
            post(
                f"{_SYSTEM}/region/r/register", {"key": "/conformance_nowhere", "offset": 0, "byte_size": 8}
            ),
        ),
        talk("register_without_key", post(f"{_SYSTEM}/region/r/register", {"byte_size": 8})),
        talk("register_without_size", post(f"{_SYSTEM}/region/r/register", {"key": "/x"})),
        talk("register_nothing", post(f"{_SYSTEM}/region/r/register")),
        talk("register_no_json", http("POST", f"{_SYSTEM}/region/r/register", text="{x")),
        talk("unregister_what_is_not_there", post(f"{_SYSTEM}/region/r/unregister")),
        talk("unregister_all", post(f"{_SYSTEM}/unregister")),
        talk("cuda_status", get("/v2/cudasharedmemory/status")),
        talk("cuda_unregister_all", post("/v2/cudasharedmemory/unregister")),
        talk("grpc_status", grpc("SystemSharedMemoryStatus")),
        talk("grpc_status_of_an_unknown_region", grpc("SystemSharedMemoryStatus", name="nowhere")),
        talk(
            "grpc_register_what_is_not_there",
            grpc(
                "SystemSharedMemoryRegister",
                name="r",
                key="/conformance_nowhere",
                byte_size=8,
            ),
        ),
        talk("grpc_unregister_what_is_not_there", grpc("SystemSharedMemoryUnregister", name="r")),
    ),
)

_VERSIONS = Topic(
    name="versions",
    run="all",
    exchanges=(
        talk("highest_by_default", infer("versions_specific", _X), counted=("versions_specific",)),
        *(talk(f"specific_{version}", infer("versions_specific", _X, version=version)) for version in "1347"),
        talk("latest_by_default", infer("versions_latest", _X)),
        *(
            talk(f"latest_{version}", infer("versions_latest", _X, version=version))
            for version in ("1", "2", "10")
        ),
        talk("minus_one", infer("versions_specific", _X, version="-1")),
        talk("leading_zero", infer("versions_latest", _X, version="02")),
        talk("grpc_specific", grpc_infer("versions_specific", _X, model_version="1")),
        talk("grpc_minus_one", grpc_infer("versions_specific", _X, model_version="-1")),
        talk("grpc_not_chosen", grpc_infer("versions_specific", _X, model_version="4")),
        talk("grpc_no_number", grpc_infer("versions_specific", _X, model_version="one")),
        talk("ready", get("/v2/models/versions_specific/versions/3/ready")),
        talk("not_chosen_is_not_ready", get("/v2/models/versions_specific/versions/4/ready")),
    ),
)


def _raw(model: str, *arrays: np.ndarray, inputs: list[dict], **fields: Any) -> dict:
    data = [base64.b64encode(array.tobytes()).decode() for array in arrays]
    return grpc("ModelInfer", model_name=model, inputs=inputs, raw_input_contents=data, **fields)


def _described(name: str, datatype: str, shape: list[int]) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape}


_FOUR = np.arange(4, dtype=np.float32)[None]
_F = _described("X", "FP32", [1, 4])
_TYPED = {
    "BOOL": [True, False],
    "INT8": [-128, 127],
    "INT16": [-32768, 32767],
    "INT32": [-1, 2147483647],
    "INT64": [-1, 2**62],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "FP32": [0.5, -2.25],
    "FP64": [0.1, -1e300],
    "BYTES": ["", "grüße"],
}

_GRPC = Topic(
    name="grpc_infer",
    run="all",
    exchanges=(
        *(
            talk(f"typed_{name.lower()}", grpc_infer("types", tensor(name, name, [2], data)))
            for name, data in _TYPED.items()
        ),
        talk("raw", _raw("identity_fp32", _FOUR, inputs=[_F], id="r"), counted=("identity_fp32",)),
        talk("raw_fp16", _raw("types", np.ones(2, np.float16), inputs=[_described("FP16", "FP16", [2])])),
        talk(
            "raw_two",
            _raw(
                "add_sub",
                _FOUR,
                _FOUR,
                inputs=[
                    _described("A", "FP32", [1, 4]),
                    _described("B", "FP32", [1, 4]),
                ],
            ),
        ),
        talk(
            "raw_strings",
            _raw(
                "identity_string",
                np.frombuffer(b"\x02\0\0\0ab\0\0\0\0", np.uint8),
                inputs=[
                    _described("X", "BYTES", [2]),
                ],
            ),
        ),
        talk(
            "one_output",
            grpc_infer(
                "add_sub",
                tensor("A", "FP32", [1, 1], [1]),
                tensor("B", "FP32", [1, 1], [2]),
                outputs=[{"name": "DIFFERENCE"}],
            ),
        ),
        talk("with_version", grpc_infer("identity_fp32", _ROW, model_version="1")),
        talk("unknown_model", grpc_infer("nowhere", _ROW)),
        talk("no_model", grpc_infer("", _ROW)),
        talk("unknown_version", grpc_infer("identity_fp32", _ROW, model_version="9")),
        talk("failed_model", grpc_infer("broken_initialize", _X)),
        talk(
            "raw_and_typed",
            grpc(
                "ModelInfer",
                **(
                    message("identity_fp32", _ROW)
                    | {"raw_input_contents": [base64.b64encode(_FOUR.tobytes()).decode()]}
                ),
            ),
        ),
        talk("neither_raw_nor_typed", grpc("ModelInfer", model_name="identity_fp32", inputs=[_F])),
        talk("raw_too_many", _raw("identity_fp32", _FOUR, _FOUR, inputs=[_F])),
        talk(
            "raw_too_few",
            _raw(
                "add_sub",
                _FOUR,
                inputs=[
                    _described("A", "FP32", [1, 4]),
                    _described("B", "FP32", [1, 4]),
                ],
            ),
        ),
        talk("raw_too_short", _raw("identity_fp32", _FOUR[:, :3], inputs=[_F])),
        talk("raw_too_long", _raw("identity_fp32", np.zeros(5, np.float32), inputs=[_F])),
        talk(
            "raw_strings_cut",
            _raw(
                "identity_string",
                np.frombuffer(b"\x09\0\0\0ab", np.uint8),
                inputs=[
                    _described("X", "BYTES", [1]),
                ],
            ),
        ),
        talk("typed_too_few", grpc_infer("identity_fp32", tensor("X", "FP32", [1, 4], [1, 2, 3]))),
        talk("typed_strings_too_few", grpc_infer("identity_string", tensor("X", "BYTES", [3], ["a"]))),
        talk(
            "typed_in_the_wrong_field",
            grpc(
                "ModelInfer",
                model_name="identity_fp32",
                inputs=[
                    _F | {"contents": {"int_contents": [1, 2, 3, 4]}},
                ],
            ),
        ),
        talk(
            "typed_fp16",
            grpc(
                "ModelInfer",
                model_name="types",
                inputs=[
                    _described("FP16", "FP16", [2]) | {"contents": {"fp32_contents": [1, 2]}},
                ],
            ),
        ),
        talk("typed_int8_out_of_range", grpc_infer("types", tensor("INT8", "INT8", [1], [300]))),
        talk("wrong_datatype", grpc_infer("identity_fp32", tensor("X", "INT32", [1, 4], [1, 2, 3, 4]))),
        talk(
            "unknown_datatype",
            grpc(
                "ModelInfer",
                model_name="identity_fp32",
                inputs=[
                    _described("X", "FLOAT", [1, 4]) | {"contents": {"fp32_contents": [1, 2, 3, 4]}},
                ],
            ),
        ),
        talk("wrong_shape", grpc_infer("identity_fp32", tensor("X", "FP32", [1, 3], [1, 2, 3]), id="s")),
        talk("negative_shape", grpc_infer("identity_fp32", tensor("X", "FP32", [1, -4], [1, 2, 3, 4]))),
        talk("no_inputs", grpc_infer("identity_fp32")),
        talk("duplicate_input", grpc_infer("identity_fp32", _ROW, _ROW)),
        talk("unexpected_input", grpc_infer("identity_fp32", _ROW | {"name": "Q"})),
        talk("unknown_output", grpc_infer("identity_fp32", _ROW, outputs=[{"name": "NOPE"}])),
        talk("batch_too_large", grpc_infer("identity_fp32", tensor("X", "FP32", [9, 4], [0] * 36))),
        talk(
            "reserved_parameter",
            grpc_infer(
                "identity_fp32",
                _ROW,
                parameters={
                    "triton_x": {"int64_param": 1},
                },
            ),
        ),
        talk(
            "priority_is_a_string",
            grpc_infer(
                "identity_fp32",
                _ROW,
                parameters={
                    "priority": {"string_param": "x"},
                },
            ),
        ),
        talk(
            "timeout_is_a_string",
            grpc_infer(
                "identity_fp32",
                _ROW,
                parameters={
                    "timeout": {"string_param": "x"},
                },
            ),
        ),
        talk(
            "sequence_start_is_a_number",
            grpc_infer(
                "identity_fp32",
                _ROW,
                parameters={
                    "sequence_start": {"int64_param": 1},
                },
            ),
        ),
        talk(
            "sequence_id_is_a_bool",
            grpc_infer(
                "identity_fp32",
                _ROW,
                parameters={
                    "sequence_id": {"bool_param": True},
                },
            ),
        ),
        talk("parameter_without_value", grpc_infer("identity_fp32", _ROW, parameters={"x": {}})),
        talk(
            "unknown_shared_memory",
            grpc(
                "ModelInfer",
                model_name="identity_fp32",
                inputs=[
                    _F
                    | {
                        "parameters": {
                            "shared_memory_region": {"string_param": "nowhere"},
                            "shared_memory_byte_size": {"int64_param": 16},
                        }
                    }
                ],
            ),
        ),
        talk(
            "unknown_method",
            {"protocol": "grpc", "method": "/inference.GRPCInferenceService/Nothing", "message": ""},
        ),
    ),
)

_GRPC_STREAM = Topic(
    name="grpc_stream",
    run="all",
    exchanges=(
        talk("one", stream(message("pass", _X, id="1"))),
        talk(
            "in_the_order_sent",
            stream(
                *(message("pass", tensor("X", "INT32", [1], [value]), id=str(value)) for value in range(5))
            ),
            counted=("pass",),
        ),
        talk("nothing", stream()),
        talk(
            "empty_final_of_an_ordinary_model",
            stream(
                message(
                    "pass",
                    _X,
                    parameters={
                        "triton_enable_empty_final_response": {"bool_param": True},
                    },
                )
            ),
        ),
        talk("error_then_answer", stream(message("nowhere", _X, id="bad"), message("pass", _X, id="good"))),
        talk(
            "error_of_the_model_then_answer",
            stream(
                message("fails", tensor("MODE", "BYTES", [1], ["NOT_FOUND"]), id="bad"),
                message("pass", _X, id="good"),
            ),
        ),
        talk(
            "exception_of_the_model",
            stream(message("fails", tensor("MODE", "BYTES", [1], ["raise"]), id="x")),
        ),
        talk("wrong_shape", stream(message("pass", tensor("X", "INT32", [2], [1, 2]), id="w"))),
        talk("wrong_type", stream(message("pass", tensor("X", "INT64", [1], [1]), id="w"))),
        talk(
            "reserved_parameter", stream(message("pass", _X, parameters={"triton_x": {"bool_param": True}}))
        ),
        talk(
            "empty_final_is_no_bool",
            stream(
                message(
                    "pass",
                    _X,
                    parameters={
                        "triton_enable_empty_final_response": {"string_param": "yes"},
                    },
                )
            ),
        ),
        talk("true_grpc_errors", stream(message("nowhere", _X, id="bad"), triton_grpc_error="true")),
        talk(
            "true_grpc_errors_of_the_model",
            stream(
                message("fails", tensor("MODE", "BYTES", [1], ["UNAVAILABLE"]), id="bad"),
                triton_grpc_error="true",
            ),
        ),
        talk(
            "raw",
            stream(
                {
                    "model_name": "identity_fp32",
                    "inputs": [_F],
                    "raw_input_contents": [base64.b64encode(_FOUR.tobytes()).decode()],
                }
            ),
        ),
    ),
)

TOPICS = (_ROUTES, _SETTINGS, _SHARED_MEMORY, _VERSIONS, _GRPC, _GRPC_STREAM)
