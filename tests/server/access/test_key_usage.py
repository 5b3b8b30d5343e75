"""What each key has used, and how keys share a model, on a server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families

from tests.support.live_server import LiveServer, wait_until

KEYS = """
[alice]
key = "secret-of-alice"

[bob]
key = "secret-of-bob"
weight = 3
"""
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    return file


@pytest.fixture
def server(tiny_repository: Path, key_file: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_repository, api_key_file=key_file, max_queue=8) as server:
        yield server


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer secret-of-{name}"}


def chat(server: LiveServer, name: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT | fields, headers=of(name), timeout=60)


def usage(server: LiveServer, name: str) -> dict[str, Any]:
    return httpx2.get(f"{server.url}/v1/usage", headers=of(name)).raise_for_status().json()


def metrics(server: LiveServer) -> dict[tuple[str, str], float]:
    text = httpx2.get(f"{server.url}/metrics", headers=of("bob")).text
    return {
        (sample.name, sample.labels["key"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "key" in sample.labels
    }


def test_each_key_sees_what_it_has_used(server: LiveServer) -> None:
    assert usage(server, "alice") == {
        "object": "usage", "key": "alice", "weight": 1.0, **dict.fromkeys(_COUNTS, 0)
    }  # fmt: skip
    answers = [chat(server, "alice").json()["usage"] for _ in range(2)]
    generated = {"text_input": "Hello", "max_tokens": 3}
    url = f"{server.url}/v2/models/tiny/generate"
    httpx2.post(url, json=generated, headers=of("bob")).raise_for_status()
    used = usage(server, "alice")
    assert used["requests"] == 2
    assert used["prompt_tokens"] == sum(answer["prompt_tokens"] for answer in answers)
    assert used["completion_tokens"] == 10
    cached = [answer["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert used["cached_tokens"] == sum(cached) > 0
    of_bob = usage(server, "bob")
    assert (of_bob["requests"], of_bob["weight"]) == (1, 3.0)
    assert 0 < of_bob["completion_tokens"] <= 3
    counted = metrics(server)
    for name, totals in (("alice", used), ("bob", of_bob)):
        assert {each: counted[f"genserve_key_{each}_total", name] for each in _COUNTS} == {
            each: totals[each] for each in _COUNTS
        }


def test_calls_by_grpc_count(server: LiveServer) -> None:
    text = triton.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"Hello"]], object))
    errors: list[Any] = []
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: errors.append(error), headers=of("alice"))
        client.async_stream_infer("tiny", [text])
        client.stop_stream()
    assert errors
    assert not any(errors)
    wait_until(lambda: usage(server, "alice")["requests"] == 1)
    assert usage(server, "alice")["completion_tokens"] > 0


def test_usage_needs_a_key(server: LiveServer) -> None:
    assert httpx2.get(f"{server.url}/v1/usage").status_code == 401


def test_a_server_without_keys_has_no_usage_of_a_key(tiny_server: LiveServer) -> None:
    answer = httpx2.get(f"{tiny_server.url}/v1/usage")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"


def test_a_full_queue_has_room_for_another_key(server: LiveServer) -> None:
    engine = server.model.engine
    with ThreadPoolExecutor(64) as threads:
        floods = [
            threads.submit(chat, server, "alice", max_tokens=80, temperature=1, seed=number)
            for number in range(64)
        ]
        wait_until(lambda: engine.num_accepted + engine.num_preparing >= engine.capacity)
        of_alice = chat(server, "alice")
        of_bob = [chat(server, "bob", max_tokens=1) for _ in range(3)]
        statuses = [flood.result().status_code for flood in floods]
    assert {*statuses} == {200, 429}
    assert of_alice.status_code == 429
    assert [answer.status_code for answer in of_bob] == [200] * 3
