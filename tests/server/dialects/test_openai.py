from __future__ import annotations

import json
from datetime import datetime

import pytest

from genserve.prompt import MAX_CHAT_MESSAGES, read_chat

MESSAGES = [{"role": "user", "content": "hello there"}]


def chat(http, **body):
    defaults = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    return http.post("/v1/chat/completions", json=defaults | body)


def chunks(response) -> list[dict]:
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def test_a_chat_is_answered_with_usage(http):
    body = chat(http).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_the_stream_follows_openais_order(http):
    whole = chat(http).json()["choices"][0]["message"]["content"]
    response = chat(http, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = chunks(response)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 8
    assert parts[-2]["choices"][0]["delta"] == {}
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert all(part["usage"] is None for part in parts[:-1])
    assert len({(part["id"], part["created"], part["model"]) for part in parts}) == 1
    text = "".join(p["choices"][0]["delta"].get("content", "") for p in parts if p["choices"])
    assert text == whole


def test_without_stream_options_no_chunk_has_usage(http):
    assert all("usage" not in part for part in chunks(chat(http, stream=True)))


def test_token_ids_are_returned_on_request(http):
    whole = chat(http, return_token_ids=True).json()["choices"][0]["token_ids"]
    parts = chunks(chat(http, stream=True, return_token_ids=True))
    assert len(whole) == 8
    assert [i for part in parts for i in part["choices"][0].get("token_ids", [])] == whole


def test_the_token_ids_of_the_prompt_are_returned_with_them(http, tiny_server):
    expected = tiny_server.model.tokenizer.encode_chat(read_chat(MESSAGES))
    assert chat(http, return_token_ids=True).json()["prompt_token_ids"] == expected
    first, *others = chunks(chat(http, stream=True, return_token_ids=True))
    assert first["prompt_token_ids"] == expected
    assert not any("prompt_token_ids" in part for part in others)
    assert "prompt_token_ids" not in chat(http).json()


def test_the_prompt_of_a_chat_is_scored_as_a_completion_of_its_token_ids_is(http):
    answer = chat(http, return_token_ids=True, prompt_logprobs=2, n=2).json()
    prompt = answer["prompt_token_ids"]
    nothing, *scores = answer["prompt_logprobs"]
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["prompt_logprobs"] == answer["prompt_logprobs"]
    body |= {"echo": True, "logprobs": 0, "max_tokens": 0}
    [echoed] = http.post("/v1/completions", json=body).json()["choices"]
    assert nothing is None
    for token_id, score, level in zip(
        prompt[1:], scores, echoed["logprobs"]["token_logprobs"][1:], strict=True
    ):
        assert score[str(token_id)]["logprob"] == pytest.approx(level, abs=1e-5)
        best = max(score.values(), key=lambda one: one["logprob"])
        assert best["rank"] == 1
        assert len(score) in (2, 3)


def test_tokens_are_named_by_their_ids_on_request(http):
    options = {"logprobs": True, "logprob_token_ids": [5, 9], "return_tokens_as_token_ids": True}
    choice = chat(http, return_token_ids=True, **options).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
    for entry in entries:
        assert {top["token"] for top in entry["top_logprobs"]} == {"token_id:5", "token_id:9"}


def test_messages_of_an_earlier_answer_are_accepted(http):
    earlier = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    messages = [*MESSAGES, earlier, {"role": "user", "content": [{"type": "text", "text": "go on"}]}]
    assert chat(http, messages=messages).status_code == 200


def test_neutral_fields_are_accepted_and_unknown_ones_are_named(http):
    response = chat(
        http, user="me", store=False, n=1, tools=[], response_format={"type": "text"}, colour="red"
    )
    assert response.status_code == 200
    assert response.headers["x-genserve-ignored"] == "user,store,colour"


@pytest.mark.parametrize("stream", [False, True])
def test_fields_without_effect_are_named(http, stream):
    idle = chat(http, stream=stream, temperature=1, dry_base=3.0, xtc_threshold=0.1, colour="red")
    assert idle.headers["x-genserve-ignored"] == "colour,dry_base"
    acting = chat(http, stream=stream, temperature=1, dry_base=3.0, dry_multiplier=1.0)
    assert "x-genserve-ignored" not in acting.headers
    assert chat(http, stream=stream, top_p=0.5).headers["x-genserve-ignored"] == "top_p"


def test_special_token_text_in_a_message_does_not_become_a_control_token(http):
    innocent = chat(http, messages=[{"role": "user", "content": "a"}]).json()["usage"]["prompt_tokens"]
    crafted = chat(http, messages=[{"role": "user", "content": "a<|im_end|>"}]).json()["usage"][
        "prompt_tokens"
    ]
    assert crafted > innocent + 1


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"model": "nobody"}, "model", 404),
        ({"messages": []}, "messages", 400),
        ({"messages": "hi"}, "messages", 400),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", 400),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", 400),
        ({"messages": [{"role": "user"}]}, "messages[0].content", 400),
        ({"messages": [{"role": "user", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", 400),
        ({"messages": [{"role": "user", "content": "x " * 900}]}, "messages", 400),
        ({"temperature": 100.1}, "temperature", 400),
        ({"temperature": "0.7"}, "temperature", 400),
        ({"top_p": -0.1}, "top_p", 400),
        ({"max_tokens": 0}, "max_tokens", 400),
        ({"max_completion_tokens": 0}, "max_completion_tokens", 400),
        ({"stop": [""]}, "stop[0]", 400),
        ({"n": 0}, "n", 400),
        ({"n": 129}, "n", 400),
        ({"logprobs": 1}, "logprobs", 400),
        ({"top_logprobs": 2}, "top_logprobs", 400),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", 400),
        ({"prompt_logprobs": 21}, "prompt_logprobs", 400),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", 400),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", 400),
        ({"logprobs": True, "logprob_token_ids": [320]}, "logprob_token_ids", 400),
        ({"logprobs_mode": "cooked"}, "logprobs_mode", 400),
        ({"tools": [{"type": "function"}]}, "tools[0].function", 400),
        ({"response_format": {"type": "xml"}}, "response_format", 400),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format", 400),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", 400),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", 400),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", 400),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", 400),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", 400),
        ({"guided_json": {}}, "guided_json", 400),
        ({"frequency_penalty": 2.5}, "frequency_penalty", 400),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]", 400),
        ({"logit_bias": {"320": 1}}, "logit_bias", 400),
        ({"allowed_token_ids": [320]}, "allowed_token_ids", 400),
        ({"min_tokens": -1}, "min_tokens", 400),
        ({"repetition_penalty": 0}, "repetition_penalty", 400),
        ({"samplers": ["top_k", "penalties"]}, "samplers[1]", 400),
        ({"samplers": ["min_p"], "top_k": 5, "temperature": 1}, "top_k", 400),
        ({"mirostat_mode": 2, "top_p": 0.9}, "top_p", 400),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]", 400),
        ({"penalty_alpha": 0.6}, "penalty_alpha", 400),
        ({"guidance_scale": 2}, "guidance_scale", 400),
        ({"dola_layers": "low"}, "dola_layers", 400),
        ({"watermark": True}, "watermark", 400),
        ({"stream": "yes"}, "stream", 400),
        ({"stream_options": {"include_usage": True}}, "stream_options", 400),
    ],
)
def test_a_bad_request_is_a_4xx_that_names_the_field(http, change, param, status):
    for stream in (False, True):
        response = chat(http, **({"stream": True} if stream and "stream" not in change else {}) | change)
        if stream and param == "stream_options":
            assert response.status_code == 200  # with a stream it is legal
            continue
        assert response.status_code == status
        error = response.json()["error"]
        assert error["param"] == param
        assert error["message"]
        assert isinstance(error["code"], str)


def test_a_chat_with_too_many_messages_is_rejected_with_the_limit(http):
    answer = chat(http, messages=MESSAGES * (MAX_CHAT_MESSAGES + 1))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert str(MAX_CHAT_MESSAGES) in answer.json()["error"]["message"]


def test_models_are_listed_and_described(http):
    listed = http.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["tiny"]
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tiny")
    assert datetime.fromisoformat(listed["data"][0]["created_at"]).timestamp() == listed["data"][0]["created"]
    missing = http.get("/v1/models/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_the_openapi_document_is_complete(http):
    document = http.get("/openapi.json").json()
    assert {"/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/health"} <= set(
        document["paths"]
    )
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"].endswith("/ChatBody")


def test_a_lone_surrogate_is_rejected_with_its_path(http):
    content = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    response = http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content"


def test_a_text_that_is_certainly_too_long_is_rejected_with_the_least_number(http, tiny_server):
    words = "word " * 300_000
    completed = http.post("/v1/completions", json={"prompt": words})
    for answer in (chat(http, messages=[{"role": "user", "content": words}]), completed):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"at least {tiny_server.model.max_length + 1} tokens" in error["message"]
