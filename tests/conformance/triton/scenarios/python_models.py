"""Python models: what they are told, may answer and call; decoupled ones; ensembles of them."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.triton.exchange import Topic
from tests.conformance.triton.scenarios.asking import (
    binary,
    generate,
    generate_stream,
    grpc_infer,
    http,
    infer,
    infer_path,
    message,
    metrics,
    settled,
    stream,
    talk,
    tensor,
    text,
)

__all__ = ["TOPICS"]

_CODES = (
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)
_EMPTY_FINAL = {"triton_enable_empty_final_response": {"bool_param": True}}


def _word(name: str, word: str) -> dict:
    return tensor(name, "BYTES", [1], [word])


def _mode(model: str, mode: str, **more: Any) -> dict:
    return infer(model, _word("MODE", mode), **more)


_ERRORS = Topic(
    name="python_errors",
    run="all",
    exchanges=(
        *(talk(f"code_{code.lower()}", _mode("fails", code)) for code in _CODES),
        *(talk(f"grpc_code_{code.lower()}", grpc_infer("fails", _word("MODE", code))) for code in _CODES),
        talk("default_code", _mode("fails", "default")),
        talk("error_wins_over_tensors", _mode("fails", "both")),
        talk("class_without_execute", infer("broken_execute")),
        talk("exception", _mode("fails", "raise", id="e")),
        talk("grpc_exception", grpc_infer("fails", _word("MODE", "raise"), id="e")),
        talk("model_exception", _mode("fails", "model_exception")),
        talk("works_after_an_exception", _mode("fails", "raise"), _mode("fails", "fine")),
        talk("deep_exception", _mode("bad_return", "raise_deep"), counted=("bad_return",)),
        *(
            talk(f"returns_{word}", _mode("bad_return", word))
            for word in ("string", "empty", "two", "integer", "tuple")
        ),
        *(
            talk(f"lenient_{word}", _mode("lenient", word))
            for word in (
                "type",
                "shape",
                "missing",
                "undeclared",
                "nothing",
                "nan",
                "zero_size",
                "scalar",
            )
        ),
        talk("lenient_missing_one_asked_for", _mode("lenient", "missing", outputs=[{"name": "Y"}])),
        talk("lenient_undeclared_over_grpc", grpc_infer("lenient", _word("MODE", "undeclared"))),
        *(
            talk(f"sender_{word}", _mode("sender", word), counted=("sender",) if word == "once" else ())
            for word in ("once", "final_apart", "error", "bad_flag", "no_response", "only_final")
        ),
    ),
)


def _told(rows: int = 1, **more: Any) -> dict:
    return infer("told", tensor("X", "INT32", [rows, 1], [1] * rows), **more)


_TOLD_REQUEST = [{"name": "REQUEST"}]

_TOLD = Topic(
    name="told",
    run="all",
    exchanges=(
        talk("of_a_plain_request", _told(outputs=_TOLD_REQUEST)),
        talk("of_a_batch", _told(2, outputs=_TOLD_REQUEST)),
        talk("args", _told(outputs=[{"name": "ARGS"}])),
        talk("config", _told(outputs=[{"name": "CONFIG"}])),
        talk("outputs_by_default", _told(id="all")),
        talk(
            "parameters_of_every_type",
            _told(
                outputs=_TOLD_REQUEST,
                parameters={"i": 7, "neg": -7, "d": 0.5, "b": True, "s": "word", "big": 2**40},
            ),
        ),
        talk(
            "consumed_parameters",
            _told(
                id="r",
                outputs=_TOLD_REQUEST,
                parameters={
                    "sequence_id": 5,
                    "sequence_start": True,
                    "sequence_end": True,
                    "priority": 2,
                    "timeout": 1000,
                    "binary_data_output": False,
                    "other": 1,
                },
            ),
        ),
        talk("string_correlation", _told(outputs=_TOLD_REQUEST, parameters={"sequence_id": "five"})),
        talk(
            "parameters_of_inputs_are_not_told",
            infer("told", tensor("X", "INT32", [1, 1], [1], colour="red"), outputs=_TOLD_REQUEST),
        ),
        talk(
            "grpc_parameters_of_every_type",
            grpc_infer(
                "told",
                tensor("X", "INT32", [1, 1], [1]),
                id="g",
                outputs=_TOLD_REQUEST,
                parameters={
                    "i": {"int64_param": -7},
                    "u": {"uint64_param": 2**40},
                    "d": {"double_param": 0.5},
                    "b": {"bool_param": True},
                    "s": {"string_param": "word"},
                    "sequence_id": {"int64_param": 9},
                    "sequence_start": {"bool_param": True},
                    "priority": {"uint64_param": 1},
                    "timeout": {"int64_param": 1000},
                },
            ),
        ),
        talk(
            "grpc_unsigned_sequence_id",
            grpc_infer(
                "told", tensor("X", "INT32", [1, 1], [1]), parameters={"sequence_id": {"uint64_param": 9}}
            ),
        ),
        talk(
            "generate_keeps_reserved_names",
            generate(
                "told",
                {
                    "X": 1,
                    "id": "q",
                    "sequence_id": 5,
                    "priority": 1,
                    "timeout": 1000,
                    "binary_data_output": True,
                    "other": "x",
                    "parameters": {"inner": 1.5},
                },
            ),
        ),
    ),
)


def _repeat(count: int, *, id: str = "", parameters: dict | None = None, **optional: Any) -> dict:  # noqa: A002
    inputs = [tensor("N", "INT32", [1], [count])]
    if "error_at" in optional:
        inputs.append(tensor("ERROR_AT", "INT32", [1], [optional["error_at"]]))
    if "final_apart" in optional:
        inputs.append(tensor("FINAL_APART", "BOOL", [1], [optional["final_apart"]]))
    return message("repeat", *inputs, id=id, parameters=parameters or {})


_DECOUPLED = Topic(
    name="decoupled",
    run="all",
    exchanges=(
        talk("three_responses", stream(_repeat(3, id="a")), counted=("repeat",)),
        talk("one_response", stream(_repeat(1))),
        talk("no_response", stream(_repeat(0, id="none")), counted=("repeat",)),
        talk("no_response_with_empty_final", stream(_repeat(0, id="none", parameters=_EMPTY_FINAL))),
        talk("final_apart", stream(_repeat(2, final_apart=True))),
        talk(
            "final_apart_with_empty_final",
            stream(_repeat(2, final_apart=True, id="f", parameters=_EMPTY_FINAL)),
        ),
        talk("final_with_the_last_with_empty_final", stream(_repeat(2, parameters=_EMPTY_FINAL))),
        talk("error_in_the_middle", stream(_repeat(3, error_at=1, id="e")), counted=("repeat",)),
        talk("error_first", stream(_repeat(2, error_at=0))),
        talk("error_last", stream(_repeat(2, error_at=1))),
        talk("one_output_asked_for", stream(_repeat(1) | {"outputs": [{"name": "INDEX"}]})),
        talk(
            "exception_after_responses",
            stream(
                message("repeat_raises", tensor("N", "INT32", [1], [2]), id="x"),
            ),
            counted=("repeat_raises",),
        ),
        talk(
            "exception_before_any_response", stream(message("repeat_raises", tensor("N", "INT32", [1], [0])))
        ),
        talk("returns_a_list", stream(message("repeat_returns", tensor("N", "INT32", [1], [0])))),
        talk("grpc_unary", grpc_infer("repeat", tensor("N", "INT32", [1], [1]))),
        talk("as_events", generate_stream("repeat", {"N": 3})),
        talk("as_events_none", generate_stream("repeat", {"N": 0})),
        talk("as_events_error_first", generate_stream("repeat", {"N": 2, "ERROR_AT": 0})),
        talk("as_events_error_in_the_middle", generate_stream("repeat", {"N": 3, "ERROR_AT": 1})),
        talk("as_events_exception", generate_stream("repeat_raises", {"N": 1})),
        talk("generate_one", generate("repeat", {"N": 1})),
        talk("generate_one_final_apart", generate("repeat", {"N": 1, "FINAL_APART": True})),
        talk("generate_none", generate("repeat", {"N": 0})),
        talk("generate_two", generate("repeat", {"N": 2})),
        talk("generate_error", generate("repeat", {"N": 1, "ERROR_AT": 0})),
    ),
)

_A = tensor("A", "FP32", [1, 4], [1, 2, 3, 4])
_B = tensor("B", "FP32", [1, 4], [10, 20, 30, 40])

_ENSEMBLES = Topic(
    name="ensembles",
    run="all",
    exchanges=(
        talk("linear", infer("ensemble_linear", _A, _B), counted=("ensemble_linear", "add_sub")),
        talk(
            "linear_batch_of_two",
            infer(
                "ensemble_linear",
                tensor("A", "FP32", [2, 1], [1, 2]),
                tensor("B", "FP32", [2, 1], [3, 4]),
                id="b",
            ),
            counted=("ensemble_linear", "add_sub"),
        ),
        talk(
            "diamond",
            infer("ensemble_diamond", _A, _B),
            counted=("ensemble_diamond", "add_sub", "identity_fp32"),
        ),
        talk(
            "diamond_one_output",
            infer("ensemble_diamond", _A, _B, outputs=[{"name": "LEFT"}]),
            counted=("ensemble_diamond", "add_sub", "identity_fp32"),
        ),
        talk("grpc", grpc_infer("ensemble_diamond", _A, _B, id="g")),
        talk("on_a_stream", stream(message("ensemble_linear", _A, _B, id="s"))),
        talk(
            "binary",
            http(
                "POST",
                infer_path("ensemble_linear"),
                json={
                    "inputs": [_A, _B],
                    "parameters": {"binary_data_output": True},
                },
            ),
        ),
        talk(
            "sequence_parameters_come_back",
            infer(
                "ensemble_linear",
                _A,
                _B,
                parameters={"sequence_id": 7, "sequence_start": True},
            ),
        ),
        talk(
            "without_batching_over_a_batching_step",
            infer(
                "ensemble_unbatched",
                tensor("X", "FP32", [2, 4], list(range(8))),
            ),
            counted=("ensemble_unbatched", "identity_fp32"),
        ),
        talk(
            "too_large_for_the_step",
            infer(
                "ensemble_unbatched",
                tensor("X", "FP32", [9, 4], list(range(36))),
            ),
        ),
        talk(
            "decoupled_step",
            stream(message("ensemble_decoupled", tensor("N", "INT32", [1], [1]), id="d")),
            counted=("ensemble_decoupled", "repeat", "pass"),
        ),
        talk(
            "decoupled_step_of_none",
            stream(
                message(
                    "ensemble_decoupled", tensor("N", "INT32", [1], [0]), id="d", parameters=_EMPTY_FINAL
                ),
            ),
        ),
        talk("decoupled_step_of_three", generate_stream("ensemble_decoupled", {"N": 3})),
        talk("step_fails", _mode("ensemble_fails", "NOT_FOUND")),
        talk("step_raises", _mode("ensemble_fails", "raise")),
        talk("grpc_step_fails", grpc_infer("ensemble_fails", _word("MODE", "UNAVAILABLE"))),
        talk("wrong_shape", infer("ensemble_diamond", tensor("A", "FP32", [1, 3], [1, 2, 3]), _B)),
        talk("input_missing", infer("ensemble_linear", _A)),
        talk(
            "wrong_shape_for_the_step",
            infer(
                "ensemble_linear",
                tensor("A", "FP32", [1, 2], [1, 2]),
                tensor("B", "FP32", [1, 3], [1, 2, 3]),
            ),
        ),
        talk("generate", generate("ensemble_linear", {"A": [1, 2], "B": [3, 4]})),
        talk("not_loaded_for_a_wrong_type", infer("broken_type", tensor("X", "INT32", [1, 4], [1, 2, 3, 4]))),
        talk("not_loaded_for_a_missing_model", infer("broken_ensemble", tensor("X", "INT32", [1], [1]))),
    ),
)


def _bls(model: str, mode: str = "once", **value: Any) -> dict:
    words = {"MODEL": model, "MODE": mode, "VALUE": json.dumps(value)}
    return infer("bls", *(_word(name, word) for name, word in words.items()))


_ONE = {"X": ["int32", [1], [5]]}
_TWO = {"A": ["float32", [1, 2], [1, 2]], "B": ["float32", [1, 2], [3, 4]]}

_BLS = Topic(
    name="bls",
    run="all",
    exchanges=(
        talk("once", _bls("pass", inputs=_ONE, outputs=["Y"]), counted=("bls", "pass")),
        talk("all_outputs", _bls("add_sub", inputs=_TWO)),
        talk("some_outputs", _bls("add_sub", inputs=_TWO, outputs=["DIFFERENCE"])),
        talk("an_ensemble", _bls("ensemble_linear", inputs=_TWO, outputs=["Y"])),
        talk("of_a_version", _bls("versions_specific", inputs=_ONE, model_version=1)),
        talk(
            "decoupled", _bls("repeat", "decoupled", inputs={"N": ["int32", [1], [3]]}), counted=("repeat",)
        ),
        talk("decoupled_none", _bls("repeat", "decoupled", inputs={"N": ["int32", [1], [0]]})),
        talk(
            "decoupled_final_apart",
            _bls(
                "repeat",
                "decoupled",
                inputs={"N": ["int32", [1], [1]], "FINAL_APART": ["bool", [1], [True]]},
            ),
        ),
        talk(
            "decoupled_error_in_the_middle",
            _bls(
                "repeat",
                "decoupled",
                inputs={"N": ["int32", [1], [3]], "ERROR_AT": ["int32", [1], [1]]},
            ),
        ),
        talk("decoupled_call_of_an_ordinary_model", _bls("pass", "decoupled", inputs=_ONE)),
        talk("ordinary_call_of_a_decoupled_model", _bls("repeat", inputs={"N": ["int32", [1], [1]]})),
        talk("unknown_model", _bls("nowhere", inputs=_ONE, outputs=["Y"])),
        talk("failed_model", _bls("broken_initialize", inputs=_ONE)),
        talk("unknown_version", _bls("pass", inputs=_ONE, model_version=9)),
        talk("unknown_output", _bls("pass", inputs=_ONE, outputs=["NOPE"])),
        talk("unknown_input", _bls("pass", inputs={"Q": ["int32", [1], [5]]})),
        talk("wrong_type", _bls("pass", inputs={"X": ["int64", [1], [5]]})),
        talk("wrong_shape", _bls("pass", inputs={"X": ["int32", [2], [5, 6]]})),
        talk(
            "error_of_the_model",
            _bls("fails", inputs={"MODE": ["object", [1], ["NOT_FOUND"]]}),
            counted=("fails", "bls"),
        ),
        talk("exception_of_the_model", _bls("fails", inputs={"MODE": ["object", [1], ["raise"]]})),
        talk(
            "what_it_passes_on",
            _bls(
                "told",
                inputs={"X": ["int32", [1, 1], [1]]},
                outputs=["REQUEST"],
                request_id="bls",
                correlation_id=7,
                flags=3,
                timeout=1000,
                parameters={"i": 1, "b": True, "s": "word"},
            ),
        ),
        talk(
            "what_it_passes_on_by_default",
            _bls(
                "told",
                inputs={"X": ["int32", [1, 1], [1]]},
                outputs=["REQUEST"],
            ),
        ),
        talk(
            "a_sequence",
            _bls("sequence_oldest", inputs={"X": ["int32", [1, 1], [1]]}, correlation_id=55, flags=3),
        ),
        talk(
            "a_sequence_without_start",
            _bls("sequence_oldest", inputs={"X": ["int32", [1, 1], [1]]}, correlation_id=56),
        ),
        talk("bad_parameter", _bls("pass", inputs=_ONE, parameters={"x": [1]})),
        talk(
            "asynchronous",
            infer("bls_async", tensor("N", "INT32", [1], [2])),
            counted=("bls_async", "pass", "repeat"),
        ),
        talk("in_initialize", infer("bls_initialize", _word("MODEL", "pass"))),
        talk("is_model_ready_of_an_unknown_model", infer("bls_initialize", _word("MODEL", "nowhere"))),
        talk(
            "models_load_and_unload_models",
            infer("manager", _word("ACTION", "unload"), _word("MODEL", "cold")),
            settled(infer("manager", _word("ACTION", "ready"), _word("MODEL", "cold"))),
            infer("manager", _word("ACTION", "load"), _word("MODEL", "cold")),
            infer("manager", _word("ACTION", "ready"), _word("MODEL", "cold")),
        ),
    ),
)

_GENERATE = {"text_input": "a b c", "max_tokens": 2}

_GENERATION = Topic(
    name="generate",
    run="all",
    exchanges=(
        talk("one", generate("generate", _GENERATE), counted=("generate",)),
        talk("with_id", generate("generate", _GENERATE | {"id": "q1"})),
        talk(
            "stream",
            generate_stream("generate", _GENERATE | {"stream": True, "id": "q1"}),
            counted=("generate",),
        ),
        talk(
            "parameters_are_told",
            generate(
                "generate",
                _GENERATE
                | {
                    "temperature": 0.5,
                    "top_k": 3,
                    "greedy": True,
                    "name": "x",
                },
            ),
        ),
        talk(
            "parameters_inside_parameters",
            generate(
                "generate",
                {
                    "text_input": "a b c",
                    "parameters": {"max_tokens": 2, "temperature": 0.5},
                },
            ),
        ),
        talk("parameters_is_no_object", generate("generate", _GENERATE | {"parameters": "x"})),
        talk("list_as_parameter", generate("generate", _GENERATE | {"x": [1]})),
        talk("null_as_parameter", generate("generate", _GENERATE | {"x": None})),
        talk("object_as_parameter", generate("generate", _GENERATE | {"x": {"y": 1}})),
        talk("list_inside_parameters", generate("generate", _GENERATE | {"parameters": {"x": [1]}})),
        talk("input_missing", generate("generate", {"text_input": "a"})),
        talk("number_for_text", generate("generate", _GENERATE | {"text_input": 3})),
        talk("text_for_number", generate("generate", _GENERATE | {"max_tokens": "3"})),
        talk("number_for_bool", generate("generate", _GENERATE | {"stream": 1})),
        talk("float_for_integer", generate("generate", _GENERATE | {"max_tokens": 2.5})),
        talk("too_many_elements", generate("generate", _GENERATE | {"max_tokens": [1, 2]})),
        talk("element_as_list", generate("generate", {"text_input": ["a b"], "max_tokens": [1]})),
        talk(
            "two_elements_of_output",
            generate("generate", {"text_input": "two", "max_tokens": 1, "stream": True}),
        ),
        talk("two_responses", generate("generate", _GENERATE | {"stream": True})),
        talk("no_response", generate_stream("generate", {"text_input": "", "max_tokens": 1, "stream": True})),
        talk("error", generate("generate", {"text_input": "fail", "max_tokens": 1})),
        talk(
            "stream_with_an_error",
            generate_stream(
                "generate",
                {
                    "text_input": "a fail b",
                    "max_tokens": 3,
                    "stream": True,
                },
            ),
        ),
        talk("stream_of_a_wrong_input", generate_stream("generate", {"text_input": "a"})),
        talk("unknown_model", generate("nowhere", _GENERATE)),
        talk("stream_of_an_unknown_model", generate_stream("nowhere", _GENERATE)),
        talk("malformed_json", text("/v2/models/generate/generate", "{text")),
        talk("empty_body", text("/v2/models/generate/generate", "")),
        talk("json_array", text("/v2/models/generate/generate", "[]")),
        talk(
            "duplicate_input",
            text("/v2/models/generate/generate", '{"text_input": "a", "text_input": "b", "max_tokens": 1}'),
        ),
        talk("with_version", http("POST", "/v2/models/generate/versions/1/generate", json=_GENERATE)),
        talk("batching_model", generate("generate_batch", {"PROMPT": "hi"})),
        talk(
            "dims_by_count",
            generate("generate_batch", {"PROMPT": "hi", "GRID": [1, 2, 3, 4, 5, 6], "FLAG": True}),
        ),
        talk("dims_do_not_divide", generate("generate_batch", {"PROMPT": "hi", "GRID": [1, 2, 3]})),
        talk("nested_list", generate("generate_batch", {"PROMPT": "hi", "GRID": [[1, 2], [3, 4]]})),
        talk("error_code_is_lost", generate("generate_batch", {"PROMPT": "missing"})),
        talk("stream_error_code_is_lost", generate_stream("generate_batch", {"PROMPT": "missing"})),
        talk("stream_of_a_model_with_one_response", generate_stream("generate_batch", {"PROMPT": "hi"})),
        talk("triton_parameter", generate("generate_batch", {"PROMPT": "hi", "triton_x": 1})),
        talk("non_ascii_text", generate("generate_batch", {"PROMPT": "grüße \u4f60"})),
    ),
)


def _measured(mode: str, value: float) -> dict:
    return infer("measured", tensor("VALUE", "FP32", [1], [value]), _word("MODE", mode))


_METRICS = Topic(
    name="metrics",
    run="all",
    exchanges=(
        talk("increments_of_a_counter", _measured("increment", 0)),
        talk("a_gauge_is_set", _measured("set", 2.5), _measured("lower", 1), _measured("again", 0)),
        talk("a_histogram_observes", _measured("observe", 1.5)),
        talk("a_histogram_needs_buckets", _measured("no_buckets", 1)),
        talk("another_path", metrics("/nowhere")),
    ),
)


def _classified(count: object, output: str = "Y", rows: int = 1, **more: Any) -> dict:
    data = [0.25, 7.5, -1, 3, 2, 1][: 3 * rows]
    return infer(
        "labelled",
        tensor("X", "FP32", [rows, 3], data),
        outputs=[{"name": output, "parameters": {"classification": count, **more}}],
    )


_CLASSIFICATION = Topic(
    name="classification",
    run="all",
    exchanges=(
        talk("top_two", _classified(2)),
        talk("top_one_of_two_rows", _classified(1, rows=2)),
        talk("more_than_there_are", _classified(9)),
        talk("zero_is_none", _classified(0)),
        talk("negative", _classified(-1)),
        talk("no_number", _classified("two")),
        talk("without_labels", _classified(2, "PLAIN")),
        talk("binary", _classified(2, binary_data=True)),
        talk(
            "equal_values",
            infer(
                "labelled",
                tensor("X", "FP32", [1, 3], [1, 1, 1]),
                outputs=[
                    {"name": "Y", "parameters": {"classification": 3}},
                ],
            ),
        ),
        talk(
            "nan",
            binary(
                "labelled",
                (
                    {
                        "name": "X",
                        "datatype": "FP32",
                        "shape": [1, 3],
                        "parameters": {"binary_data_size": 12},
                    },
                    b"\0\0\x80\x7f\0\0\x80\x3f\0\0\x80\xff",
                ),
                outputs=[{"name": "Y", "parameters": {"classification": 3}}],
            ),
        ),
        talk(
            "grpc",
            grpc_infer(
                "labelled",
                tensor("X", "FP32", [1, 3], [1, 3, 2]),
                outputs=[
                    {"name": "Y", "parameters": {"classification": {"int64_param": 2}}},
                ],
            ),
        ),
        talk(
            "grpc_zero",
            grpc_infer(
                "labelled",
                tensor("X", "FP32", [1, 3], [1, 3, 2]),
                outputs=[
                    {"name": "Y", "parameters": {"classification": {"int64_param": 0}}},
                ],
            ),
        ),
        talk(
            "grpc_no_number",
            grpc_infer(
                "labelled",
                tensor("X", "FP32", [1, 3], [1, 3, 2]),
                outputs=[
                    {"name": "Y", "parameters": {"classification": {"string_param": "2"}}},
                ],
            ),
        ),
    ),
)

TOPICS = (
    _ERRORS,
    _TOLD,
    _DECOUPLED,
    _ENSEMBLES,
    _BLS,
    _GENERATION,
    _METRICS,
    _CLASSIFICATION,
)
