"""huggingface_hub's InferenceClient, the client of TGI, against a running server."""

from __future__ import annotations

import httpx2
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError


@pytest.fixture
def client(tiny_server):
    return InferenceClient(tiny_server.url)


def test_a_generation_is_answered(client):
    text = client.text_generation("hello there", max_new_tokens=8)
    details = client.text_generation("hello there", max_new_tokens=8, details=True)
    assert details.generated_text == text
    assert details.details.finish_reason == "length"
    assert details.details.generated_tokens == len(details.details.tokens) == 8


def test_a_streamed_generation_joins_to_the_whole(client):
    whole = client.text_generation("hello there", max_new_tokens=8)
    assert "".join(client.text_generation("hello there", max_new_tokens=8, stream=True)) == whole
    events = list(client.text_generation("hello there", max_new_tokens=8, stream=True, details=True))
    assert events[-1].generated_text == whole
    assert events[-1].details.finish_reason == "length"
    assert all(event.token.logprob <= 0 for event in events)


def test_the_prompt_and_the_likeliest_tokens_are_scored(client, tiny_server):
    options = {"max_new_tokens": 4, "top_n_tokens": 3, "details": True}
    found = client.text_generation("hello there", decoder_input_details=True, **options).details
    body = {"prompt": "hello there", "max_tokens": 4, "temperature": 0, "logprobs": 3, "echo": True}
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = httpx2.post(f"{tiny_server.url}/v1/completions", json=body | extra).json()
    [choice] = answer["choices"]
    levels = choice["logprobs"]["token_logprobs"]
    assert [token.id for token in found.prefill] == choice["prompt_token_ids"]
    assert "".join(token.text for token in found.prefill) == "hello there"
    assert found.prefill[0].logprob is levels[0] is None
    assert [token.logprob for token in found.prefill[1:]] == pytest.approx(levels[1 : -4], abs=1e-4)
    tops = choice["logprobs"]["top_logprobs"][-4:]
    for likely, top in zip(found.top_tokens, tops, strict=True):
        assert {f"token_id:{one['id']}": one["logprob"] for one in likely} == pytest.approx(top, abs=1e-4)
    events = client.text_generation("hello there", stream=True, **options)
    streamed = [[token.id for token in event.top_tokens] for event in events]
    assert streamed == [[one["id"] for one in likely] for likely in found.top_tokens]


def test_a_chat_streams(client):
    stream = client.chat_completion([{"role": "user", "content": "hello"}], max_tokens=8, stream=True)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason in {"length", "stop"}
    assert len(chunks) > 2


async def test_the_asynchronous_client_streams(tiny_server):
    async with AsyncInferenceClient(tiny_server.url) as client:
        stream = await client.text_generation("hello there", max_new_tokens=8, stream=True)
        assert "".join([piece async for piece in stream])


def test_sampling_with_a_seed_is_reproducible(client):
    def sampled(seed: int) -> str:
        return client.text_generation("hello", max_new_tokens=24, do_sample=True, temperature=1.5, seed=seed)

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_a_bad_parameter_is_its_validation_error(client):
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation("hello", max_new_tokens=0)
