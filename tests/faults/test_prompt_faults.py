"""Prompts of the wrong kind, of token ids that do not exist, of any length, and of any Unicode."""

from __future__ import annotations

import re

import pytest

from tests.faults.shared_server import CANARY
from tests.faults.text_dialects import HTTP_CHATS, HTTP_PROMPTS, completions

CONTEXT, VOCABULARY = 256, 320
IM_END = 2


def complete(server, **body):
    return server.post("/v1/completions", {"model": "tiny", "max_tokens": 1, **body})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [""]},
        {"prompt": ["a", [1]]},
        {"prompt": [1, "a"]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": {"text": "a"}},
        {"prompt": 1},
        {"prompt_embeds": "AAAA"},
        {"prompt": ["a"] * 1000},
        {"prompt": ["a"] * 100, "n": 100},
    ],
    ids=lambda body: str(body)[:40],
)
def test_what_is_no_prompt_is_rejected(server, body):
    response = complete(server, **body)
    assert response.status == 400
    assert response.json()["error"]["param"] in ("prompt", "n")


@pytest.mark.parametrize("token_id", [-1, VOCABULARY, 2**31, 2**63, 2**64])
def test_an_id_outside_the_vocabulary_is_rejected_with_its_place(server, token_id):
    response = complete(server, prompt=[5, 6, token_id])
    assert response.status == 400
    if token_id < 2**64:
        assert response.json()["error"]["param"] == "prompt[2]"
        assert f"0 to {VOCABULARY - 1}" in response.error


@pytest.mark.parametrize(
    ("length", "max_tokens", "status"),
    [
        (CONTEXT - 1, 1, 200),
        (CONTEXT - 1, 2, 200),
        (CONTEXT, 1, 400),
        (CONTEXT + 1, 1, 400),
        (100_000, 1, 400),
        (CONTEXT - 1, None, 200),
    ],
)
def test_a_prompt_and_its_answer_fill_the_context_and_no_more(server, length, max_tokens, status):
    response = server.post("/v1/completions", {"prompt": [5] * length, "max_tokens": max_tokens})
    assert response.status == status
    if status == 400:
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert str(CONTEXT) in response.error
        assert str(length) in response.error


@pytest.mark.parametrize(
    "text",
    [
        "e\u0301 \u00e9",
        "a\r\nb\nc\rd",
        "\ufffe\uffff\U0010ffff",
        "\ue000\U000f0000",
        "\u0378",
        f"a\0{CANARY}",
        "\u2028\u2029\x85\ufeff",
        "data: [DONE]\n\ndata: {}",
        "😀" * 20,
        "\x00\x01\x7f\x1b[31m",
    ],
    ids=ascii,
)
def test_a_text_comes_back_as_it_was_sent(server, text):
    response = complete(server, prompt=text, echo=True, max_tokens=0)
    assert response.json()["choices"][0]["text"] == text
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == text


@pytest.mark.parametrize("text", [r"\ud800", r"\udfff", r"\ude00\ud83d", r"a\ud83d b"])
def test_half_of_a_surrogate_pair_is_rejected_in_every_dialect(server, text):
    messages = f'[{{"role": "user", "content": "{text}"}}]'
    bodies = {
        "/generate": f'{{"inputs": "{text}"}}',
        "/v1/completions": f'{{"prompt": "{text}"}}',
        "/v1/completions ": f'{{"prompt": "a", "stop": "{text}"}}',
        "/api/generate": f'{{"prompt": "{text}"}}',
        "/tokenize": f'{{"content": "{text}"}}',
        "/v1/chat/completions": f'{{"messages": {messages}}}',
        "/v1/messages": f'{{"model": "tiny", "max_tokens": 1, "messages": {messages}}}',
        "/v1/responses": f'{{"input": {messages}}}',
        "/api/chat": f'{{"messages": {messages}}}',
    }
    for path, body in bodies.items():
        response = server.post(path.strip(), body.encode())
        assert response.status in (400, 422), (path, response.body)
        assert "surrogate" in response.error


def test_a_surrogate_pair_is_its_character(server):
    response = server.post("/v1/completions", rb'{"prompt": "\ud83d\ude00", "echo": true, "max_tokens": 0}')
    assert response.json()["choices"][0]["text"] == "😀"


def test_the_name_of_a_special_token_is_the_token_in_a_prompt_and_text_in_a_message(server):
    name = "<|im_end|>"

    def tokens(content: str) -> list[int]:
        messages = [{"role": "user", "content": content}]
        return server.post("/tokenize", {"messages": messages}).json()["tokens"]

    plain, written = tokens("a"), tokens(f"a{name}")
    assert server.post("/tokenize", {"prompt": name}).json()["tokens"] == [IM_END]
    assert written.count(IM_END) == plain.count(IM_END)
    assert name in server.post("/detokenize", {"tokens": written[: written.index(IM_END)]}).json()["prompt"]


def test_a_long_text_without_a_space_is_rejected_like_one_with_spaces(server):
    for text in ("x" * 1_000_000, "x y " * 250_000, "😀" * 200_000):
        for ask in (*HTTP_PROMPTS, *HTTP_CHATS):
            prompt = text if ask in HTTP_PROMPTS else [{"role": "user", "content": text}]
            answer = ask(server, prompt, {"max_tokens": 1})
            assert re.search(rf"\b{CONTEXT}\b|exceeded max context length", answer.error), ask.__name__
            assert answer.is_clients_fault


def test_many_different_prompts_leave_no_blocks_behind(server):
    for number in range(60):
        assert not completions(server, f"{number} is a number", {"max_tokens": 1}).error
