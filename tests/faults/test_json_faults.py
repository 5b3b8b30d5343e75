"""Faults of JSON: bodies that are no JSON, or more of it than a server wants to read."""

from __future__ import annotations

import json

import pytest

from genserve.server.http.request_body import MAX_DEPTH
from tests.faults.shared_server import CANARY, SharedServer
from tests.support.representatives import with_extended

# A path of each reader of bodies, and the field of a prompt in it.
FIELDS = {"/v1/completions": "prompt", "/tokenize": "prompt", "/generate": "inputs"}
CHAT = "/v1/chat/completions"
GENERATE = "/v2/models/tiny/generate"


def nested(depth: int) -> bytes:
    """An object that has lists in an unknown field; `depth` counts both."""
    return b'{"x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


TEXTS = {
    "empty": b"",
    "spaces": b"  \n ",
    "cut": b'{"prompt": "',
    "brace": b"{",
    "text-behind": b'{"prompt": "x"} x',
    "two-documents": b'{"prompt": "x"}{"prompt": "x"}',
    "comment": b'{"prompt": "x" /* y */}',
    "comma-at-the-end": b'{"prompt": "x",}',
    "single-quotes": b"{'prompt': 'x'}",
    "null": b"null",
    "list": b"[]",
    "text": b'"x"',
    "number": b"1",
    "control-character": b'{"prompt": "a\nb"}',
    "byte-order-mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "utf-16": '{"prompt": "x"}'.encode("utf-16"),
    "latin-1": '{"prompt": "\u00e4"}'.encode("latin-1"),
    "surrogates-in-utf-8": b'{"prompt": "\xed\xa0\x80"}',
    "lone-surrogate": b'{"prompt": "\\ud800"}',
    "lone-surrogate-in-a-key": b'{"prompt": "x", "\\udfff": 1}',
    "key-twice": b'{"prompt": "x", "prompt": "y"}',
    "key-twice-once-escaped": b'{"prompt": "x", "\\u0070rompt": "y"}',
    "key-twice-inside": b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "too-large-a-float": b'{"prompt": "x", "temperature": 1e999}',
    "too-large-a-float-in-an-open-field": b'{"prompt": "x", "response_format": {"a": -1e999}}',
    "integer-of-5000-digits": b'{"prompt": "x", "seed": %b}' % (b"9" * 5000),
    "too-deep-by-one": nested(MAX_DEPTH + 1),
    "too-deep-for-the-stack": nested(100_000),
    "brackets-without-end": b'{"prompt": ' + b"[" * 5_000_000,
    "braces-without-end": b'{"a":' * 1_000_000,
    "million-keys": b"{" + b",".join([b'"k%d":1' % i for i in range(500_000)]) + b"}",
    "key-of-a-megabyte": b'{"prompt": [{"%b": 1}]}' % (b"k" * 2**20),
}


@pytest.mark.parametrize("path", with_extended(FIELDS, always=list(FIELDS)[:1]))
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_bad_text_is_a_4xx_that_does_not_repeat_it(server: SharedServer, path: str, text: bytes) -> None:
    field = FIELDS[path].encode()
    text = text.replace(b"\\u0070rompt", b"\\u%04x%b" % (field[0], field[1:]))
    response = server.post(path, text.replace(b'"prompt"', b'"%b"' % field))
    assert response.status == (422 if path == "/generate" else 400), response.body
    assert len(response.body) < 1024
    assert response.error


VALUES = {
    "text-for-an-integer": b'{"prompt": "x", "max_tokens": "1"}',
    "true-for-an-integer": b'{"prompt": "x", "max_tokens": true}',
    "float-for-an-integer": b'{"prompt": "x", "max_tokens": 1.5}',
    "one-for-true": b'{"prompt": "x", "stream": 1}',
}


@pytest.mark.parametrize("text", VALUES.values(), ids=VALUES)
def test_a_value_is_not_converted(server: SharedServer, text: bytes) -> None:
    response = server.post("/v1/completions", text)
    assert response.status == 400
    assert response.json()["error"]["param"] in ("max_tokens", "stream")


KSERVE = {
    name: TEXTS[name] for name in ("empty", "cut", "text-behind", "null", "list", "too-deep-for-the-stack")
}


@pytest.mark.parametrize("text", KSERVE.values(), ids=KSERVE)
def test_a_bad_text_is_an_error_in_tritons_words(server: SharedServer, text: bytes) -> None:
    response = server.post(GENERATE, text)
    assert response.status == 400
    assert response.error
    assert len(response.body) < 1024


def test_a_depth_within_the_limit_is_read(server: SharedServer) -> None:
    response = server.post("/v1/completions", nested(MAX_DEPTH))
    assert (response.status, response.json()["error"]["param"]) == (400, "prompt")


GOOD = {
    "pair-of-surrogates": b'{"prompt": "\\ud83d\\ude00"}',
    "nul": b'{"prompt": "a\\u0000b"}',
    "tiny-float": b'{"prompt": "x", "temperature": 1e-999}',
    "escaped-key": b'{"\\u0070rompt": "x"}',
    "null-for-optional-fields": b'{"prompt": "x", "temperature": null, "stop": null, "n": null}',
    "brackets-in-a-text": json.dumps({"prompt": "[{" * 50}).encode(),
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_what_is_json_is_read(server: SharedServer, text: bytes) -> None:
    response = server.post("/v1/completions", text.replace(b"{", b'{"max_tokens": 1, ', 1))
    assert response.status == 200, response.body


def test_nul_is_not_an_end(server: SharedServer) -> None:
    response = server.post("/v1/completions", {"prompt": "a\0b", "max_tokens": 1, "echo": True})
    assert response.json()["choices"][0]["text"].startswith("a\0b")


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_long_text_in_a_rejected_field_is_not_repeated(server: SharedServer, path: str) -> None:
    response = server.post(path, {"model": "m" * 7_000_000, "max_tokens": CANARY * 60})
    assert 400 <= response.status < 500
    assert len(response.body) < 1024


def test_of_ten_thousand_errors_one_is_told(server: SharedServer) -> None:
    messages = [{"role": CANARY} for _ in range(1000)]
    response = server.post(CHAT, {"messages": messages, "temperature": "a"})
    assert response.status == 400
    assert len(response.body) < 1024
