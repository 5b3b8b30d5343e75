"""The streams of OpenAI's older routes, of Gemini and of TGI, byte for byte as they were recorded."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest

from tests.support.answer_timings import without_timings
from tests.support.live_server import LiveServer
from tests.support.scripted_model import SCRIPTS, scripted_repository

RECORDED = Path(__file__).with_name("recorded")
TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}[{{ m.content }}]{% endfor %}"
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "sub"}},
]
USAGE = {"include_usage": True}
RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def scripted(tiny_repository, tmp_path_factory):
    root = tmp_path_factory.mktemp("streams") / "repository"
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS, template=TEMPLATE)) as server:
        yield server


def chat(prompt, **fields):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **fields}


def complete(prompt, **fields):
    return "/v1/completions", {"prompt": prompt, **fields}


def generate(prompt, **parameters):
    return "/generate_stream", {"inputs": prompt, "parameters": parameters}


def gemini(prompt, **fields):
    path = "/v1beta/models/tiny:streamGenerateContent?alt=sse"
    return path, {"contents": [{"role": "user", "parts": [{"text": prompt}]}], **fields}


# By the name of the file.
STREAMS = {
    "chat_text": chat("#1", stream_options=USAGE),
    "chat_two_choices": chat("#1", n=2, max_tokens=2),
    "chat_running_usage": chat("#1", max_tokens=2, stream_options=RUNNING_USAGE),
    "chat_logprobs": chat("#1", max_tokens=2, logprobs=True, top_logprobs=1, return_token_ids=True),
    "chat_reasoning": chat("#2", stream_options=USAGE),
    "chat_calls": chat("#5", tools=TOOLS),
    "chat_length": chat("#4", max_tokens=2),
    "chat_failed": chat("#3"),
    "completions_text": complete("#1", stream_options=USAGE),
    "completions_failed": complete("#3"),
    "gemini_calls": gemini("#5", tools=[{"functionDeclarations": [tool["function"] for tool in TOOLS]}]),
    "gemini_reasoning": gemini("#2", generationConfig={"thinkingConfig": {"includeThoughts": True}}),
    "gemini_failed": gemini("#3"),
    "tgi_text": generate("#1", details=True, temperature=0.5, seed=7),
    "tgi_stop": generate("#1", stop=["1"]),
    "tgi_failed": generate("#3"),
}


def without_run(text):
    """The text of a stream without what differs between runs."""
    text = re.sub(r'"id": "(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id": "\1-1"', text)
    text = re.sub(r'"id":( ?)"call_[0-9a-f]{24}"', r'"id":\1"call_1"', text)
    text = re.sub(r'"responseId":"[0-9a-f]{32}"', '"responseId":"1"', text)
    return without_timings(re.sub(r'"created": \d+', '"created": 1', text))


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_the_recorded_bytes(scripted, name):
    path, body = STREAMS[name]
    # Each request has a prefix cache of its own: usage counts cached tokens.
    salt = {"cache_salt": name}
    if path.startswith("/v1/"):
        body = {**body, **salt, "stream": True}
    elif path.startswith("/v1beta/"):
        body = {**body, "generationConfig": body.get("generationConfig", {}) | salt}
    else:
        body = {**body, "parameters": body["parameters"] | salt}
    response = httpx2.post(scripted.url + path, json=body, timeout=60)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    assert without_run(response.text) == (RECORDED / f"{name}.sse").read_text(encoding="utf-8")
