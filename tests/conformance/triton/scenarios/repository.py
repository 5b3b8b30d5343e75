"""Repository: the index, loading and unloading, the cache, headers that are forwarded."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.conformance.triton.exchange import Step, Topic
from tests.conformance.triton.scenarios.asking import (
    get,
    grpc,
    grpc_infer,
    http,
    infer,
    infer_path,
    post,
    settled,
    talk,
    tensor,
    text,
)

__all__ = ["TOPICS"]

_INDEX = "/v2/repository/index"
_X = tensor("X", "INT32", [1], [7])
_COLD = tensor("X", "INT32", [1, 1], [7])


def _load(model: str, **parameters: Any) -> dict:
    body = {"parameters": parameters} if parameters else None
    return post(f"/v2/repository/models/{model}/load", body)


def _unload(model: str, **parameters: Any) -> dict:
    body = {"parameters": parameters} if parameters else None
    return post(f"/v2/repository/models/{model}/unload", body)


def _index(*models: str) -> dict:
    """The index without the models that other exchanges load and unload."""
    return post(_INDEX) | {"only": list(models)}


def _gone(*models: str) -> Step:
    return settled(_index(*models))


_STARTED = Topic(
    name="index",
    run="all",
    exchanges=(
        talk("all", post(_INDEX)),
        talk("ready_ones", post(_INDEX, {"ready": True})),
        talk("not_only_ready_ones", post(_INDEX, {"ready": False})),
        talk("of_a_named_repository", post("/v2/repository/main/index")),
        talk("malformed", text(_INDEX, "{x")),
        talk("grpc_ready_ones", grpc("RepositoryIndex", ready=True)),
        *(
            talk(f"load_{name}", _load(name))
            for name in (
                "broken_backend",
                "broken_class",
                "broken_completion",
                "broken_config",
                "broken_ensemble",
                "broken_exception",
                "broken_initialize",
                "cached_decoupled",
                "cached_sequence",
            )
        ),
        talk("grpc_load_broken_initialize", grpc("RepositoryModelLoad", model_name="broken_initialize")),
    ),
)

_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        y = pb_utils.Tensor("Y", np.array([42], np.int32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
"""
_CONFIG = {
    "backend": "python",
    "input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "Y", "data_type": "TYPE_INT32", "dims": [1]}],
}
_FILE = {"file:1/model.py": base64.b64encode(_MODEL.encode()).decode()}

_CONTROL = Topic(
    name="control",
    run="empty",
    exchanges=(
        talk(
            "nothing_is_loaded",
            _index("identity_fp32"),
            get("/v2/health/ready"),
            infer("identity_fp32", _COLD),
        ),
        talk("nothing_is_ready", post(_INDEX, {"ready": True}), get("/v2/models/identity_fp32/ready")),
        talk(
            "grpc_nothing_is_loaded",
            grpc("RepositoryIndex") | {"only": ["identity_fp32"]},
            grpc("ServerReady"),
        ),
        talk(
            "load_and_unload",
            _load("pass"),
            _index("pass"),
            infer("pass", _X),
            _unload("pass"),
            _gone("pass"),
            infer("pass", _X),
            get("/v2/models/pass/config"),
            get("/v2/models/pass/ready"),
            get("/v2/models/pass"),
        ),
        talk(
            "load_twice_keeps_the_model",
            _load("cold"),
            _load("cold"),
            infer("cold", _COLD),
            _load("cold"),
            infer("cold", _COLD),
            _unload("cold"),
            _gone("cold"),
        ),
        talk(
            "load_after_unload_is_a_new_model",
            _load("cold"),
            infer("cold", _COLD),
            _unload("cold"),
            _gone("cold"),
            _load("cold"),
            infer("cold", _COLD),
            _unload("cold"),
            _gone("cold"),
        ),
        talk(
            "an_ensemble_loads_what_it_needs",
            _load("cold_ensemble"),
            post(_INDEX, {"ready": True}),
            infer("cold_ensemble", _COLD),
            _unload("cold_ensemble"),
            _gone("cold", "cold_ensemble"),
            infer("cold", _COLD),
            _unload("cold"),
            _gone("cold"),
        ),
        talk(
            "unload_with_dependents",
            _load("cold_ensemble"),
            _unload("cold_ensemble", unload_dependents=True),
            _gone("cold", "cold_ensemble"),
        ),
        talk(
            "unloading_a_step_takes_the_ensemble_along",
            _load("cold_ensemble"),
            _unload("cold"),
            _gone("cold", "cold_ensemble"),
            infer("cold_ensemble", _COLD),
            get("/v2/models/cold_ensemble"),
            get("/v2/health/ready"),
            _load("cold"),
            settled(_index("cold", "cold_ensemble")),
            infer("cold_ensemble", _COLD),
            _unload("cold"),
            _gone("cold", "cold_ensemble"),
            _load("cold_ensemble"),
            infer("cold_ensemble", _COLD),
            _unload("cold_ensemble", unload_dependents=True),
            _gone("cold"),
        ),
        talk("load_unknown", _load("nowhere")),
        talk("unload_unknown", _unload("nowhere")),
        talk("unload_what_is_not_loaded", _unload("pass")),
        talk("load_with_unknown_parameter", _load("pass", colour="red")),
        talk("load_with_config_of_wrong_type", _load("pass", config=3)),
        talk("load_with_malformed_body", text("/v2/repository/models/pass/load", "{x")),
        talk("load_with_malformed_config", _load("pass", config="{x")),
        talk("load_with_unknown_field", _load("pass", config=json.dumps(_CONFIG | {"colour": 1}))),
        talk("load_with_wrong_name", _load("pass", config=json.dumps(_CONFIG | {"name": "other"}))),
        talk("unload_with_unknown_parameter", _unload("pass", colour="red")),
        talk("unload_dependents_is_no_bool", _unload("pass", unload_dependents="yes")),
        talk("load_of_a_named_repository", post("/v2/repository/main/models/pass/load")),
        talk("unload_of_a_named_repository", post("/v2/repository/main/models/pass/unload")),
        talk(
            "load_with_config",
            _load(
                "cold",
                config=json.dumps(
                    {
                        "backend": "python",
                        "max_batch_size": 2,
                        "dynamic_batching": {},
                        "input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [1]}],
                        "output": [{"name": "COUNT", "data_type": "TYPE_INT32", "dims": [1]}],
                    }
                ),
            ),
            get("/v2/models/cold/config"),
            infer("cold", tensor("X", "INT32", [3, 1], [1, 2, 3])),
            _load("cold"),
            infer("cold", tensor("X", "INT32", [3, 1], [1, 2, 3])),
            _unload("cold"),
            _gone("cold"),
        ),
        talk(
            "load_with_config_in_camel_case",
            _load(
                "cold",
                config=json.dumps(
                    {
                        "backend": "python",
                        "maxBatchSize": "3",
                        "input": [{"name": "X", "dataType": "TYPE_INT32", "dims": ["1"]}],
                        "output": [{"name": "COUNT", "dataType": "TYPE_INT32", "dims": [1]}],
                    }
                ),
            ),
            get("/v2/models/cold/config"),
            _unload("cold"),
            _gone("cold"),
        ),
        talk(
            "load_with_files",
            _load("sent", config=json.dumps(_CONFIG), **_FILE),
            infer("sent", _X),
            _index("sent"),
            _unload("sent"),
            _gone("sent"),
            infer("sent", _X),
        ),
        talk("load_with_files_without_config", _load("sent", **_FILE)),
        talk(
            "load_with_a_failing_file",
            _load(
                "sent",
                config=json.dumps(_CONFIG),
                **{
                    "file:1/model.py": base64.b64encode(b"raise ValueError('no such luck')\n").decode(),
                },
            ),
        ),
        talk(
            "load_with_a_file_that_is_no_base64",
            _load(
                "sent",
                config=json.dumps(_CONFIG),
                **{
                    "file:1/model.py": 3,
                },
            ),
        ),
        talk(
            "a_failed_load_keeps_the_loaded_model",
            _load("cold"),
            infer("cold", _COLD),
            _load("cold", config=json.dumps({"backend": "abacus"})),
            infer("cold", _COLD),
            _index("cold"),
            _unload("cold"),
            _gone("cold"),
        ),
        talk(
            "grpc_load_and_unload",
            grpc("RepositoryModelLoad", model_name="pass"),
            grpc_infer("pass", _X),
            grpc("RepositoryModelUnload", model_name="pass"),
            _gone("pass"),
            grpc_infer("pass", _X),
            grpc("RepositoryIndex") | {"only": ["pass"]},
        ),
        talk("grpc_load_unknown", grpc("RepositoryModelLoad", model_name="nowhere")),
        talk("grpc_unload_unknown", grpc("RepositoryModelUnload", model_name="nowhere")),
        talk(
            "grpc_load_of_a_named_repository",
            grpc("RepositoryModelLoad", repository_name="main", model_name="pass"),
        ),
        talk(
            "grpc_load_with_config_and_file",
            grpc(
                "RepositoryModelLoad",
                model_name="sent",
                parameters={
                    "config": {"string_param": json.dumps(_CONFIG)},
                    "file:1/model.py": {"bytes_param": _FILE["file:1/model.py"]},
                },
            ),
            grpc_infer("sent", _X),
            grpc("RepositoryModelUnload", model_name="sent"),
            _gone("sent"),
        ),
        talk(
            "grpc_load_with_config_of_wrong_type",
            grpc("RepositoryModelLoad", model_name="pass", parameters={"config": {"int64_param": 1}}),
        ),
        talk(
            "grpc_load_with_unknown_parameter",
            grpc("RepositoryModelLoad", model_name="pass", parameters={"x": {"int64_param": 1}}),
        ),
        talk(
            "grpc_unload_with_unknown_parameter",
            grpc("RepositoryModelUnload", model_name="pass", parameters={"x": {"int64_param": 1}}),
        ),
    ),
)

_FIXED = Topic(
    name="no_control",
    run="fixed",
    exchanges=(
        talk("ready_without_strict_readiness", get("/v2/health/ready")),
        talk("grpc_ready_without_strict_readiness", grpc("ServerReady")),
        talk("index", post(_INDEX)),
        talk("load_is_refused", _load("pass")),
        talk("unload_is_refused", _unload("pass")),
        talk("load_of_an_unknown_model_is_refused", _load("nowhere")),
        talk("grpc_load_is_refused", grpc("RepositoryModelLoad", model_name="pass")),
        talk("grpc_unload_is_refused", grpc("RepositoryModelUnload", model_name="pass")),
        talk("infer", infer("pass", _X)),
        talk("the_failed_model", infer("broken_initialize", _X)),
        talk("the_failed_model_is_not_ready", get("/v2/models/broken_initialize/ready")),
    ),
)


def _cached(*values: int, **more: Any) -> dict:
    return infer("cached", tensor("X", "INT32", [1, len(values)], list(values)), **more)


_CACHE = Topic(
    name="cache",
    run="cache",
    exchanges=(
        talk("a_second_time_is_a_hit", _cached(101), _cached(101), counted=("cached",)),
        talk("a_hit_has_the_new_id", _cached(102, id="first"), _cached(102, id="second")),
        talk("other_values_are_no_hit", _cached(103), _cached(104), counted=("cached",)),
        talk(
            "another_shape_is_no_hit",
            _cached(105, 106),
            infer("cached", tensor("X", "INT32", [2, 1], [105, 106])),
            counted=("cached",),
        ),
        talk(
            "other_parameters_are_a_hit",
            _cached(107, parameters={"p": 1}),
            _cached(107, parameters={"p": 2}),
            counted=("cached",),
        ),
        talk("errors_are_not_cached", _cached(-1), _cached(-1), counted=("cached",)),
        talk(
            "the_other_protocol_hits_too",
            _cached(108),
            grpc_infer("cached", tensor("X", "INT32", [1, 1], [108])),
            counted=("cached",),
        ),
        talk("a_model_without_cache", infer("pass", _X), infer("pass", _X), counted=("pass",)),
        talk("ready", get("/v2/health/ready")),
    ),
)

_HEADERS = Topic(
    name="headers",
    run="cache",
    exchanges=(
        talk(
            "matching_headers_are_parameters",
            http(
                "POST",
                infer_path("told"),
                json={"inputs": [_COLD], "outputs": [{"name": "REQUEST"}], "parameters": {"own": 1}},
                headers={"X-Colour": "red", "x-size": "7", "Colour": "blue"},
            ),
        ),
        talk(
            "generate_has_none",
            http(
                "POST",
                "/v2/models/told/generate",
                json={"X": 1},
                headers={"X-Colour": "red"},
            ),
        ),
    ),
)

TOPICS = (_STARTED, _CONTROL, _FIXED, _CACHE, _HEADERS)
