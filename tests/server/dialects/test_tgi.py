from __future__ import annotations

import json
import shutil

import httpx2
import pytest

from genserve.text.tokenizer import Tokenizer
from tests.support.live_server import LiveServer
from tests.support.scripted_model import scripted_repository


def generate(http, inputs="hello there", **parameters):
    return http.post("/generate", json={"inputs": inputs, "parameters": {"max_new_tokens": 8, **parameters}})


def events(response) -> list[dict]:
    return [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n") if block]


def test_generate_answers_the_text_and_counts(http):
    response = generate(http, details=True)
    assert response.status_code == 200
    body = response.json()
    details = body["details"]
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == len(details["tokens"]) == 8
    assert "".join(token["text"] for token in details["tokens"]) == body["generated_text"]
    assert all(token["logprob"] <= 0 for token in details["tokens"])
    assert response.headers["x-generated-tokens"] == "8"
    assert int(response.headers["x-prompt-tokens"]) > 0


def test_prompt_logprobs_of_a_beam_search_are_rejected_with_tgis_name(http):
    answer = generate(http, details=True, decoder_input_details=True, use_beam_search=True).json()
    assert answer["field"] == "parameters.decoder_input_details"


def test_details_are_returned_only_on_request(http):
    assert set(generate(http).json()) == {"generated_text"}


@pytest.mark.parametrize("route", ["/", "/generate", "/generate_stream"])
def test_fields_without_effect_are_named(http, route):
    parameters = {"max_new_tokens": 2, "max_tokns": 1, "mirostat_tau": 3.0}
    body = {"inputs": "hello", "extra": 1, "parameters": parameters}
    response = http.post(route, json=body)
    assert response.status_code == 200
    ignored = "extra,parameters.max_tokns,parameters.mirostat_tau"
    assert response.headers["x-genserve-ignored"] == ignored
    del body["extra"], parameters["mirostat_tau"], parameters["max_tokns"]
    assert "x-genserve-ignored" not in http.post(route, json=body).headers


def test_the_stream_has_one_event_per_token_and_the_whole_text_in_the_last(http):
    whole = generate(http).json()["generated_text"]
    response = http.post(
        "/generate_stream", json={"inputs": "hello there", "parameters": {"max_new_tokens": 8}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    stream = events(response)
    assert [e["index"] for e in stream] == list(range(1, 9))
    assert all(e["generated_text"] is None for e in stream[:-1])
    assert stream[-1]["generated_text"] == whole
    assert stream[-1]["details"]["finish_reason"] == "length"
    assert "".join(e["token"]["text"] for e in stream) == whole
    assert "[DONE]" not in response.text


def test_a_special_token_has_no_text_since_clients_leave_it_out(tiny_repository, tmp_path):
    end = Tokenizer.from_folder(tiny_repository / "tiny_tokenizer" / "1").eos_token
    scripts = {"#1": "ok: 12", "#2": f"ok: 12{end}"}
    root = scripted_repository(tiny_repository, tmp_path / "repository", scripts, tokens_per_step=9)
    with LiveServer(root) as server:
        for prompt, stop in (("#1", ["2!"]), ("#2", ["2!"]), ("#2", [])):
            body = {"inputs": prompt, "parameters": {"stop": stop}}
            stream = events(httpx2.post(f"{server.url}/generate_stream", json=body, timeout=60))
            shown = "".join(e["token"]["text"] for e in stream if not e["token"]["special"])
            assert shown == stream[-1]["generated_text"] == "ok: 12"


def test_the_root_route_streams_or_answers_a_list(http):
    body = {"inputs": "hello there", "parameters": {"max_new_tokens": 4}}
    whole = http.post("/", json=body).json()
    stream = events(http.post("/", json=body | {"stream": True}))
    assert whole == [{"generated_text": stream[-1]["generated_text"]}]


def test_return_full_text_prepends_the_prompt(http):
    text = generate(http).json()["generated_text"]
    assert generate(http, return_full_text=True).json()["generated_text"] == "hello there" + text


def test_a_stop_string_ends_the_text_before_it(http):
    text = generate(http, max_new_tokens=30).json()["generated_text"]
    stop = text[5:8]
    body = generate(http, max_new_tokens=30, stop=[stop], details=True).json()
    assert body["generated_text"] == text[: text.index(stop)]
    assert body["details"]["finish_reason"] == "stop_sequence"


def test_the_same_seed_gives_the_same_text_and_another_seed_another(http):
    def sampled(seed):
        return generate(http, do_sample=True, seed=seed, max_new_tokens=30).json()["generated_text"]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_neutral_values_of_unsupported_parameters_are_accepted(http):
    neutral = {
        "best_of": 1,
        "watermark": False,
        "repetition_penalty": 1.0,
        "truncate": None,
        "typical_p": None,
    }
    assert generate(http, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("body", "field", "status"),
    [
        ({"inputs": ""}, "inputs", 422),
        ({}, "inputs", 422),
        ({"inputs": None}, "inputs", 422),
        ({"inputs": 5}, "inputs", 422),
        ({"inputs": "x" * 5000}, "inputs", 422),
        ({"inputs": "x", "model": "nobody"}, "model", 404),
        ({"inputs": "x", "parameters": {"max_tokens": 1}}, "parameters.max_tokens", 422),
        ({"inputs": "x", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens", 422),
        ({"inputs": "x", "parameters": {"max_new_tokens": 1.5}}, "parameters.max_new_tokens", 422),
        ({"inputs": "x", "parameters": {"max_new_tokens": "5"}}, "parameters.max_new_tokens", 422),
        ({"inputs": "x", "parameters": {"temperature": 0}}, "parameters.temperature", 422),
        ({"inputs": "x", "parameters": {"temperature": -1.0}}, "parameters.temperature", 422),
        ({"inputs": "x", "parameters": {"top_p": 1.5}}, "parameters.top_p", 422),
        ({"inputs": "x", "parameters": {"top_k": 0}}, "parameters.top_k", 422),
        ({"inputs": "x", "parameters": {"top_k": 10**19}}, "parameters.top_k", 422),
        ({"inputs": "x", "parameters": {"stop": [""]}}, "parameters.stop[0]", 422),
        ({"inputs": "x", "parameters": {"stop": ["a"] * 65}}, "parameters.stop", 422),
        ({"inputs": "x", "parameters": {"stop_token_ids": [320]}}, "parameters.stop_token_ids", 422),
        ({"inputs": "x", "parameters": {"seed": -1}}, "parameters.seed", 422),
        ({"inputs": "x", "parameters": {"best_of": 0}}, "parameters.best_of", 422),
        ({"inputs": "x", "parameters": {"best_of": 2}}, "parameters.best_of", 422),
        ({"inputs": "x", "model": "tiny", "parameters": {"adapter_id": "a"}}, "parameters.adapter_id", 422),
        (
            {"inputs": "x", "parameters": {"truncate": 2, "truncate_prompt_tokens": 3}},
            "parameters.truncate",
            422,
        ),
        ({"inputs": "x", "parameters": {"truncate": 2**40}}, "parameters.truncate", 422),
        (
            {"inputs": "x", "parameters": {"truncate_prompt_tokens": 0}},
            "parameters.truncate_prompt_tokens",
            422,
        ),
        ({"inputs": "x", "parameters": {"use_beam_search": True, "top_k": 5}}, "parameters.top_k", 422),
        (
            {"inputs": "x", "parameters": {"use_beam_search": True, "do_sample": True}},
            "parameters.do_sample",
            422,
        ),
        (
            {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": {"not": {}}}}},
            "parameters.grammar",
            422,
        ),
        (
            {
                "inputs": "x",
                "parameters": {
                    "grammar": {"type": "regex", "value": "a"},
                    "structured_outputs": {"regex": "b"},
                },
            },
            "parameters.grammar",
            422,
        ),
        ({"inputs": "x", "parameters": {"repetition_penalty": 0.0}}, "parameters.repetition_penalty", 422),
        ({"inputs": "x", "parameters": {"frequency_penalty": 3}}, "parameters.frequency_penalty", 422),
        ({"inputs": "x", "parameters": {"bad_words": [""]}}, "parameters.bad_words[0]", 422),
        ({"inputs": "x", "parameters": {"typical_p": 1.5}}, "parameters.typical_p", 422),
        ({"inputs": "x", "parameters": {"watermark": True}}, "parameters.watermark", 422),
        ({"inputs": "x", "parameters": {"penalty_alpha": 0.6}}, "parameters.penalty_alpha", 422),
        ({"inputs": "x", "parameters": {"samplers": ["xtc", "xtc"]}}, "parameters.samplers[1]", 422),
        ({"inputs": "x", "parameters": {"details": "yes"}}, "parameters.details", 422),
        ({"inputs": "x", "parameters": {"top_n_tokens": 21}}, "parameters.top_n_tokens", 422),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_bad_request_is_a_4xx_that_names_the_field(http, path, body, field, status):
    response = http.post(path, json=body)
    assert response.status_code == status
    answer = response.json()
    assert answer["error_type"] == "validation"
    assert answer["field"] == field
    assert answer["error"]
    if field is not None:
        assert field in answer["error"] or field == "inputs"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"x"', "object"),
        (b'{"inputs": "x"} trailing', "not JSON"),
        (b'{"inputs": "x", "inputs": "y"}', "twice"),
        (b'{"inputs": "x", "parameters": {"temperature": NaN}}', "NaN"),
        (b'{"inputs": "x", "parameters": {"temperature": 1e999}}', "too large"),
        (b'{"inputs": "x", "parameters": {"seed": ' + b"9" * 5000 + b"}}", "digits"),
        (b'{"inputs": "\\ud800"}', "surrogate"),
        (b'{"inputs": "\xff"}', "UTF-8"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "twice"),
        (b"{" + b",".join(b'"k%d": 1' % i for i in range(5000)) + b', "k4999": 2}', "twice"),
        (b'{"x":' * 10_000, "nested"),
    ],
)
def test_invalid_json_is_a_422_with_the_reason(http, content, words):
    response = http.post("/generate", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert words in response.json()["error"]
    assert len(response.content) < 1024


def test_a_surrogate_pair_is_a_character(http):
    response = http.post(
        "/generate",
        content=b'{"inputs": "\\ud83d\\ude00", "parameters": {"max_new_tokens": 1}}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 200


def test_a_body_over_the_limit_is_a_413(http):
    response = http.post("/generate", json={"inputs": "x" * 9_000_000})
    assert response.status_code == 413


def test_unknown_routes_and_methods_are_json_errors(http):
    assert http.get("/nowhere").status_code == 404
    wrong = http.get("/generate")
    assert wrong.status_code == 405
    assert "POST" in wrong.headers["allow"]
    assert wrong.json()["error"]


def test_an_error_for_a_long_prompt_has_both_lengths(http, tiny_server):
    answer = http.post("/generate", json={"inputs": "x " * 1000}).json()
    assert answer["code"] == "context_length_exceeded"
    assert str(tiny_server.model.max_length) in answer["error"]


def test_info_describes_the_model(http, tiny_server):
    info = http.get("/info").json()
    assert info["model_id"] == "tiny"
    assert info["max_total_tokens"] == tiny_server.model.max_length


def test_a_decoding_loop_that_ends_without_a_token_ends_the_stream(tiny_repository, tmp_path):
    """The decoder stage of a copy stops by returning, after three tokens."""
    repository = shutil.copytree(tiny_repository, tmp_path / "repository")
    (repository / "tiny_decoder" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n"
        "    async def decode(self, sequence):\n"
        "        for _ in range(3):\n"
        "            sequence.append(await sequence.sample())\n"
        "        await sequence.logits()\n"
    )
    body = {"inputs": "hello there", "parameters": {"max_new_tokens": 8, "ignore_eos": True}}
    with LiveServer(repository) as server, httpx2.Client(base_url=server.url) as client:
        last = events(client.post("/generate_stream", json=body))[-1]
    assert last["details"]["generated_tokens"] == 3
    assert last["details"]["finish_reason"] == "eos_token"
    assert last["generated_text"] is not None
