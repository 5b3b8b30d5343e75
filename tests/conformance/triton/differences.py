"""Differences: where genserve answers otherwise than the real server, on purpose.

An entry holds for the exchanges whose `topic/name` matches its pattern, and tells the expected answer
(or counts) of genserve from what was recorded. Each has its row in a table of docs/triton.md or
docs/triton_qa.md.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genserve.config.backends import known_backends
from genserve.repository.index import scan
from genserve.repository.model_validation import Validator
from genserve.server.pages.bundled_pages import FOLDER
from genserve.version import __version__
from tests.conformance.triton.exchange import Exchange

__all__ = ["DIFFERENCES", "Difference", "of_genserve"]


Answer = dict[str, Any]
# Changes the real server's answer to step NUMBER, or its counts.
ChangeAnswer = Callable[[int, Answer], Answer]
ChangeCounts = Callable[[dict[str, Any]], dict[str, Any]]


def _same_answer(_: int, answer: Answer) -> Answer:
    return answer


def _same_counts(counts: dict[str, Any]) -> dict[str, Any]:
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One deliberate difference."""

    exchanges: str  # a regular expression that the whole of `topic/name` matches
    row: str  # its row in that table
    reason: str
    answer: ChangeAnswer = _same_answer
    counts: ChangeCounts = _same_counts


def of_genserve(topic: str, exchange: Exchange) -> Exchange:
    """The exchange with what genserve is expected to answer."""
    for difference in DIFFERENCES:
        if re.fullmatch(difference.exchanges, f"{topic}/{exchange.name}"):
            steps = tuple(
                replace(step, expect=difference.answer(number, copy.deepcopy(step.expect or {})))
                for number, step in enumerate(exchange.steps)
            )
            exchange = replace(
                exchange, steps=steps, counts=difference.counts(copy.deepcopy(exchange.counts or {}))
            )
    return exchange


def _own_name(_: int, answer: Answer) -> Answer:
    kind = "json" if "json" in answer else "message"
    if "extensions" in answer.get(kind, {}):
        answer[kind] |= {"name": "genserve", "version": __version__}
    return answer


def _json_error(_: int, answer: Answer) -> Answer:
    if answer.get("headers", {}).get("content-type") == "text/plain" and "error" in answer.get("json", {}):
        answer["headers"]["content-type"] = "application/json"
    return answer


# Messages about a request that cannot be read, but no messages of a model or a repository.
_UNREADABLE = re.compile(
    "Unable to (parse|set|open) |failed to (parse|get) |Expected JSON object |attempt to |"
    "unexpected error on creating Triton parameter"
)


def _error_of_the_client(_: int, answer: Answer) -> Answer:
    if answer.get("status") == 500 and _UNREADABLE.match(answer.get("json", {}).get("error", "")):
        answer["status"] = 400
    if answer.get("code") == "INTERNAL" and _UNREADABLE.match(answer.get("details", "")):
        answer["code"] = "INVALID_ARGUMENT"
    return answer


def _with_reasons(_: int, answer: Answer) -> Answer:
    """The index, with the reason of each model whose config is invalid."""
    models = Path(__file__).parent / "models"
    validator = Validator(scan([models]))
    errors = {
        name: validator.config_error(entry) or validator.poll_error(entry) or validator.step_error(entry)
        for name, entry in validator.entries.items()
    }
    lines = answer.get("json") or answer.get("message", {}).get("models", [])
    for line in lines if isinstance(lines, list) else []:
        if errors.get(line["name"]) and "state" not in line:
            reason = " ".join(str(errors[line["name"]]).replace(f"{models}/", "").split())
            line |= {"reason": reason, "state": "UNAVAILABLE"}
    return answer


def _in_order(*names: str) -> ChangeAnswer:
    """The outputs in this order, with their contents."""

    def change(_: int, answer: Answer) -> Answer:
        body = answer.get("json") or answer["message"]
        old = [output["name"] for output in body["outputs"]]
        order = [old.index(name) for name in names]
        body["outputs"] = [body["outputs"][index] for index in order]
        if "raw_output_contents" in body:
            body["raw_output_contents"] = [body["raw_output_contents"][index] for index in order]
        return answer

    return change


def _answers(*answers: Answer | None) -> ChangeAnswer:
    """Other answers to some of the steps; None: as recorded."""

    def change(number: int, answer: Answer) -> Answer:
        other = answers[number] if number < len(answers) else None
        return answer if other is None else other

    return change


def _counts(**models: dict[str, int]) -> ChangeCounts:
    return lambda _: models


def _json(body: Any, status: int = 200) -> Answer:
    return {"headers": {"content-type": "application/json"}, "json": body, "status": status}


def _outputs(model: str, *outputs: Any, **more: Any) -> Answer:
    return _json({"model_name": model, "model_version": "1", "outputs": list(outputs), **more})


def _output(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"data": data, "datatype": datatype, "name": name, "shape": shape}


def _said(*lines: str) -> Answer:
    return _outputs("bls", _output("SAID", "BYTES", [len(lines)], list(lines)))


def _with_code(code: str) -> ChangeAnswer:
    """The code that the called model gave, in place of INTERNAL."""

    def change(_: int, answer: Answer) -> Answer:
        said = answer["json"]["outputs"][0]["data"]
        said[0] = said[0].replace("INTERNAL", code, 1)
        return answer

    return change


def _executed(requests: int = 1, *, rows: int = 1, **more: int) -> dict[str, int]:
    """The counts of REQUESTS successes, each executed alone, with ROWS rows altogether."""
    parts = dict.fromkeys(("compute_infer", "compute_input", "compute_output", "queue", "success"), requests)
    numbers = parts | {"execution_count": requests, "inference_count": rows, **more}
    metrics = {"count": rows, "exec_count": requests, "request_success": requests}
    return {f"version 1: {name}": number for name, number in numbers.items()} | {
        f"metric nv_inference_{name} version=1": number for name, number in metrics.items()
    }


def _failed() -> dict[str, int]:
    """The counts of one request that was executed alone and failed."""
    return {
        "metric nv_inference_exec_count version=1": 1,
        "metric nv_inference_request_failure reason=BACKEND version=1": 1,
        "version 1: batches of 1": 1,
        "version 1: execution_count": 1,
        "version 1: fail": 1,
    }


def _missed(counts: dict[str, int], misses: int) -> dict[str, int]:
    return counts | {
        "version 1: cache_miss": misses,
        "metric nv_cache_num_misses_per_model version=1": misses,
    }


def _inflight_requests(_: int, answer: Answer) -> Answer:
    answer["json"]["ensemble_scheduling"] |= {"max_inflight_requests": 0}
    return answer


def _lower_case_headers(_: int, answer: Answer) -> Answer:
    told = answer["json"]["outputs"][0]["data"] if "outputs" in answer["json"] else None
    if told:
        request = json.loads(told[0])
        request["parameters"] = {name.lower(): value for name, value in request["parameters"].items()}
        told[0] = json.dumps(request, sort_keys=True)
    return answer


def _failed_reload(number: int, answer: Answer) -> Answer:
    if number == 4:
        answer["json"][0]["reason"] = (
            "answers from its old files, as the last load has failed: load failed for model 'cold': "
            "version 1 is at UNAVAILABLE state: Invalid argument: unable to find backend library for "
            "backend 'abacus', try specifying runtime on the model configuration.; "
            f"(known backends: {', '.join(known_backends())})"
        )
    return answer


def _out_of_range(_: int, answer: Answer) -> Answer:
    text = "element 0 of input 'INT8' is 300, which does not fit INT8"
    if "json" in answer:
        return _json({"error": text}, 400)
    return {"code": "INVALID_ARGUMENT", "details": text}


_CODES = {
    "INVALID_ARG": "unknown_output|unknown_input|wrong_type|wrong_shape|a_sequence_without_start",
    "NOT_FOUND": "unknown_model|failed_model|unknown_version|error_of_the_model",
}

DIFFERENCES = (
    Difference(
        exchanges=r"control/a_failed_load_keeps_the_loaded_model",
        reason="clients need not read the log",
        row="a reload that fails, in the index",
        answer=_failed_reload,
    ),
    Difference(
        exchanges=r"infer_errors/integer_out_of_range|grpc_infer/typed_int8_out_of_range",
        reason="a number that does not fit its type is a mistake that nobody would notice",
        row="a number that does not fit the data type of its input, such as 300 for INT8 or 1e39 for FP32, "
        "in JSON or in typed gRPC contents",
        answer=_out_of_range,
        counts=_counts(),
    ),
    Difference(
        exchanges=r".*/(grpc_)?server_metadata",
        reason="genserve says its own name and version",
        row="name and version of the server",
        answer=_own_name,
    ),
    Difference(
        exchanges=r".*",
        reason="the body of an error is JSON, so that is its content type, whatever was asked before",
        row="content type of an error",
        answer=_json_error,
    ),
    Difference(
        exchanges=r".*",
        reason="a client can mend a request that cannot be read, so the status is that of its errors",
        row="a request that cannot be parsed; a key of shared memory that cannot be opened",
        answer=_error_of_the_client,
    ),
    Difference(
        exchanges=r"ensembles/(diamond|grpc)",
        reason="the outputs of an ensemble come as its config lists them, not as the steps ended",
        row="order of an ensemble's outputs",
        answer=_in_order("SUM", "DIFFERENCE", "LEFT"),
    ),
    Difference(
        exchanges=r"ensembles/diamond_one_output",
        reason="an ensemble can be asked for one output whose tensor also feeds a step (there: a deadlock)",
        row="a request for one ensemble output that also feeds a step",
        answer=_answers(
            _outputs(
                "ensemble_diamond",
                _output("LEFT", "FP32", [1, 4], [1.0, 2.0, 3.0, 4.0]),
                parameters={"sequence_id": 0, "sequence_start": False, "sequence_end": False},
            )
        ),
        counts=_counts(
            ensemble_diamond=_executed(**{"batches of 1": 1}),
            add_sub={},     # what does not lead to LEFT does not run
            identity_fp32=_executed(2, rows=2, **{"batches of 1": 2}),
        ),
    ),
    Difference(
        exchanges=r"infer_errors/only_the_optional_input",
        reason="required inputs are looked for by name, not by their number",
        row="the required inputs of a model with optional ones",
        answer=_answers(
            _json(
                {
                    "error": "[request id: <id_unknown>] expected number of inputs between 1 and 2 but got 1 "
                    "inputs for model 'optional'. Got input(s) ['B'], but missing required input(s) ['A']. "
                    "Please provide all required input(s)."
                },
                status=400,
            )
        ),
    ),
    Difference(
        exchanges=r"infer_binary/bytes_that_are_no_text_as_json",
        reason="an answer in JSON is JSON: bytes that are no UTF-8 become U+FFFD",
        row="invalid UTF-8 in a JSON answer",
        answer=_answers(_outputs("identity_string", _output("Y", "BYTES", [1], ["\ufffd\ufffd"]))),
    ),
    Difference(
        exchanges=r"infer_binary/header_length_is_no_number",
        reason="a length that is no number is refused as such, not taken for 0",
        row="`Inference-Header-Content-Length` is not a number",
        answer=_answers(
            _json({"error": "Unable to parse Inference-Header-Content-Length, got: many"}, status=400)
        ),
    ),
    Difference(
        exchanges=r"iterations/three",
        reason="one request is counted once, not as a success and a failure of each iteration",
        row="statistics of iterative sequences",
        counts=_counts(
            iterative=_executed(**{"execution_count": 3, "batches of 1": 3})
            | {"metric nv_inference_exec_count version=1": 3}
        ),
    ),
    Difference(
        exchanges=r"control/load_with_config",
        reason="a load without a config reads that of the folder: there, that of the call before stays",
        row="a load without a config, after one with it",
        answer=_answers(
            *(None,) * 4, _outputs("cold", _output("COUNT", "INT32", [3, 1], [1, 1, 1]))
        ),
    ),
    Difference(
        exchanges=r"infer_json/sibling_modules",
        reason="a module beside model.py is one, whichever way it is imported: there, its state is doubled",
        row="`import helper` and `from .helper import x` next to `model.py`",
        answer=_answers(
            _outputs("imports", _output("Y", "INT32", [1], [12]), _output("SAME", "BOOL", [1], [True]))
        ),
    ),
    Difference(
        exchanges=r"statistics/a_failure_of_the_model",
        reason="a request that a model returns an error has failed: there, it counts as a success",
        row="a model returns an error",
        counts=_counts(fails=_failed()),
    ),
    Difference(
        exchanges=r"statistics/a_failure_of_an_ensemble",
        reason="a request that a model returns an error has failed, in its ensemble too, and once",
        row="a model returns an error",
        counts=_counts(
            fails=_failed(),
            ensemble_fails={
                "metric nv_inference_request_failure reason=OTHER version=1": 1,
                "version 1: fail": 1,
            },
            identity_string=_executed(**{"batches of 1": 1}),
        ),
    ),
    Difference(
        exchanges=r"cache/other_parameters_are_a_hit",
        reason="parameters belong to the key of the cache: they change what a model answers",
        row="key of the response cache",
        answer=_answers(None, _outputs("cached", _output("COUNT", "INT32", [1, 1], [2]))),
        counts=_counts(cached=_missed(_executed(2, rows=2, **{"batches of 1": 2}), 2)),
    ),
    Difference(
        exchanges=r"cache/another_shape_is_no_hit",
        reason="shapes belong to the key of the cache: there, the same bytes in another shape are a hit",
        row="key of the response cache",
        answer=_answers(None, _outputs("cached", _output("COUNT", "INT32", [2, 1], [1, 1]))),
        counts=_counts(cached=_missed(_executed(2, rows=3, **{"batches of 1": 1, "batches of 2": 1}), 2)),
    ),
    Difference(
        exchanges=r"cache/errors_are_not_cached",
        reason="an error is not cached: there, the second request gets an empty success",
        row="an error of a model with a response cache",
        answer=_answers(None, _json({"error": "negative"}, status=400)),
        counts=_counts(
            cached=_missed(
                {
                    "metric nv_inference_exec_count version=1": 2,
                    "metric nv_inference_request_failure reason=BACKEND version=1": 2,
                    "version 1: batches of 1": 2,
                    "version 1: execution_count": 2,
                    "version 1: fail": 2,
                },
                2,
            )
        ),
    ),
    Difference(
        exchanges=r"bls/decoupled_error_in_the_middle",
        reason="an error between responses reaches the caller: there, it is lost",
        row="an error through BLS",
        answer=_answers(_said('{"INDEX": [0]}', "UNAVAILABLE: no response 1", '{"INDEX": [2]}')),
    ),
    Difference(
        exchanges=r"decoupled/error_in_the_middle",
        reason="a request that a model returns an error has failed: there, it counts as a success",
        row="a model returns an error",
        counts=_counts(repeat=_failed()),
    ),
    Difference(
        exchanges=r"bls/error_of_the_model",
        reason="a request that a model returns an error has failed: there, it counts as a success",
        row="a model returns an error",
        counts=lambda counts: {**counts, "fails": _failed()},
    ),
    *(
        Difference(
            exchanges=rf"bls/({names})",
            reason="an error keeps its code through a call",
            row="an error through BLS",
            answer=_with_code(code),
        )
        for code, names in _CODES.items()
    ),
    Difference(
        exchanges=r"config/of_ensemble_.*",
        reason="a field of newer releases",
        row="config of an ensemble",
        answer=_inflight_requests,
    ),
    Difference(
        exchanges=r"headers/matching_headers_are_parameters",
        reason="names of headers have no case: models get them in lower case",
        row="forwarded headers",
        answer=_lower_case_headers,
    ),
    Difference(
        exchanges=r"routes/get_root",
        reason="the root is the chat page",
        row="`GET /` in a browser",
        answer=_answers(
            {
                "headers": {"content-type": "text/html; charset=utf-8"},
                "status": 200,
                "text": (FOLDER / "index.html").read_text(encoding="utf-8"),
            }
        ),
    ),
    Difference(
        exchanges=r"index/(all|not_only_ready_ones|of_a_named_repository)|"
        r"control/unloading_a_step_takes_the_ensemble_along",
        reason="clients need not read the log",
        row="a model whose config is invalid, in the index",
        answer=_with_reasons,
    ),
    Difference(
        exchanges=r"index/load_broken_ensemble",
        reason="a load that fails once more says why once more; so does the first one of the real server",
        row="a load of an ensemble that does not fit its steps, the second time",
        answer=_answers(
            _json(
                {
                    "error": "load failed for model 'broken_ensemble': ensemble broken_ensemble contains "
                    "models that are not available or ambiguous: nowhere\n"
                },
                400,
            )
        ),
    ),
    Difference(
        exchanges=r"routes/head_live",
        reason="load balancers and browsers probe with HEAD",
        row="`HEAD`",
        answer=_answers({"headers": {"content-type": "text/plain"}, "status": 200}),
    ),
    Difference(
        exchanges=r"routes/get_quoted_name",
        reason="percent-encoded characters in a path are what they stand for",
        row="percent-encoded characters in a path",
        answer=_answers(
            _json(
                {
                    "name": "pass",
                    "versions": ["1"],
                    "platform": "python",
                    "inputs": [{"name": "X", "datatype": "INT32", "shape": [1]}],
                    "outputs": [{"name": "Y", "datatype": "INT32", "shape": [1]}],
                }
            )
        ),
    ),
    Difference(
        exchanges=r"grpc_infer/negative_shape",
        reason="a negative size is refused as one, before it is compared with the config",
        row="a negative size in a shape, over gRPC",
        answer=_answers(
            {
                "code": "INVALID_ARGUMENT",
                "details": "[request id: <id_unknown>] All input dimensions should be specified for input "
                "'X' for model 'identity_fp32', got [1,-4]",
            }
        ),
    ),
    Difference(
        exchanges=r"grpc_infer/unknown_method",
        reason="the text is the gRPC library's",
        row="message for an unknown gRPC method",
        answer=_answers({"code": "UNIMPLEMENTED", "details": "Method not found!"}),
    ),
)
