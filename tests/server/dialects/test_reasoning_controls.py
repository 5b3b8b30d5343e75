"""Whether and how much a model reasons, asked in each dialect by its own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import ollama
import openai
import pytest
from google import genai
from google.genai import types

from genserve.prompt import Chat, Reasoning, read_messages
from genserve.sampling.sampling_params import sampling_params
from tests.support.live_server import LiveServer
from tests.support.scripted_model import SCRIPTS, scripted_repository

# Shows what it is told.
TEMPLATE = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }}{% endif %}"
    "{% if reasoning_effort is defined %} {{ reasoning_effort }}{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
ASKED: list[Any] = [{"role": "user", "content": "#2"}]


def serve(tiny_repository: Path, root: Path, template: str) -> Iterator[LiveServer]:
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS, template=template)) as server:
        yield server


@pytest.fixture(scope="module")
def server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from serve(tiny_repository, tmp_path_factory.mktemp("controls") / "repository", TEMPLATE)


@pytest.fixture(scope="module")
def plain(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from serve(tiny_repository, tmp_path_factory.mktemp("plain") / "repository", PLAIN)


@pytest.fixture
def prompts(server: LiveServer) -> Iterator[list[str]]:
    """What the template says of reasoning, by request."""
    inputs, read = server.model.inputs, []
    encode = inputs.encode

    def noted(chat: Any, **limits: Any) -> Any:
        token_ids = encode(chat, **limits)
        read.append(server.model.tokenizer.decode(token_ids).rpartition("]")[2])
        return token_ids

    inputs.encode = noted
    yield read
    del inputs.encode


def chat(server: LiveServer, fields: dict[str, Any]) -> str | None:
    """Ask by OpenAI's client; return what had no effect."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        ask = client.chat.completions.with_raw_response.create
        return ask(model="tiny", messages=ASKED, extra_body=fields).headers.get("x-genserve-ignored")


def responses(server: LiveServer, fields: dict[str, Any]) -> str | None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        ask = client.responses.with_raw_response.create
        return ask(model="tiny", input="#2", **fields).headers.get("x-genserve-ignored")


def messages(server: LiveServer, fields: dict[str, Any]) -> str | None:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        ask = client.messages.with_raw_response.create
        answer = ask(model="tiny", max_tokens=64, messages=ASKED, **fields)
        return answer.headers.get("x-genserve-ignored")


def gemini(server: LiveServer, fields: dict[str, Any]) -> str | None:
    options = types.HttpOptions(base_url=server.url, api_version="v1beta")
    with genai.Client(api_key="none", http_options=options) as client:
        config = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(**fields))
        answer = client.models.generate_content(model="tiny", contents="#2", config=config)
        assert answer.sdk_http_response is not None
        return (answer.sdk_http_response.headers or {}).get("x-genserve-ignored")


def ollama_chat(server: LiveServer, fields: dict[str, Any]) -> str | None:
    with ollama.Client(host=server.url) as client:
        client.chat(model="tiny", messages=ASKED, **fields)
    body = {"model": "tiny", "messages": ASKED, "stream": False, **fields}
    return httpx2.post(f"{server.url}/api/chat", json=body).headers.get("x-genserve-ignored")


@pytest.mark.parametrize(
    ("ask", "fields", "told"),
    [
        (chat, {}, ""),
        (chat, {"reasoning_effort": "high"}, "on high"),
        (chat, {"reasoning_effort": "MEDIUM"}, "on high"),
        (chat, {"reasoning_effort": None, "reasoning": {"effort": None}}, ""),
        (chat, {"reasoning_effort": "minimal"}, "off"),
        (chat, {"reasoning": {"effort": "low", "exclude": True}}, "on low"),
        (chat, {"reasoning": {"enabled": False}}, "off"),
        (chat, {"reasoning": False}, "off"),
        (chat, {"reasoning": {"max_tokens": 100}}, "on"),
        (chat, {"thinking": {"type": "disabled"}}, "off"),
        (chat, {"thinking": {"type": "enabled", "budget_tokens": 100}}, "on"),
        (chat, {"enable_thinking": False, "thinking_budget": 9}, "off"),
        (chat, {"thinking_budget": 0}, "off"),
        (chat, {"thinking_budget_tokens": -1}, ""),
        (chat, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "on"),
        (responses, {"reasoning": {"effort": "low"}}, "on low"),
        (responses, {"reasoning": {"effort": "none"}}, "off"),
        (responses, {"reasoning": {"effort": None, "summary": None}}, ""),
        (messages, {"thinking": {"type": "disabled"}}, "off"),
        (messages, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "on"),
        (messages, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "on low"),
        (messages, {"output_config": {"effort": "max"}}, "on high"),
        (messages, {"output_config": {"effort": "Low"}}, "on low"),
        (messages, {"output_config": {"effort": None}}, ""),
        (gemini, {"thinking_budget": 0}, "off"),
        (gemini, {"thinking_budget": -1}, "on"),
        (gemini, {"thinking_level": "LOW"}, "on low"),
        (gemini, {"thinking_level": "MINIMAL"}, "off"),
        (ollama_chat, {"think": True}, "on"),
        (ollama_chat, {"think": False}, "off"),
        (ollama_chat, {"think": "low"}, "on low"),
    ],
)
def test_a_field_of_each_dialect_reaches_the_template(
    server: LiveServer,
    prompts: list[str],
    ask: Callable[[LiveServer, dict[str, Any]], str | None],
    fields: dict[str, Any],
    told: str,
) -> None:
    assert ask(server, fields) is None
    assert set(prompts) == {told}


@pytest.mark.parametrize(
    ("ask", "fields", "ignored"),
    [
        (chat, {"reasoning_effort": "low"}, "reasoning_effort"),
        (chat, {"reasoning": {"effort": "low"}}, "reasoning"),
        (chat, {"reasoning": {"max_tokens": 100, "exclude": True}}, None),
        (chat, {"enable_thinking": False}, "enable_thinking"),
        (chat, {"thinking_budget": 100}, None),
        (responses, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (messages, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        (messages, {"thinking": {"type": "disabled"}}, "thinking"),
        (messages, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (gemini, {"thinking_budget": 100}, None),
        (gemini, {"thinking_level": "LOW"}, "generation_config.thinking_config.thinking_level"),
        (ollama_chat, {"think": True}, None),
        (ollama_chat, {"think": False}, "think"),
    ],
)
def test_a_field_that_the_template_does_not_read_is_named(
    plain: LiveServer,
    ask: Callable[[LiveServer, dict[str, Any]], str | None],
    fields: dict[str, Any],
    ignored: str | None,
) -> None:
    assert ask(plain, fields) == ignored


def test_the_form_of_an_answer_leaves_no_place_for_reasoning(server: LiveServer, prompts: list[str]) -> None:
    asked = Chat(messages=read_messages(ASKED), reasoning=Reasoning(effort="low", budget=9))
    for form in ({"json_object": True}, None):
        read = server.model.prepare(asked, sampling_params({"structured_outputs": form, "max_tokens": 1}))
        assert read.params.thinking_token_budget == (None if form else 9)
    assert prompts == ["off", "on low"]


def test_reasoning_can_be_left_out_of_a_chat(server: LiveServer) -> None:
    for fields in ({"reasoning": {"exclude": True}}, {"include_reasoning": False}):
        body = {"messages": ASKED, **fields}
        whole = httpx2.post(f"{server.url}/v1/chat/completions", json=body).json()
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "12"}
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        streamed = httpx2.post(f"{server.url}/v1/chat/completions", json=body | {"stream": True}).text
        assert "reasoning_content" not in streamed
