"""A model's generation_config.json in all dialects, over real sockets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from genserve import LLM, Client
from genserve.errors import GenserveError
from genserve.repository.model_validation import repository_diagnostics
from genserve.server.api_server import Server
from genserve.settings import ServerSettings
from tests.support.live_server import LiveServer

CONFIG = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.3, "max_new_tokens": 7, "eos_token_id": 2}
OURS = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.3, "max_tokens": 7}
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_tokens": 12}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "ignore_eos": True}
PROMPT = {"prompt": "hi", "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def repository(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = tmp_path_factory.mktemp("recommended") / "repository"
    shutil.copytree(tiny_repository, copied)
    write(copied, CONFIG)
    return copied


def write(repository: Path, config: Any) -> Path:
    file = repository / "tiny_tokenizer" / "1" / "generation_config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[LiveServer]:
    with LiveServer(repository) as server:
        yield server


def chat(server: LiveServer, **fields: Any) -> str:
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_openais_routes_use_the_defaults_of_the_model(server, tiny_server):
    assert chat(server) == chat(tiny_server, **OURS)
    assert chat(server, temperature=None) == chat(server)
    assert chat(server, **NEUTRAL) == chat(tiny_server, **NEUTRAL) != chat(server)
    assert chat(server, top_k=1) == chat(tiny_server, **OURS | {"top_k": 1})
    urls = [f"{url}/v1/completions" for url in (server.url, tiny_server.url)]
    texts = [
        httpx2.post(url, json=PROMPT | fields).json()["choices"][0]["text"]
        for url, fields in zip(urls, ({}, OURS), strict=True)
    ]
    assert texts[0] == texts[1]


def test_messages_use_the_defaults_of_the_model(server, tiny_server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 3, "model": "tiny"}
    answers = [
        httpx2.post(f"{one.url}/v1/messages", json=body | fields).json()["content"]
        for one, fields in (
            (server, {}),
            (tiny_server, {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.3}),
        )
    ]
    assert answers[0] == answers[1]


def test_ollamas_routes_use_the_defaults_of_the_model(server, tiny_server):
    body = {"model": "tiny", "prompt": "hi", "stream": False, "options": {"seed": 3}}
    options = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.3, "num_predict": 7}
    texts = [
        httpx2.post(f"{one.url}/api/generate", json=body | more).json()["response"]
        for one, more in ((server, {}), (tiny_server, {"options": {"seed": 3, **options}}))
    ]
    assert texts[0] == texts[1]


def test_greedy_dialects_stay_greedy(server, tiny_server):
    rest = {"repetition_penalty": 1.3, "max_new_tokens": 7}
    for fields in ({}, {"do_sample": True, "seed": 3, "temperature": 0.3}):
        drawn = {"top_k": 5} if fields else {}
        texts = [
            httpx2.post(f"{one.url}/generate", json={"inputs": "hi", "parameters": fields | more}).json()
            for one, more in ((server, {}), (tiny_server, rest | drawn))
        ]
        assert texts[0] == texts[1]
    tensors = {"text_input": "hi"}
    triton = [
        httpx2.post(f"{one.url}/v2/models/tiny/generate", json=tensors | more).json()
        for one, more in (
            (server, {}),
            (tiny_server, {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 7}),
        )
    ]
    assert triton[0]["text_output"] == triton[1]["text_output"]


def test_client_and_library_agree(server, repository):
    with Client(server.url) as client, LLM(model_repository=repository) as llm:
        assert client.default_sampling_params() == {"tiny": llm.default_sampling_params}
        assert llm.default_sampling_params == OURS
        for options in ({}, {"temperature": 0.8}, {**NEUTRAL, "top_k": 0}, OURS):
            given: Any = options | {"seed": 1}
            assert client.chat("hi", **given) == llm.chat("hi", **given)
            assert client.generate("hi", **given).text == llm.generate("hi", **given).text
            assert client.complete("hi", **given) == llm.complete("hi", **given)


def test_a_default_length_does_not_reject_a_long_prompt(server):
    longest = [5] * (server.model.max_length - 3)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    answer = client.completions.create(model="tiny", prompt=longest, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    raw = client.completions.with_raw_response
    own = raw.create(model="tiny", prompt=longest)
    assert "x-genserve-clamped" not in own.headers
    asked = raw.create(model="tiny", prompt=longest, max_tokens=7)
    assert asked.headers["x-genserve-clamped"] == "max_tokens=3"


def test_parameters_of_the_model_are_not_reported_as_ignored(server):
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=ASKED | {"temperature": 0, "top_p": 0.5})
    assert answer.headers["x-genserve-ignored"] == "top_p"


def test_the_list_of_models_shows_them(server, tiny_server):
    shown = [httpx2.get(f"{one.url}/v1/models").json()["data"][0] for one in (server, tiny_server)]
    assert [model["default_sampling_params"] for model in shown] == [OURS, {}]
    assert ["min_p" in model["chat_sampling_params"] for model in shown] == [False, True]


def test_flags_turn_them_off_and_override_them(repository, tiny_server):
    with LiveServer(repository, generation_config="none") as off:
        assert off.model.default_sampling_params == {}
        assert off.model.tokenizer.eos_token_ids == frozenset({2})
        assert chat(off, max_tokens=9) == chat(tiny_server, max_tokens=9)
    overriding = json.dumps({"temperature": 0.9, "max_new_tokens": None, "top_p": 0.5})
    with LiveServer(repository, override_generation_config=overriding) as changed:
        assert changed.model.default_sampling_params == OURS | {"temperature": 0.9, "top_p": 0.5}


def test_an_override_out_of_range_ends_the_start(repository):
    settings = ServerSettings(
        model_repository=(repository,), override_generation_config='{"top_p": 2}', http_port=0
    )
    with pytest.raises(GenserveError, match="--override-generation-config: top_p"):
        Server(settings)


def test_a_value_out_of_range_is_reported_with_file_and_remedy(repository, tmp_path):
    broken = tmp_path / "repository"
    shutil.copytree(repository, broken)
    file = write(broken, CONFIG | {"temperature": "warm"})
    [found] = repository_diagnostics([broken])["tiny_tokenizer"]
    assert found.message.startswith(f"{file}: temperature ")
    assert found.remedy
    with pytest.raises(GenserveError, match="temperature"):
        LLM(model_repository=broken)
