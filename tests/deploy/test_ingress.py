"""An ingress over replicas answers every dialect as a single server does."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.deploy.replica import ModelReplica
from tests.fakes.local_replicas import LocalReplicas
from tests.support.live_ingress import LiveIngress
from tests.support.live_server import LiveServer

CHAT = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
# What differs from answer to answer: ids, times, and which of the prompt's tokens a replica has cached.
VOLATILE = re.compile(
    r'"(id|call_id|item_id|previous_response_id|created|created_at|completed_at|last_inference|ns|retry_after'
    r"|cached_tokens|cache_read_input_tokens|input_tokens|\w+_duration|compute_time|inference_time|queue_time"
    r'|time_per_token|total_time|validation_time|load_duration|modified_at|expires_at|seed)"'
    r': ?("[^"]*"|[\d.]+)'
)
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def replicas(tiny_repository: Path) -> Iterator[LocalReplicas]:
    made = [ModelReplica([tiny_repository], "tiny") for _ in range(3)]
    yield LocalReplicas(*made)
    for replica in made:
        replica.close()


@pytest.fixture(scope="module")
def ingress(tiny_repository: Path, replicas: LocalReplicas) -> Iterator[httpx2.Client]:
    with (
        LiveIngress(tiny_repository, {"tiny": replicas}) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        while client.get("/health").status_code == 503:
            time.sleep(0.01)
        yield client


@pytest.fixture(scope="module")
def single(tiny_server: LiveServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


REQUESTS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY}),
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "stream": True, "logprobs": True}),
    ("/v1/chat/completions", {"messages": CHAT, "seed": 3, "n": 3, "max_tokens": 8}),
    ("/v1/chat/completions", {"messages": CHAT, **GREEDY, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {
        "messages": CHAT, "temperature": 0, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}
        },
    }),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": CHAT, "model": "other"}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 100_000}),
    ("/v1/chat/completions", {"messages": CHAT, "structured_outputs": {"regex": "("}}),
    ("/v1/completions", {"prompt": ["Hello", "world"], "seed": 1, "n": 2, "max_tokens": 6}),
    ("/v1/completions", {"prompt": "a" * 3000}),
    ("/v1/completions", {"prompt": "Hello", "use_beam_search": True, "n": 2, **GREEDY}),
    ("/v1/completions", {"prompt": "Hello", "best_of": 3, "n": 2, "seed": 5, "max_tokens": 6}),
    ("/v1/completions", {"prompt": [[5, 6, 7]], "prompt_logprobs": 2, "logprobs": 2, **GREEDY}),
    ("/v1/completions", {"prompt": "Hello", "stop": ["e"], **GREEDY, "stream": True}),
    ("/v1/responses", {"input": "Hello", "temperature": 0, "max_output_tokens": 16}),
    ("/v1/messages", {"messages": CHAT, "temperature": 0, "max_tokens": 8, "model": "tiny", "stream": True}),
    ("/v1/messages/count_tokens", {"messages": CHAT, "model": "tiny"}),
    ("/api/chat", {"messages": CHAT, "model": "tiny", "options": {"temperature": 0, "num_predict": 8}}),
    ("/api/generate", {"prompt": "x", "model": "tiny", "options": {"temperature": 0, "num_predict": 8}}),
    ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 8, "details": True}}),
    ("/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 8}}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v2/models/tiny/generate", {"text_input": "Hello", "max_tokens": 8}),
    ("/v2/models/tiny/generate", {"text_input": "Hello", "max_tokens": -8}),
    ("/v2/models/tiny/generate_stream", {"text_input": "Hello", "max_tokens": 8, "stream": True}),
    ("/v2/models/tiny/generate", {"text_inputs": "Hello"}),
    ("/v2/models/tiny/infer", {"inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": ["Hello", "world"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [2, 1], "data": [4, 4]},
    ]}),
    ("/v2/models/tiny_logits/infer", {"inputs": [
        {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]},
    ]}),
    ("/v2/models/tiny_decoder/infer", {"inputs": []}),
    ("/v2/models/tiny_tokenizer/infer", {"inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["Hello"]},
    ]}),
    ("/v2/models/other/infer", {"inputs": []}),
    ("/v2/repository/index", {}),
]  # fmt: skip
PATHS = (
    "/v1/models", "/v1/models/tiny", "/health", "/version", "/info", "/api/tags", "/api/version",
    "/v2", "/v2/health/ready", "/v2/health/live", "/v2/models/tiny", "/v2/models/tiny/config",
    "/v2/models/tiny_logits/config", "/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready",
    "/v2/models/tiny/versions/9", "/v2/models/other", "/openapi.json", "/",
)  # fmt: skip


def shown(response: httpx2.Response) -> tuple[int, str, str]:
    """Status, content type and body, without what differs from answer to answer."""
    return (
        response.status_code,
        response.headers.get("content-type", ""),
        VOLATILE.sub(r'"\1":0', response.text).replace('": ', '":'),
    )


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: json.dumps(value)[:60])
def test_answers_as_a_single_server(
    ingress: httpx2.Client, single: httpx2.Client, path: str, body: Any
) -> None:
    expected, answered = (client.post(path, json=body) for client in (single, ingress))
    assert shown(answered) == shown(expected)


@pytest.mark.parametrize("path", PATHS)
def test_shows_itself_as_a_single_server(ingress: httpx2.Client, single: httpx2.Client, path: str) -> None:
    expected, answered = (client.get(path) for client in (single, ingress))
    assert shown(answered) == shown(expected)
