"""What a request of OpenAI's dialect may say of how its prompt is made."""

from __future__ import annotations

import httpx2
import pytest

from genserve.client import Client
from genserve.request import Chat, Message, read_chat

QUESTION = {"role": "user", "content": "hello there"}
BEGUN = {"role": "assistant", "content": "Well, "}


@pytest.fixture
def http(tiny_server):
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


def chat(http, **body):
    defaults = {"model": "tiny", "messages": [QUESTION], "max_tokens": 4, "return_token_ids": True}
    return http.post("/v1/chat/completions", json=defaults | body)


def test_an_answer_that_is_begun_is_continued(http, tiny_server):
    tokenizer = tiny_server.model.tokenizer
    answer = chat(http, messages=[QUESTION, BEGUN], continue_final_message=True).json()
    assert tokenizer.decode(answer["prompt_token_ids"]).endswith("assistant\nWell, ")
    expected = Chat(messages=read_chat([QUESTION, BEGUN]).messages, continue_final_message=True)
    assert answer["prompt_token_ids"] == tokenizer.encode_chat(expected)


def test_the_assistants_turn_need_not_be_begun(http, tiny_server):
    ids = chat(http, add_generation_prompt=False).json()["prompt_token_ids"]
    begun = chat(http).json()["prompt_token_ids"]
    assert begun[: len(ids)] == ids != begun


def test_the_clients_send_what_a_chat_says(tiny_server):
    begun = Chat(
        messages=(Message(role="user", content="hello"), Message(role="assistant", content="Well")),
        continue_final_message=True,
    )
    with Client(tiny_server.url) as client:
        open_turn = client.chat(begun, max_tokens=4).usage.prompt_tokens
        closed = client.chat(begun.messages, max_tokens=4).usage.prompt_tokens
    assert open_turn == len(tiny_server.model.tokenizer.encode_chat(begun)) < closed


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "does not use it"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "dictionary"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "add_generation_prompt",
        ),
    ],
)
def test_what_the_template_cannot_do_is_refused(http, body, field, words):
    reply = chat(http, **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert words in reply.json()["error"]["message"]


def test_the_refusal_of_a_template_says_why(http):
    assert "program" in chat(http, chat_template="{{ 1 }}").json()["error"]["remedy"]
