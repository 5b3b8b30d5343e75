"""The fields of OpenAI's dialect that decide how a prompt is made."""

from __future__ import annotations

import json

import openai
import pytest

from genserve.client import Client
from genserve.prompt import Chat, Message, read_chat
from genserve.server.dialects.openai.chat_body import ChatBody

QUESTION = {"role": "user", "content": "hello there"}
BEGUN = {"role": "assistant", "content": "Well, "}


def chat(http, **body):
    defaults = {"model": "tiny", "messages": [QUESTION], "max_tokens": 4, "return_token_ids": True}
    return http.post("/v1/chat/completions", json=defaults | body)


def test_continue_final_message_continues_the_last_message(http, tiny_server):
    tokenizer = tiny_server.model.tokenizer
    answer = chat(http, messages=[QUESTION, BEGUN], continue_final_message=True).json()
    assert tokenizer.decode(answer["prompt_token_ids"]).endswith("assistant\nWell, ")
    expected = Chat(messages=read_chat([QUESTION, BEGUN]).messages, continue_final_message=True)
    assert answer["prompt_token_ids"] == tokenizer.encode_chat(expected)


def test_add_generation_prompt_can_be_disabled(http, tiny_server):
    ids = chat(http, add_generation_prompt=False).json()["prompt_token_ids"]
    begun = chat(http).json()["prompt_token_ids"]
    assert begun[: len(ids)] == ids != begun


def test_our_clients_send_the_options_of_a_chat(tiny_server):
    begun = Chat(
        messages=(Message(role="user", content="hello"), Message(role="assistant", content="Well")),
        continue_final_message=True,
    )
    with Client(tiny_server.url) as client:
        open_turn = client.chat(begun, max_tokens=4).usage.prompt_tokens
        closed = client.chat(begun.messages, max_tokens=4).usage.prompt_tokens
    assert open_turn == len(tiny_server.model.tokenizer.encode_chat(begun)) < closed


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_unsupported_template_options_are_rejected(http, body, field):
    reply = chat(http, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_a_rejected_chat_template_has_a_remedy(http):
    assert "program" in chat(http, chat_template="{{ 1 }}").json()["error"]["remedy"]


LONG = "the quick brown fox jumps over the lazy dog " * 40


def complete(http, **body):
    return http.post("/v1/completions", json={"model": "tiny", "prompt": LONG, "max_tokens": 4} | body)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_prompt_is_an_error_without_truncate_prompt_tokens(http, tiny_server, side):
    ids = tiny_server.model.tokenizer.encode(LONG)
    assert complete(http).status_code == 400
    cut = {"truncate_prompt_tokens": 9, "truncation_side": side, "return_token_ids": True}
    answer = complete(http, **cut).json()
    assert answer["choices"][0]["prompt_token_ids"] == (ids[-9:] if side == "left" else ids[:9])
    assert answer["usage"]["prompt_tokens"] == 9


TURN = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
CUT = {"truncate_prompt_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [LONG, "a"], **CUT}),
        ("/v1/chat/completions", TURN | CUT),
        ("/v1/messages", TURN | CUT),
        ("/v1/responses", {"input": LONG, **CUT}),
        ("/api/chat", TURN | {"options": CUT}),
        ("/generate", {"inputs": LONG, "parameters": {"truncate": 9}}),
        ("/generate_stream", {"inputs": LONG, "parameters": {"truncate": 9}}),
    ],
)
def test_an_answer_says_how_many_tokens_of_its_prompt_were_cut_off(http, tiny_server, path, body):
    tokenizer = tiny_server.model.tokenizer
    chat = Chat(messages=(Message(role="user", content=LONG),))
    is_text = ("completions" in path and "chat" not in path) or "generate" in path
    num_tokens = len(tokenizer.encode(LONG) if is_text else tokenizer.encode_chat(chat))
    expected = f"{num_tokens - 9}" + (",0" if path == "/v1/completions" else "")
    for stream in (True, False):
        response = http.post(path, json=body | {"stream": stream})
        assert response.headers["x-genserve-truncated"] == expected, response.text


def test_tgi_calls_it_truncate(http, tiny_server):
    def generate(prompt, **parameters):
        parameters |= {"max_new_tokens": 8}
        return http.post("/generate", json={"inputs": prompt, "parameters": parameters})

    tokenizer = tiny_server.model.tokenizer
    cut = tokenizer.decode(tokenizer.encode(LONG)[-9:])
    assert tokenizer.encode(cut) == tokenizer.encode(LONG)[-9:]
    reply = generate(LONG, truncate=9)
    assert reply.json() == generate(cut).json()
    assert reply.headers["x-prompt-tokens"] == "9"
    assert generate(LONG, truncate=0).json()["field"] == "parameters.truncate"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"truncate_prompt_tokens": 9, "truncation_side": "middle"}, "truncation_side"),
        ({"truncate_prompt_tokens": 9, "echo": True}, "echo"),
        ({"priority": 2**31}, "priority"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_contradictory_options_are_rejected_by_name(http, body, field):
    reply = complete(http, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://models.example/v1/chat/completions"])
def test_a_model_that_is_a_url_is_the_only_model(http, url):
    # Hugging Face's JavaScript client has no other name for the model at an endpoint.
    assert chat(http, model=url).json()["model"] == "tiny"


def test_fields_without_effect_are_accepted_and_named(http):
    fields = {
        "metadata": {"run": "1"}, "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low", "service_tier": "auto", "verbosity": "low",
    }
    reply = chat(http, **fields)
    assert reply.status_code == 200
    assert set(reply.headers["x-genserve-ignored"].split(",")) == set(fields)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_have_the_usage_so_far(http, route):
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompt = {"messages": [QUESTION]} if "chat" in route else {"prompt": "hello" * 9}
    body = {"max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options, "n": 2} | prompt
    body["cache_salt"] = route
    http.post(route, json=body)
    lines = http.post(route, json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    for index in (0, 1):
        parts = [chunk["usage"] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in parts]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert parts[-1]["total_tokens"] == parts[-1]["prompt_tokens"] + 4
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    cached = {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks}
    assert len(cached) == 1
    assert cached.pop() >= 16
    assert chunks[-1]["usage"]["prompt_tokens"] == chunks[0]["usage"]["prompt_tokens"]


def test_the_usage_so_far_has_the_cached_tokens_of_its_own_prompt(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 2, "ignore_eos": True, "cache_salt": "its own prompt"}
    http.post("/v1/completions", json=body | {"prompt": "hello" * 9})
    body |= {"prompt": ["hello" * 9, "hi"], "stream": True, "stream_options": options}
    lines = http.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    cached = {
        (chunk["choices"][0]["index"], chunk["usage"]["prompt_tokens_details"]["cached_tokens"])
        for chunk in chunks[:-1]
    }
    assert cached == {(0, chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]), (1, 0)}


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}


@pytest.mark.parametrize(
    ("choice", "mode", "names", "parallel"),
    [
        (None, "auto", ["weather", "clock"], True),
        ("none", "none", [], True),
        ("required", "required", ["weather", "clock"], True),
        (CLOCK, "required", ["clock"], False),
        ({"function": {"name": "clock"}}, "required", ["clock"], False),     # TGI's
        ("any", "required", ["weather", "clock"], True),    # Mistral's
        (ALLOWED, "auto", ["clock"], True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "web_search"}]}},
         "none", [], True),
    ],
)  # fmt: skip
def test_a_tool_choice_is_read(choice, mode, names, parallel):
    body = ChatBody.model_validate({"messages": [QUESTION], "tools": [WEATHER, CLOCK], "tool_choice": choice})
    [prompt] = body.prompts()
    assert prompt.tool_choice == mode
    assert [tool.name for tool in prompt.callable_tools] == names
    assert prompt.parallel_tool_calls is parallel


def test_calls_and_their_results_are_read():
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]}
    nothing = {**result, "content": []}
    body = ChatBody.model_validate({"messages": [QUESTION, asked, result, nothing], "tools": [CLOCK]})
    [prompt] = body.prompts()
    assert [message.as_dict() for message in prompt.messages] == [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
        {"role": "tool", "content": "", "tool_call_id": "call_1"},
    ]


def test_results_and_answers_may_have_parts_that_are_no_text():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    text = {"type": "text", "text": "See"}
    thought = {"type": "thinking", "thinking": [text]}
    written = {"type": "output_text", "text": "See"}
    messages = [
        {"role": "tool", "tool_call_id": "c", "content": [text, picture]},
        {"role": "assistant", "content": [thought, written]},
    ]
    [prompt] = ChatBody.model_validate({"messages": messages}).prompts()
    result, answer = prompt.messages
    assert result.content == "See\n[image left out: this model reads text only]"
    assert answer.content == "See"


def test_parts_of_answers_that_are_left_out_are_named(http):
    thoughts = [{"type": kind, kind: "so"} for kind in ("thinking", "reasoning", "thinking")]
    answered = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "See"}]}
    reply = chat(http, messages=[QUESTION, answered, QUESTION])
    assert reply.headers["x-genserve-ignored"] == "messages=thinking,messages=reasoning"
    without = chat(http, messages=[QUESTION, {"role": "assistant", "content": "See"}, QUESTION])
    assert reply.json()["prompt_token_ids"] == without.json()["prompt_token_ids"]


def test_custom_tools_are_functions_with_one_text():
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    custom = {"type": "custom", "custom": {"name": "paste", "format": grammar}}
    call = {"id": "c", "type": "custom", "custom": {"name": "paste", "input": "a\n"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    choice = {"type": "custom", "custom": {"name": "paste"}}
    body = {"messages": messages, "tools": [WEATHER, custom], "tool_choice": choice}
    [prompt] = ChatBody.model_validate(body).prompts()
    assert prompt.messages[0].tool_calls[0].parsed_arguments() == {"input": "a\n"}
    assert prompt.allowed_tools == ("paste",)
    assert prompt.tools[1].parameters["required"] == ["input"]


def test_answers_of_other_servers_are_read():
    refused = {"type": "refusal", "refusal": "I cannot."}
    answers = [
        {"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": None},     # vLLM's
        {"role": "assistant", "content": [{"type": "text", "text": "No. "}, refused]},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
    ]
    [prompt] = ChatBody.model_validate({"messages": answers}).prompts()
    assert [message.as_dict() for message in prompt.messages] == [
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "assistant", "content": "No. I cannot."},
        {"role": "assistant", "content": "I cannot."},
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER], "tool_choice": CLOCK}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": ["function"]}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice":
          {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK] * 1025}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
         "messages[0].tool_calls[0].custom"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [QUESTION, {"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
    ],
)
def test_invalid_tools_are_rejected_by_name(http, body, field):
    reply = chat(http, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_an_error_for_an_invalid_prompt_is_one_sentence(http):
    reply = chat(http, messages=[{"role": "user", "content": 5}])
    assert reply.json()["error"]["message"] == "messages[0].content: must be text, or a list of text parts"


def test_an_answer_has_the_id_of_its_request(http):
    mine = http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    made_up = {http.get("/v1/models").headers["x-request-id"] for _ in range(3)}
    assert len(made_up) == 3
    forged = http.get("/v1/models", headers={"x-request-id": "a b"})
    assert " " not in forged.headers["x-request-id"]
    assert http.post("/v1/completions", json={}, headers={"x-request-id": "e"}).headers["x-request-id"] == "e"


def test_openais_client_reads_it(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="-") as client:
        listed = client.models.list(extra_headers={"x-request-id": "mine-2"})
        assert listed._request_id == "mine-2"
