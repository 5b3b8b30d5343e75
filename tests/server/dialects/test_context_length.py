"""The context length in every dialect: answers that exceed the room, and prompts that leave none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.support.representatives import with_extended

ROOM = 40  # tokens that the prompts of these tests leave, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a dialect writes a request, and where its answer says why it ended."""

    path: str
    asks: str  # the field of `max_tokens`
    body: Any  # makes the body of a text and a number of tokens
    finish: tuple[Any, ...]  # the path to the reason in the answer
    ended: str = "length"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROUTES = {
    "chat": Route(
        path="/v1/chat/completions",
        asks="max_completion_tokens",
        body=lambda text, number: {"messages": user(text), "max_completion_tokens": number},
        finish=("choices", 0, "finish_reason"),
    ),
    "completions": Route(
        path="/v1/completions",
        asks="max_tokens",
        body=lambda text, number: {"prompt": text, "max_tokens": number},
        finish=("choices", 0, "finish_reason"),
    ),
    "responses": Route(
        path="/v1/responses",
        asks="max_output_tokens",
        body=lambda text, number: {"input": text, "max_output_tokens": number},
        finish=("incomplete_details", "reason"),
        ended="max_output_tokens",
    ),
    "messages": Route(
        path="/v1/messages",
        asks="max_tokens",
        body=lambda text, number: {"messages": user(text), "max_tokens": number},
        finish=("stop_reason",),
        ended="model_context_window_exceeded",
    ),
    "ollama": Route(
        path="/api/chat",
        asks="options.num_predict",
        body=lambda text, number: {
            "model": "tiny", "messages": user(text), "stream": False, "options": {"num_predict": number}
        },
        finish=("done_reason",),
    ),
    "tgi": Route(
        path="/generate",
        asks="parameters.max_new_tokens",
        body=lambda text, number: {"inputs": text, "parameters": {"max_new_tokens": number, "details": True}},
        finish=("details", "finish_reason"),
    ),
    "gemini": Route(
        path="/v1beta/models/tiny:generateContent",
        asks="generation_config.max_output_tokens",
        body=lambda text, number: {
            "contents": [{"parts": [{"text": text}]}], "generationConfig": {"maxOutputTokens": number}
        },
        finish=("candidates", 0, "finishReason"),
        ended="MAX_TOKENS",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", with_extended(ROUTES, always=list(ROUTES)[::3]))
def test_an_answer_that_exceeds_the_room_ends_with_the_context(http, tiny_server, name):
    route, context = ROUTES[name], tiny_server.model.max_length
    body = route.body("a " * ((context - ROOM) // 4), 100_000)
    ignore_eos = {"ignore_eos": True} if name not in ("gemini", "ollama", "tgi") else {}
    response = http.post(route.path, json=body | ignore_eos)
    assert response.status_code == 200, response.text
    field, _, number = response.headers["x-genserve-clamped"].partition("=")
    assert field == route.asks
    assert 0 < int(number) < context
    if ignore_eos:
        ended: Any = response.json()
        for step in route.finish:
            ended = ended[step]
        assert ended == route.ended
    within = http.post(route.path, json=route.body("a", 1))
    assert within.status_code == 200, within.text
    assert "x-genserve-clamped" not in within.headers


def test_a_stream_says_that_it_was_clamped(http):
    for name in ("chat", "responses", "messages"):
        body = ROUTES[name].body("a", 100_000) | {"stream": True}
        assert ROUTES[name].asks in http.post(ROUTES[name].path, json=body).headers["x-genserve-clamped"]


def too_long(http, name: str) -> tuple[int, Any]:
    """Return the status and the body of an error."""
    response = http.post(ROUTES[name].path, json=ROUTES[name].body("a b c " * 200, 8))
    return response.status_code, response.json()


def test_messages_are_too_long_in_the_words_of_anthropic(http, tiny_server):
    status, body = too_long(http, "messages")
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    read = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", body["error"]["message"])
    assert read is not None
    assert int(read[1]) > int(read[2]) == tiny_server.model.max_length
    assert body["error"]["remedy"]


# What LiteLLM, pi and Cline, and langchain-openai look for in the message; qwen-code reads both numbers.
SIGNS = (
    r"(?i)this model's maximum context length is",
    r"maximum context length is \d+ tokens",
    r"(?i)reduce the length of the messages",
    r"context_length_exceeded",
    r"maximum context length is (\d+) tokens\. However, your messages resulted in (\d+) tokens\.",
)


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_a_chat_is_too_long_in_the_words_of_openai(http, name):
    status, body = too_long(http, name)
    error = body["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if name == "chat" else "input")
    for sign in SIGNS:
        assert re.search(sign, error["message"]), sign


def test_the_exception_of_openais_client_shows_the_code(http, tiny_server):
    """openai-python shows nothing but the message, in which langchain-openai looks for the code."""
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="-", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="tiny", messages=user("a b c " * 200))
        assert "context_length_exceeded" in str(raised.value)
        assert raised.value.code == "context_length_exceeded"


def test_a_prompt_is_too_long_in_the_words_of_each_other_dialect(http, tiny_server):
    context = tiny_server.model.max_length
    _, completion = too_long(http, "completions")
    assert "your prompt resulted in" in completion["error"]["message"]
    status, gemini = too_long(http, "gemini")
    assert (status, gemini["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert re.match(
        rf"The input token count \(\d+\) exceeds the maximum number of tokens allowed \({context}\)",
        gemini["error"]["message"],
    )
    status, tgi = too_long(http, "tgi")
    assert (status, tgi["error_type"], tgi["code"]) == (422, "validation", "context_length_exceeded")
    assert re.match(rf"`inputs` must have less than {context} tokens\. Given: \d+", tgi["error"])
    status, ollama = too_long(http, "ollama")
    assert status == 400
    assert re.match(r"prompt too long; exceeded max context length by \d+ tokens", ollama["error"])
