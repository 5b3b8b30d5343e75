"""The requests of vllm-router, sglang-router and llm-d; conformance/ runs the routers themselves."""

from __future__ import annotations

import shutil
import threading

import httpx2
import pytest

from genserve.version import __version__
from tests.support.live_server import LiveServer, wait_until
from tests.support.step_gate import StepGate

CHAT = [{"role": "user", "content": "hello there"}]


def test_a_rendered_chat_has_the_token_ids_that_its_answer_has_seen(http):
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 1}
    answered = http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
    rendered = http.post("/v1/chat/completions/render", json=body).json()
    assert rendered["token_ids"] == answered["prompt_token_ids"]
    assert rendered["model"] == "tiny"
    assert rendered["request_id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("hello", 1), (["hello", "there, you"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)],
)
def test_a_rendered_completion_has_the_token_ids_of_each_prompt(http, prompt, num_prompts):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    answered = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    rendered = http.post("/v1/completions/render", json=body).json()
    expected = [choice["prompt_token_ids"] for choice in answered["choices"]]
    assert [prompt["token_ids"] for prompt in rendered] == expected
    assert len(expected) == num_prompts


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/chat/completions/render", {"model": "no", "messages": CHAT}, 404, "model"),
        ("/v1/chat/completions/render", {"messages": [{"role": "x"}]}, 400, "messages[0].role"),
        ("/v1/completions/render", {"prompt": [10**9]}, 400, "prompt[0]"),
        ("/v1/completions/render", {"prompt": []}, 400, "prompt"),
        ("/v1/completions/render", {"prompt": "a", "top_p": 7}, 400, "top_p"),
        ("/v1/chat/completions/render", {"messages": CHAT, "max_tokens": -1}, 400, "max_tokens"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_not_rendered_either(http, path, body, status, field):
    rejected = http.post(path, json=body)
    assert rejected.status_code == status
    answered = http.post(path.removesuffix("/render"), json=body)
    assert rejected.json() == answered.json()
    assert rejected.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_routers_learn_the_name_and_the_size_of_the_model(http, path, tiny_server):
    info = http.get(path).json()
    assert (info["served_model_name"], info["version"]) == ("tiny", __version__)
    assert info["context_length"] == 256
    logits = tiny_server.model.logits
    assert info["max_total_tokens"] == logits.num_blocks * logits.block_size > 256


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_routers_learn_that_the_model_generates(http, path):
    info = http.get(path).json()
    assert (info["model_path"], info["is_generation"]) == ("tiny", True)


@pytest.fixture
def two_models(tiny_repository, tmp_path):
    """The tiny model, and the same as `other`."""
    for folder in tiny_repository.iterdir():
        shutil.copytree(folder, tmp_path / folder.name)
        other = shutil.copytree(folder, tmp_path / folder.name.replace("tiny", "other"))
        config = other / "config.pbtxt"
        config.write_text(config.read_text().replace('"tiny', '"other'))
    return tmp_path


def test_a_server_with_several_models_names_none_of_them_as_its_own(two_models):
    with LiveServer(two_models) as server, httpx2.Client(base_url=server.url) as http:
        assert http.get("/server_info").json()["served_model_name"] is None
        assert http.get("/model_info").json()["model_path"] is None
        assert [load["dp_rank"] for load in http.get("/get_load").json()] == [0, 1]


def test_the_load_counts_requests_and_their_tokens(http, tiny_server):
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    wait_until(lambda: http.get("/get_load").json() == [idle])
    steps = StepGate(tiny_server.model)
    steps.shut()
    body = {"model": "tiny", "prompt": "hello there", "max_tokens": 2}
    asking = threading.Thread(target=lambda: http.post("/v1/completions", json=body))
    asking.start()
    wait_until(lambda: steps.num_begun)
    [busy] = http.get("/get_load").json()
    steps.remove()
    asking.join()
    assert busy["num_reqs"] == 1
    assert busy["num_tokens"] > 0
