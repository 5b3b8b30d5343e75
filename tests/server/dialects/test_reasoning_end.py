"""Ending the reasoning of an answer that runs, by llama-server's route, in each dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.errors import InvalidRequest
from genserve.sampling.sampling_params import sampling_params
from genserve.textmodel.receipts import repeated_request
from tests.support.live_server import LiveServer
from tests.support.step_gate import StepGate
from tests.support.thinking_model import END, copy_with_tags

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if begins is undefined %}<think>{% endif %}"
ASKED = [{"role": "user", "content": "why"}]
# It would reason to its last token.
OPTIONS: dict[str, Any] = {
    "seed": 1, "ignore_eos": True, "suppress_tokens": [END], "reasoning_budget_message": "so.",
    "stream_interval": 1,
}  # fmt: skip
# What the last pieces of reasoning and of content have.
MARKS = {
    "chat": ('"reasoning_content"', '"delta": {"content"'),
    "messages": ('"thinking_delta"', '"text_delta"'),
    "responses": ("response.reasoning_text.delta", "response.output_text.delta"),
    "gemini": ('"thought":true', '"parts":[{"text"'),
    "ollama": ('"thinking":', '"done":false'),
}
KEY, OTHER = ({"authorization": f"Bearer {key}"} for key in ("swordfish-1", "swordfish-2"))


@pytest.fixture(scope="module")
def server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = copy_with_tags(tiny_repository, tmp_path_factory.mktemp("ending") / "repository")
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(TEMPLATE)
    keys = root.parent / "keys"
    keys.write_text('[alice]\nkey = "swordfish-1"\n[bob]\nkey = "swordfish-2"\n')
    keys.chmod(0o600)
    with LiveServer(root, api_key_file=keys) as server:
        yield server


@pytest.fixture
def gate(server: LiveServer) -> Iterator[StepGate]:
    gate = StepGate(server.model)
    yield gate
    gate.remove()


def control(http: httpx2.Client, answer_id: str, **headers: str) -> httpx2.Response:
    body = {"id": answer_id, "action": "reasoning_end", "model": "tiny"}
    return http.post("/v1/chat/completions/control", json=body, headers=headers)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        text = line.removeprefix("data: ")
        if text.startswith("{"):
            yield json.loads(text)


def answer_id(event: dict[str, Any]) -> str | None:
    """The id of an answer in one of its events, if it has it."""
    inner = event.get("message") or event.get("response") or event
    return inner.get("responseId") or inner.get("id")


CHAT = ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 60, "stream": True, **OPTIONS})
STREAMS = {
    "chat": CHAT,
    "messages": ("/v1/messages", {"messages": ASKED, "max_tokens": 60, "stream": True, **OPTIONS}),
    "responses": ("/v1/responses", {"input": "why", "max_output_tokens": 60, "stream": True, **OPTIONS}),
    "gemini": (
        "/v1beta/models/tiny:streamGenerateContent?alt=sse",
        {
            "contents": [{"parts": [{"text": "why"}]}],
            "generationConfig": {
                "maxOutputTokens": 60, "thinkingConfig": {"includeThoughts": True}, **OPTIONS
            },
        },
    ),
    "ollama": ("/api/chat", {"messages": ASKED, "options": {"num_predict": 60, **OPTIONS}}),
}  # fmt: skip


@pytest.mark.parametrize("dialect", STREAMS)
def test_the_reasoning_of_a_stream_ends_on_request(
    server: LiveServer, gate: StepGate, dialect: str
) -> None:
    path, body = STREAMS[dialect]
    gate.shut()
    gate.allow(8)
    with httpx2.Client(base_url=server.url, timeout=60, headers=KEY) as http:
        given = KEY | {"x-request-id": f"request-of-{dialect}"}
        with http.stream("POST", path, json=body, headers=given) as response:
            lines = response.iter_lines()
            read = events(lines)
            seen = [next(read) for _ in range(4)]
            known = [*filter(None, map(answer_id, seen)), response.headers["x-request-id"]]
            assert dialect == "ollama" or len(known) > 1
            assert control(http, known[0], **OTHER).status_code == 404
            assert control(http, known[0]).json() == {"success": True}
            gate.open()
            text = json.dumps(seen) + "".join(lines)
        assert control(http, known[0]).status_code == 404
    # The request has forbidden the end of reasoning, so that no other content would follow.
    thought, content = MARKS[dialect]
    assert 0 < text.rindex(thought) < text.rindex(content)


def test_a_receipt_says_that_its_answer_cannot_be_repeated(server: LiveServer, gate: StepGate) -> None:
    path, body = CHAT
    gate.shut()
    gate.allow(8)
    http = httpx2.Client(base_url=server.url, timeout=60, headers=KEY)
    with http, http.stream("POST", path, json=body | {"return_receipt": True}) as response:
        read = events(response.iter_lines())
        seen = [next(read) for _ in range(4)]
        assert control(http, seen[0]["id"]).json() == {"success": True}
        gate.open()
        *_, last = read
    assert last["receipt"]["is_repeatable"] is False
    with pytest.raises(InvalidRequest, match="a call has ended its reasoning"):
        repeated_request(last["receipt"])


def test_the_content_follows_the_message(server: LiveServer, gate: StepGate) -> None:
    path, body = CHAT
    body = body | {"stream_options": {"include_usage": True}, "return_token_ids": True, "n": 2}
    gate.shut()
    gate.allow(6)
    http = httpx2.Client(base_url=server.url, timeout=60, headers=KEY)
    with http, http.stream("POST", path, json=body) as response:
        read = events(response.iter_lines())
        chunks = [next(read) for _ in range(4)]
        assert control(http, chunks[0]["id"]).json() == {"success": True}
        gate.open()
        chunks += read
    message = server.model.tokenizer.encode("so.", add_special_tokens=False)
    num_reasoning = 0
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
        end = ids.index(END)
        assert len(ids) == 60
        assert end < 20
        assert ids[end - len(message) : end] == message
        num_reasoning += end
        reasoning = "".join(choice["delta"].get("reasoning_content", "") for choice in choices)
        assert reasoning.endswith("so.")
        assert any(choice["delta"].get("content") for choice in choices)
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


def test_what_does_not_run_cannot_be_ended(server: LiveServer, gate: StepGate) -> None:
    with httpx2.Client(base_url=server.url, timeout=60, headers=KEY) as http:
        for unknown in ("chatcmpl-0", "", "x" * 4096):
            missing = control(http, unknown)
            assert (missing.status_code, missing.json()["error"]["param"]) == (404, "id")
        for body in ({"id": "a"}, {"id": "a", "action": "stop"}, {"action": "reasoning_end"}):
            assert http.post("/v1/chat/completions/control", json=body).status_code == 400
        # Without a key
        body = {"id": "a", "action": "reasoning_end"}
        assert httpx2.post(f"{server.url}/v1/chat/completions/control", json=body).status_code == 401


def test_an_answer_without_reasoning_goes_on(server: LiveServer, gate: StepGate) -> None:
    path, body = CHAT
    body = body | {"chat_template_kwargs": {"begins": False}, "return_token_ids": True}
    answers = []
    for ends in (False, True):
        gate.shut()
        gate.allow(6)
        http = httpx2.Client(base_url=server.url, timeout=60, headers=KEY)
        with http, http.stream("POST", path, json=body) as response:
            read = events(response.iter_lines())
            chunks = [next(read) for _ in range(3)]
            assert not ends or control(http, chunks[0]["id"]).json() == {"success": True}
            gate.open()
            chunks += read
        answers.append([ids for chunk in chunks for ids in chunk["choices"][0].get("token_ids") or ()])
    assert answers[0] == answers[1]


def test_the_reasoning_of_a_form_cannot_be_ended(server: LiveServer) -> None:
    can_end = server.model.builder.reasoning.can_end
    assert can_end(sampling_params({}))
    assert not can_end(sampling_params({"structured_outputs": {"json_object": True}}))
    assert not can_end(sampling_params({"use_beam_search": True, "beam_width": 2}))
