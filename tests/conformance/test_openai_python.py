"""openai-python against a running server."""

from __future__ import annotations

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hello there"}]
OPTIONS = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(**OPTIONS)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].message.content


def test_a_streamed_chat_joins_to_the_whole_and_ends_with_its_usage(client):
    whole = client.chat.completions.create(**OPTIONS).choices[0].message.content
    stream = client.chat.completions.create(**OPTIONS, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_the_stream_helper_builds_the_final_completion(client):
    whole = client.chat.completions.create(**OPTIONS).choices[0].message.content
    # Ended by a stop string: this helper raises for answers that max_tokens cut.
    with client.chat.completions.stream(**OPTIONS, stop=whole[4:6]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == whole[: whole.index(whole[4:6])]


async def test_the_asynchronous_client_streams(tiny_server):
    async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(**OPTIONS, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text


def test_a_stream_closed_early_frees_its_slot(client, tiny_server):
    stream = client.chat.completions.create(**(OPTIONS | {"max_tokens": 200}), stream=True)
    next(stream)
    stream.close()
    while tiny_server.model.engine.num_accepted:
        pass


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": 101}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
    ],
)
def test_errors_arrive_as_the_clients_own_classes(client, change, error):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**(OPTIONS | change))
    assert raised.value.body["message"]
    if error is openai.BadRequestError:
        assert raised.value.param in change


def test_a_prompt_over_the_context_has_the_code_that_programs_look_for(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**(OPTIONS | {"messages": [{"role": "user", "content": "x " * 900}]}))
    assert raised.value.code == "context_length_exceeded"


def test_a_chat_has_as_many_answers_as_asked_for(client):
    options = OPTIONS | {"temperature": 1.5, "seed": 3, "n": 3, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage.completion_tokens == 36
    one = client.chat.completions.create(**(options | {"n": 1}))
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens
    texts = ["", "", ""]
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert [chunk.usage for chunk in chunks if chunk.usage] == [chunks[-1].usage]
    assert chunks[-1].usage.completion_tokens == 36


def test_a_chat_reports_the_log_probabilities_of_its_tokens(client, tiny_server):
    extra = {"ignore_eos": True, "return_token_ids": True}
    options = OPTIONS | {"temperature": 1.5, "seed": 3, "extra_body": extra}
    plain = client.chat.completions.create(**options).choices[0]
    assert plain.logprobs is None
    choice = client.chat.completions.create(**options, logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    assert choice.message.content == plain.message.content == "".join(token.token for token in tokens)
    assert len(tokens) == 12
    for token in tokens:
        levels = [top.logprob for top in token.top_logprobs]
        assert len(levels) == 3
        assert levels == sorted(levels, reverse=True)
        for top in token.top_logprobs:
            if top.token.isascii() and top.token and not top.token.startswith("token_id:"):
                assert bytes(top.bytes).decode() == top.token
        assert token.logprob <= levels[0] + 1e-5
    spelled = b"".join(bytes(token.bytes) for token in tokens)
    assert spelled.decode(errors="replace") == choice.message.content
    stream = client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
    parts = [c.choices[0].logprobs for c in stream if c.choices[0].logprobs]
    assert [token for part in parts for token in part.content] == tokens


def test_the_log_probabilities_of_a_greedy_chat_are_those_of_the_best_tokens(client):
    options = OPTIONS | {"extra_body": {"ignore_eos": True}}
    tokens = client.chat.completions.create(**options, logprobs=True, top_logprobs=1).choices[0].logprobs
    for token in tokens.content:
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-5)
