"""The KV cache as clients see it: shared prefixes, separate tenants, too little memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.client import Client
from genserve.export import export_model
from genserve.export.export_options import SilentProgress
from tests.support.live_server import LiveServer
from tests.support.tiny_llama import tiny_llama_checkpoint

PREFIX = "".join(f"{i:03d} " for i in range(150))  # 600 tokens of the tiny tokenizer: one for each byte
TOKEN_KIB = 0.5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_checkpoint(tmp_path_factory.mktemp("long") / "tiny", context=1024)


def repository_of(folder: Path, checkpoint: Path, **parameters: str) -> Path:
    export_model(str(checkpoint), repository=folder, name="tiny", precision="fp32", progress=SilentProgress())
    config = folder / "tiny_logits" / "config.pbtxt"
    lines = [f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items()]
    config.write_text("\n".join([config.read_text(), *lines]))
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[LiveServer]:
    with LiveServer(repository_of(tmp_path_factory.mktemp("shared"), checkpoint)) as server:
        yield server


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[LiveServer]:
    folder = repository_of(tmp_path_factory.mktemp("alone"), checkpoint, prefix_cache="false")
    with LiveServer(folder) as server:
        yield server


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[LiveServer]:
    folder = repository_of(
        tmp_path_factory.mktemp("small"), checkpoint, kv_cache_bytes=f"{512 * TOKEN_KIB:g}KiB"
    )
    with LiveServer(folder) as server:
        yield server


def ask(server: LiveServer, content: str, **body: Any) -> tuple[str, int]:
    """The answer to a chat, and the number of cached tokens of its prompt."""
    messages = [{"role": "user", "content": content}]
    defaults = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx2.post(f"{server.url}/v1/chat/completions", json=defaults | body, timeout=60).json()
    return (
        reply["choices"][0]["message"]["content"],
        reply["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def metric(server: LiveServer, name: str) -> float:
    text = httpx2.get(f"{server.url}/metrics", timeout=60).text
    return float(re.search(rf"^{name}{{model=\"tiny\"}} (\S+)$", text, re.MULTILINE)[1])


def test_a_shared_prefix_is_computed_once_and_does_not_change_the_answer(shared, alone):
    queries, hits = (metric(shared, f"genserve_prefix_cache_{kind}_total") for kind in ("queries", "hits"))
    prompts = [f"{PREFIX} and {word}" for word in ("one", "two", "three")]
    answers = [ask(shared, prompt) for prompt in prompts]
    assert [cached >= 600 for _, cached in answers] == [False, True, True]
    assert [ask(alone, prompt) for prompt in prompts] == [(text, 0) for text, _ in answers]
    assert metric(shared, "genserve_prefix_cache_hits_total") - hits == sum(cached for _, cached in answers)
    assert metric(shared, "genserve_prefix_cache_queries_total") - queries > 3 * 600


def test_the_next_turn_of_a_chat_reuses_the_cache_of_the_last(shared):
    first, _ = ask(shared, "turn")
    messages = [
        {"role": "user", "content": "turn"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "again"},
    ]
    _, cached = ask(shared, "", messages=messages)
    assert cached >= len("turn")


def test_only_requests_with_the_same_cache_salt_share_prefixes(shared):
    content = f"{PREFIX} of a tenant"[::-1]
    cached = [ask(shared, content, **salt)[1] for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}) * 2]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= 600


def test_the_client_sends_the_salt_and_reads_what_was_cached(shared):
    with Client(shared.url) as client:
        for call in (client.chat, client.generate):
            prompt = f"{call.__name__} {PREFIX}"
            first, same, other = (
                call(prompt, max_tokens=2, cache_salt=salt).usage for salt in ("x", "x", "y")
            )
            assert first.cached_tokens == other.cached_tokens == 0
            assert same.cached_tokens >= same.prompt_tokens - 16  # whole blocks
        with client.stream(prompt, max_tokens=2, cache_salt="x") as stream:
            usage = stream.final().usage
            assert usage.cached_tokens >= usage.prompt_tokens - 16


def test_an_empty_cache_salt_is_rejected(shared):
    body = {"messages": [{"role": "user", "content": "x"}], "cache_salt": ""}
    reply = httpx2.post(f"{shared.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "cache_salt"


def test_a_request_larger_than_the_kv_cache_is_rejected_with_a_remedy(small):
    body = {"messages": [{"role": "user", "content": PREFIX}]}
    reply = httpx2.post(f"{small.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "512" in reply.json()["error"]["message"]
    assert "kv_cache_bytes" in reply.text


def test_concurrent_requests_beyond_the_kv_cache_are_all_answered(small, alone):
    prompts = [f"{i} {PREFIX[:60]}" for i in range(6)]  # each fits, all together do not

    async def all_at_once() -> list[str]:
        return await asyncio.gather(
            *(asyncio.to_thread(lambda p=p: ask(small, p, max_tokens=150)[0]) for p in prompts)
        )

    assert asyncio.run(all_at_once()) == [ask(alone, prompt, max_tokens=150)[0] for prompt in prompts]
    assert metric(small, "genserve_num_preemptions_total") > 0
    assert metric(small, "genserve_kv_cache_usage_perc") == 0
