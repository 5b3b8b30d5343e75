"""huggingface_hub's InferenceClient, the client of TGI, against a running server."""

from __future__ import annotations

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from tests.live import LiveServer


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
        client.text_generation("hello", max_new_tokens=10**6)


def test_an_overloaded_server_is_its_overloaded_error(tiny_repository):
    with LiveServer(tiny_repository, max_queue=0) as server:
        server.model.loop._num_accepted = server.model.loop.capacity
        with pytest.raises(OverloadedError):
            InferenceClient(server.url).text_generation("hello", max_new_tokens=4)
