"""Receipts over HTTP: in the answers and in the last events of streams, in each dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from genserve.client import Client
from genserve.textmodel.receipts import repeated_request
from tests.support.live_server import LiveServer

CHAT = [{"role": "user", "content": "Where is Ulysses?"}]
OPTIONS = {"return_receipt": True, "temperature": 1.5, "ignore_eos": True}
PARTS = [{"role": "user", "parts": [{"text": "Where?"}]}]
GEMINI = {"contents": PARTS, "generationConfig": {**OPTIONS, "maxOutputTokens": 6}}
TGI = {"details": True, "max_new_tokens": 6, **OPTIONS}

# By the path of whole answers: the path of streams, and the body.
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("", {"messages": CHAT, "max_tokens": 6, **OPTIONS}),
    "/v1/completions": ("", {"prompt": "Once", "max_tokens": 6, **OPTIONS}),
    "/v1/responses": ("", {"input": "Where?", "max_output_tokens": 16, **OPTIONS}),
    "/v1/messages": ("", {"messages": CHAT, "max_tokens": 6, **OPTIONS}),
    "/api/chat": ("", {"messages": CHAT, "options": {"num_predict": 6, **OPTIONS}}),
    "/generate": ("/generate_stream", {"inputs": "Once", "parameters": TGI}),
    "/v1beta/models/tiny:generateContent": ("/v1beta/models/tiny:streamGenerateContent?alt=sse", GEMINI),
}


@pytest.fixture(scope="module")
def server(tiny_server: LiveServer) -> LiveServer:
    return tiny_server


def receipts_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("receipt"), int):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from receipts_in(part)


@pytest.mark.parametrize("path", DIALECTS)
def test_an_answer_and_a_stream_have_one_receipt(server, path):
    stream_path, body = DIALECTS[path]
    named = {} if stream_path else {"model": "tiny"}
    asked = [body | named | {"stream": stream} if named else body for stream in (False, True)]
    whole = httpx2.post(server.url + path, json=asked[0]).json()
    streamed = httpx2.post(server.url + (stream_path or path), json=asked[1]).text
    lines = (line.removeprefix("data: ") for line in streamed.splitlines())
    events = [json.loads(line) for line in lines if line.startswith("{")]
    for answer in (whole, events):
        [receipt] = receipts_in(answer)
        assert server.model.repeat(repeated_request(receipt)) == receipt, answer


def test_the_sdk_reads_receipts(server):
    with Client(server.url) as client:
        whole = client.chat("Where?", max_tokens=4, return_receipt=True)
        *_, last = client.stream("Once", max_tokens=4, return_receipt=True)
        [completion] = client.complete("Once", max_tokens=4, return_receipt=True)
    for usage in (whole.usage, last.usage, completion.usage):
        assert server.model.repeat(repeated_request(usage.receipt)) == usage.receipt


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "n": 2}),
        ("/v1/completions", {"prompt": ["Once", "upon"]}),
        ("/v1/completions", {"prompt": "Once", "max_time_ms": 1000}),
        ("/generate", {"inputs": "Once", "parameters": {"max_new_tokens": 2, **OPTIONS}}),
    ],
)
def test_a_receipt_is_for_one_answer_that_can_be_repeated(server, path, fields):
    own = {} if path == "/generate" else {"model": "tiny", **OPTIONS}
    reply = httpx2.post(server.url + path, json=own | fields)
    assert reply.is_client_error
    assert "return_receipt" in reply.text
