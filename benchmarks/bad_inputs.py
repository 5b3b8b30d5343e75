"""Bad inputs: requests that a server must reject, each with its own status, and survive."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from raw_client import post_bytes

# `{model}` is the text model, and `echo` the small model.
_CHAT = {"model": "{model}", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
_ECHO = "/v2/models/echo/infer"
_TENSOR = {"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}

# The wrong fields of a chat, by what is wrong with them.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "max-tokens-negative": {"max_tokens": -1},
    "max-tokens-fraction": {"max_tokens": 1.5},
    "temperature-negative": {"temperature": -0.1},
    "temperature-string": {"temperature": "hot"},
    "top-p-negative": {"top_p": -0.1},
    "n-zero": {"n": 0},
    "n-huge": {"n": 10**6},
    "stop-empty": {"stop": [""]},
    "stop-many": {"stop": ["a"] * 100},
    "logit-bias-unknown-token": {"logit_bias": {"10000000": 1}},
    "seed-string": {"seed": "x"},
    "model-unknown": {"model": "no-such-model"},
    "messages-empty": {"messages": []},
    "messages-role-unknown": {"messages": [{"role": "root", "content": "hi"}]},
    "content-number": {"messages": [{"role": "user", "content": 1}]},
    "schema-broken": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
    "tools-broken": {"tools": [{"type": "function"}]},
}
_TEXTS: Mapping[str, str] = {
    "body-empty": "",
    "body-cut": '{"model": "{model}", "messages": [',
    "body-null": "null",
    "body-list": "[]",
    "two-documents": "{}{}",
    "key-twice": '{"model": "{model}", "model": "x", "messages": [{"role": "user", "content": "hi"}]}',
    "not-a-number": '{"model": "{model}", "prompt": "hi", "temperature": NaN}',
    "infinite": '{"model": "{model}", "prompt": "hi", "temperature": 1e999}',
    "half-a-surrogate-pair": '{"model": "{model}", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "nested-deeply": "[" * 100_000,
    "digits": '{"max_tokens": ' + "9" * 5000 + "}",
}
_TENSORS: Mapping[str, Mapping[str, Any]] = {
    "datatype-unknown": {"datatype": "FP99"},
    "datatype-other": {"datatype": "INT64"},
    "shape-negative": {"shape": [1, -2]},
    "shape-other": {"shape": [1, 3]},
    "shape-overflow": {"shape": [16, 2**60 + 2]},
    "data-missing": {"data": None},
    "data-text": {"data": ["a", "b"]},
    "name-unknown": {"name": "Z"},
}


def bad_inputs(model: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each request."""
    named = json.loads(json.dumps(_CHAT).replace("{model}", model))
    for name, fields in _FIELDS.items():
        yield name, post_bytes("/v1/chat/completions", json.dumps({**named, **fields}).encode())
    for name, text in _TEXTS.items():
        yield name, post_bytes("/v1/chat/completions", text.replace("{model}", model).encode())
    for name, fields in _TENSORS.items():
        tensor = {key: value for key, value in {**_TENSOR, **fields}.items() if value is not None}
        yield name, post_bytes(_ECHO, json.dumps({"inputs": [tensor]}).encode())
    yield "inputs-missing", post_bytes(_ECHO, b"{}")
    yield "header-length-wrong", post_bytes(_ECHO, b"{}", headers="Inference-Header-Content-Length: 99\r\n")
    yield "model-not-there", post_bytes("/v2/models/nothing/infer", b'{"inputs": []}')
    yield "path-unknown", post_bytes("/v1/nothing", b"{}")
    yield "generate-wrong-type", post_bytes("/generate", b'{"inputs": 1}')
    yield "completions-token-negative", post_bytes(
        "/v1/completions", json.dumps({"model": model, "prompt": [-1], "max_tokens": 1}).encode()
    )
