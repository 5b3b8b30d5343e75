"""The plug-ins of docs/decoding.md through every protocol of a real server."""

from __future__ import annotations

import json

import httpx2
import openai
import pytest

from genserve.client import Client
from tests.support.documented_plugins import copy_with_plugins
from tests.support.live_server import LiveServer

CALLS = {
    "logits_processors": [{"name": "no_digits", "args": {"first": 40}}],
    "stop_rules": [{"name": "at_most_lines", "args": {"lines": 9}}],
    "output_parser": {"name": "hide", "args": {"start": "a", "end": "e"}},
}
DRAWN = {"temperature": 1.0, "seed": 5}
PROMPT = "1 2 3"


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_repository):
    root = copy_with_plugins(tiny_repository, tmp_path_factory.mktemp("plugins") / "repository")
    with LiveServer(root) as server:
        yield server


@pytest.fixture(scope="module")
def answered(server):
    """The answer of `/generate` through the SDK."""
    with Client(server.url) as client:
        plain = client.generate(PROMPT, max_tokens=40, **DRAWN)
        answer = client.generate(PROMPT, max_tokens=40, **DRAWN, **CALLS)
    assert answer.text != plain.text
    assert not any(char.isdigit() for char in answer.text)
    return answer.text


def test_openai_completions_accept_plugins(server, answered):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        completion = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=40, **DRAWN, extra_body=CALLS
        )
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=40, **DRAWN, extra_body=CALLS, stream=True
        )
        assert completion.choices[0].text == "".join(chunk.choices[0].text for chunk in stream) == answered


def test_each_choice_of_a_request_has_its_own_plugins(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:

        def complete(seed, n):
            options = {"max_tokens": 40, "temperature": 1.0, "seed": seed, "n": n, "extra_body": CALLS}
            return client.completions.create(model="tiny", prompt=PROMPT, **options).choices

        together = complete(5, 3)
        assert [c.text for c in together] == [complete(seed, 1)[0].text for seed in (5, 6, 7)]


def test_a_chat_accepts_plugins(server):
    with Client(server.url) as client:
        answer = client.chat(PROMPT, max_tokens=40, **DRAWN, **CALLS).text
        with client.chat_stream(PROMPT, max_tokens=40, **DRAWN, **CALLS) as stream:
            assert "".join(delta.text for delta in stream) == answer
    assert not any(char.isdigit() for char in answer)


def test_the_ensemble_accepts_plugins_as_json_parameters(server, answered):
    parameters = {name: json.dumps(value) for name, value in CALLS.items()} | {"cache_salt": "mine"}
    body = {"text_input": PROMPT, "max_tokens": 40, "temperature": 1.0, "random_seed": 5}
    reply = httpx2.post(f"{server.url}/v2/models/tiny/generate", json=body | {"parameters": parameters})
    assert reply.json()["text_output"] == answered


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"output_parser": "hide"}, "output_parser"),
        ({"stop_rules": 3}, "stop_rules"),
        ({"stop_rules": '[{"name": "x"}]'}, "stop_rules[0].name"),
        ({"cache_salt": 3}, "cache_salt"),
        # A request parameter cannot set these, though the values are valid in other dialects.
        ({"stop_regex": "a"}, "stop_regex"),
        ({"structured_outputs": '{"regex": "a"}'}, "structured_outputs"),
    ],
)
def test_the_ensemble_rejects_invalid_plugin_calls(server, parameters, place):
    body = {"text_input": PROMPT, "max_tokens": 1, "parameters": parameters}
    reply = httpx2.post(f"{server.url}/v2/models/tiny/generate", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith((f"{place} ", f"{place}:"))


def test_neutral_and_unknown_parameters_are_ignored(server):
    parameters = {"ignore_eos": False, "stop": "", "priority": 3, "pad_id": 2, "n": 2}
    body = {"text_input": PROMPT, "max_tokens": 1, "parameters": parameters}
    assert httpx2.post(f"{server.url}/v2/models/tiny/generate", json=body).status_code == 200


@pytest.mark.parametrize(
    ("calls", "field"),
    [
        ({"stop_rules": [{"name": "x"}]}, "stop_rules[0].name"),
        ({"stop_rules": [{"name": "at_most_lines", "args": {"lines": "x"}}]}, "stop_rules[0].args.lines"),
        ({"output_parser": {"name": "x"}}, "output_parser.name"),
        ({"output_parser": {"name": "hide", "code": "1"}}, "output_parser.code"),
        ({"logits_processors": [{"args": {}}]}, "logits_processors[0].name"),
    ],
)
def test_an_invalid_plugin_call_is_rejected_with_its_path(server, calls, field):
    reply = httpx2.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"} | calls)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert field in reply.json()["error"]["message"]
    reply = httpx2.post(f"{server.url}/generate", json={"inputs": "x", "parameters": calls})
    assert (reply.status_code, reply.json()["field"]) == (422, f"parameters.{field}")
    assert reply.json()["error"].count("parameters.") == 1


def test_the_list_of_models_describes_plugins_and_their_arguments(server):
    [model] = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert set(model["logits_processors"]) == {"no_digits"}
    first = model["logits_processors"]["no_digits"]["properties"]["first"]
    assert (first["type"], first["minimum"]) == ("integer", 1)
    assert model["stop_rules"]["at_most_lines"]["required"] == ["lines"]
    assert model["output_parsers"]["hide"]["additionalProperties"] is False
