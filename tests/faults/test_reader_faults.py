"""Faults of streams: texts that look like events, and the one end of each stream, as clients read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.shared_server import SharedServer, read_response
from tests.support.live_server import LiveServer, request_bytes
from tests.support.scripted_model import FAILS, scripted_repository

# What begins a line, an event, a field or an end for some reader.
PIECES = (
    *("\n", "\r", "\r\n", "\n\n", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\0", " "),
    *("data:", "data: [DONE]", "event: error", "id: 1", "retry: 1", ": comment", "[DONE]", '"', "\\", "\\n"),
)
HOSTILE = '1\n\ndata: [DONE]\n\n2\r\n\r\ndata: {}\r\revent: error\u2028\u2029\x85\x0b\x0c\0\\n"} 3'
PATHS = {
    "/v1/completions": ("prompt", lambda event: event["choices"][0]["text"]),
    "/v1/chat/completions": ("messages", lambda event: event["choices"][0]["delta"].get("content") or ""),
    "/generate_stream": ("inputs", lambda event: event["token"]["text"]),
}


@pytest.fixture(scope="module")
def scripted(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model whose answers are given: a hostile text, and five tokens before a failure."""
    root = tmp_path_factory.mktemp("reader") / "repository"
    scripts = {"#1": HOSTILE, "#2": "12345" + FAILS}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with LiveServer(scripted_repository(tiny_repository, root, scripts, template=template)) as server:
        yield server


def body_of(path: str, prompt: str) -> dict:
    field = PATHS[path][0]
    value = [{"role": "user", "content": prompt}] if field == "messages" else prompt
    return {field: value, **({} if field == "inputs" else {"stream": True, "max_tokens": 100})}


def data_of(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("client", [httpx, httpx2], ids=lambda client: client.__name__)
@pytest.mark.parametrize("path", PATHS)
def test_a_text_that_looks_like_events_is_text(scripted: LiveServer, path: str, client) -> None:
    with client.stream("POST", scripted.url + path, json=body_of(path, "#1"), timeout=60) as response:
        data = data_of(response.iter_lines())
    if path.startswith("/v1/"):
        assert data.pop() == "[DONE]"
    assert "".join(map(PATHS[path][1], map(json.loads, data))) == HOSTILE


def test_openais_client_reads_the_same_text(scripted: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        stream = client.completions.create(model="tiny", prompt="#1", stream=True, max_tokens=100)
        assert "".join(chunk.choices[0].text for chunk in stream) == HOSTILE


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_after_five_tokens_is_the_last_event(scripted: LiveServer, path: str) -> None:
    response = httpx2.post(scripted.url + path, json=body_of(path, "#2"), timeout=60)
    data = data_of(iter(response.text.split("\n")))
    assert response.status_code == 200
    if path.startswith("/v1/"):
        assert data.pop() == "[DONE]"
    assert "error" in json.loads(data[-1])
    assert "".join(map(PATHS[path][1], map(json.loads, data[:-1]))) == "12345"
    assert response.text.count("[DONE]") == path.startswith("/v1/")


@given(st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=12).map("".join))
def test_no_text_forges_an_event_of_kserve(shared_server: SharedServer, text: str) -> None:
    with shared_server.connect() as connection:
        connection.sendall(request_bytes("/v2/models/identity_string/generate_stream", {"X": text}))
        body = read_response(connection).body.decode()
    [line] = data_of(iter(body.splitlines()))
    assert json.loads(line)["Y"] == text
    assert body == f"data: {line}\n\n"


BROKEN = {
    "no-such-model": {"prompt": "x", "model": "none", "stream": True},
    "wrong-type": {"prompt": 1, "stream": True},
    "too-long": {"prompt": "x" * 5000, "stream": True},
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_an_error_before_the_first_token_is_no_stream(server: SharedServer, body: dict) -> None:
    response = server.post("/v1/completions", body)
    assert response.status in (400, 404)
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_has_one_end_for_each_choice_and_one_for_all(server: SharedServer, count: int) -> None:
    body = {"prompt": "x", "max_tokens": 3, "n": count, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    data = data_of(iter(server.post("/v1/completions", body).body.decode().split("\n")))
    assert data.pop() == "[DONE]"
    usage = json.loads(data.pop())
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3 * count
    choices = [choice for event in map(json.loads, data) for choice in event["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ended) == list(range(count))


@pytest.mark.parametrize("path", PATHS)
def test_a_reader_that_leaves_costs_nothing(server: SharedServer, path: str) -> None:
    body = body_of(path, "x")
    for num_bytes in (0, 1, 300):
        with server.connect() as connection:
            connection.sendall(request_bytes(path, body))
            if num_bytes:
                assert connection.recv(num_bytes)
