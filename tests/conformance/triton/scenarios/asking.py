"""Asking: short words for the requests of scenarios."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from tests.conformance.triton.exchange import Exchange, Step

__all__ = [
    "binary",
    "generate",
    "generate_stream",
    "get",
    "grpc",
    "grpc_infer",
    "http",
    "infer",
    "infer_path",
    "message",
    "metrics",
    "post",
    "raw",
    "settled",
    "stream",
    "talk",
    "tensor",
    "text",
    "together",
]

Request = dict[str, Any]

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def talk(name: str, *requests: Request | Step | list[Step], counted: tuple[str, ...] = ()) -> Exchange:
    """An exchange of requests one after the other."""
    steps: list[Step] = []
    for request in requests:
        if isinstance(request, list):
            steps += request
        else:
            steps.append(request if isinstance(request, Step) else Step(request=request))
    return Exchange(name=name, steps=tuple(steps), counted=counted)


def together(*requests: tuple[int, Request]) -> list[Step]:
    """Requests at the same time; each with the milliseconds after which it is sent."""
    return [Step(request=request, concurrent=True, after_ms=after_ms) for after_ms, request in requests]


def settled(request: Request) -> Step:
    """A request that is repeated until the server has settled."""
    return Step(request=request, settle=True)


def http(verb: str, path: str, **body: Any) -> Request:
    """Any HTTP request; `body` is json, text, base64 or headers."""
    return {"protocol": "http", "verb": verb, "path": path, **body}


def get(path: str) -> Request:
    return http("GET", path)


def post(path: str, json: Any = None, **body: Any) -> Request:
    return http("POST", path, **({} if json is None else {"json": json}), **body)


def text(path: str, body: str, **headers: str) -> Request:
    """A POST of a text that need not be JSON."""
    return http("POST", path, text=body, **({"headers": headers} if headers else {}))


def metrics(path: str = "/metrics") -> Request:
    return {"protocol": "metrics", "path": path}


def tensor(name: str, datatype: str, shape: list[int], data: list[Any], **parameters: Any) -> dict[str, Any]:
    """An input of JSON."""
    extra = {"parameters": parameters} if parameters else {}
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **extra}


def infer_path(model: str, version: str = "") -> str:
    return f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"


def infer(model: str, *inputs: dict[str, Any], version: str = "", **more: Any) -> Request:
    """An inference of JSON; `more` are id, outputs and parameters."""
    return post(infer_path(model, version), {**more, "inputs": list(inputs)})


def raw(name: str, datatype: str, array: np.ndarray | list[bytes], **parameters: Any) -> tuple[dict, bytes]:
    """An input whose data follow the JSON."""
    if isinstance(array, list):
        data = b"".join(len(item).to_bytes(4, "little") + item for item in array)
        shape = [len(array)]
    else:
        data, shape = array.tobytes(), list(array.shape)
    parameters = {"binary_data_size": len(data), **parameters}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}, data


def binary(model: str, *inputs: tuple[dict, bytes], tail: bytes = b"", **more: Any) -> Request:
    """An inference whose inputs are binary; `tail` is added to what follows the JSON."""
    head = {**more, "inputs": [description for description, _ in inputs]}
    data = b"".join(data for _, data in inputs) + tail
    return post(infer_path(model), head, base64=base64.b64encode(data).decode())


def generate(model: str, json: Any) -> Request:
    return post(f"/v2/models/{model}/generate", json)


def generate_stream(model: str, json: Any) -> Request:
    return post(f"/v2/models/{model}/generate_stream", json)


def grpc(method: str, **fields: Any) -> Request:
    return {"protocol": "grpc", "method": method, "message": fields}


def message(model: str, *inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A ModelInferRequest with typed contents, from inputs of `tensor`."""
    return {"model_name": model, **fields, "inputs": [_typed(item) for item in inputs]}


def grpc_infer(model: str, *inputs: dict[str, Any], **fields: Any) -> Request:
    return grpc("ModelInfer", **message(model, *inputs, **fields))


def stream(*messages: dict[str, Any], **metadata: str) -> Request:
    """All messages on one stream."""
    extra = {"metadata": metadata} if metadata else {}
    return {"protocol": "grpc_stream", "messages": list(messages), **extra}


def _typed(item: dict[str, Any]) -> dict[str, Any]:
    data = item["data"]
    if item["datatype"] == "BYTES":
        data = [base64.b64encode(word.encode()).decode() for word in data]
    rest = {key: value for key, value in item.items() if key != "data"}
    return {**rest, "contents": {_CONTENTS[item["datatype"]]: data}}
