"""Sampling parameters out of range, of another type, or at their extremes, in all text dialects."""

from __future__ import annotations

import json
import re

import pytest

from tests.faults.text_dialects import HTTP_CHATS, HTTP_PROMPTS, completions, grpc, kserve

MESSAGES = [{"role": "user", "content": "hello"}]
# Dialects that do not have the parameter, or have another rule for it, are left out.
OWN_RULES = {
    "max_tokens": {"ollama_generate", "ollama_chat", "messages_api"},
    "seed": set(),
    "top_logprobs": {"completions", "ollama_generate", "messages_api", "ollama_chat"},
    "truncate_prompt_tokens": {"responses"},
    # Each of them starts a process that compiles the grammar.
    "structured_outputs": {"tgi", "ollama_generate", "messages_api", "responses", "ollama_chat", "gemini"},
}
# By the name of the parameter: values that are rejected, and what their errors say.
REJECTED = {
    "temperature": ([-0.1, 100.5, "0.7", True], r"temperature"),
    "top_p": ([-0.1, 1.01, -1, "1", [1]], r"top_p"),
    "top_k": ([-2, 2**31, 1.5, "3"], r"top_k"),
    "min_p": ([1.5, -0.1], r"min_p"),
    "typical_p": ([0, 2], r"typical_p"),
    "max_tokens": ([-1, 1.5, "8"], r"max_\w*tokens"),
    "min_tokens": ([-1, 2**31], r"min_tokens"),
    "stop": (["", [""], [None], ["a"] * 65, ["a" * 257], 5], r"stop"),
    "stop_token_ids": ([[-1], [320], [2**40], ["1"], [1.5], [1] * 257], r"stop_token_ids"),
    "logit_bias": (
        [
            {"a": 1}, {"-1": 1}, {"320": 1}, {"1": 1, "01": 2}, {"1": 101}, {"1": "x"}, {"1.5": 1}, [1],
            {str(token_id): 1 for token_id in range(1025)},
        ],
        r"logit_bias",
    ),
    "repetition_penalty": ([0, -1, 1e30, 1e-30], r"repe\w+_penalty"),
    "presence_penalty": ([2.1, -2.1], r"presence_penalty"),
    "frequency_penalty": ([2.1, -2.1], r"frequency_penalty"),
    "seed": ([2**64, -(2**63) - 1, 1.5, "x"], r"seed"),
    "top_logprobs": ([21, -1], r"logprobs|top_n_tokens"),
    "allowed_token_ids": ([[], [320], [-1]], r"allowed_token_ids"),
    "bad_words": ([[""], ["a"] * 257, ["a" * 257]], r"bad_words"),
    "no_repeat_ngram_size": ([-1, 0.5], r"no_repeat_ngram_size"),
    "stop_regex": (["(", ["a"] * 5, "a" * 513], r"stop_regex"),
    "structured_outputs": (
        [
            {}, {"regex": "("}, {"json": "{"}, {"json": {"type": "nonsense"}}, {"choice": []},
            {"grammar": "start: ("}, {"grammar": "root ::= ("}, {"json_object": True, "regex": "a"},
        ],
        r"structured_outputs",
    ),
    "guided_json": ([{"type": "object"}], r"guided_json"),
    "cache_salt": (["", "x" * 257], r"cache_salt"),
    "priority": ([2**31, -(2**31) - 1], r"priority"),
    "truncate_prompt_tokens": ([0, -2], r"truncate"),
    "max_time_ms": ([0, -1, 2**31], r"max_time_ms"),
    "penalty_alpha": ([0.6], r"penalty_alpha"),
    "use_beam_search": (["yes", 1], r"use_beam_search"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_a_value_out_of_range_is_rejected_by_its_name(server, name):
    values, words = REJECTED[name]
    for value in values:
        for ask in (*HTTP_PROMPTS, *HTTP_CHATS):
            if ask.__name__ in OWN_RULES.get(name, ()):
                continue
            prompt = "hello" if ask in HTTP_PROMPTS else MESSAGES
            answer = ask(server, prompt, {"max_tokens": 2, name: value})
            assert answer.error, (ask.__name__, value)
            assert answer.is_clients_fault, (ask.__name__, value, answer.error)
            assert re.search(words, answer.error), (ask.__name__, value, answer.error)
            assert len(answer.error) < 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.5), ("top_p", 2.0), ("top_k", -2), ("max_tokens", 0),
     ("repetition_penalty", 0.0), ("stop", ["a"] * 65)],
)  # fmt: skip
def test_a_tensor_out_of_range_is_rejected_by_its_name(server, name, value):
    http, stream = (ask(server, "hello", {"max_tokens": 2, name: value}) for ask in (kserve, grpc))
    assert http.is_clients_fault
    assert name in http.error
    assert stream.error == http.error


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["temperature", "logit_bias", "unknown"])
def test_a_number_that_is_none_is_rejected(server, text, name):
    value = f'{{"1": {text}}}' if name == "logit_bias" else text
    body = f'{{"prompt": "hello", "max_tokens": 1, "{name}": {value}}}'.encode()
    response = server.post("/v1/completions", body)
    assert response.status == 400


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-4, "seed": 1},
        {"temperature": 1e-8, "seed": 1},
        {"temperature": 5e-324, "seed": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 100.0, "min_p": 1.0},
        {"temperature": 0, "top_k": 7, "seed": 3},
    ],
    ids=str,
)
def test_an_extreme_draw_is_greedy(server, params):
    greedy = completions(server, "hello there", {"max_tokens": 8, "temperature": 0})
    assert completions(server, "hello there", {"max_tokens": 8, **params}) == greedy


@pytest.mark.parametrize("name", ["top_k", "min_p", "typical_p"])
def test_the_end_of_a_range_turns_a_cut_off(server, name):
    params = {"max_tokens": 8, "temperature": 0.9, "seed": 5}
    off = {"top_k": [0, -1, 320, 321, 2**31 - 1], "min_p": [0], "typical_p": [1]}[name]
    whole = completions(server, "hello there", params)
    assert [completions(server, "hello there", params | {name: value}) for value in off] == [whole] * len(off)


def test_a_bias_against_every_token_changes_nothing(server):
    params = {"max_tokens": 8, "temperature": 0}
    against = {"logit_bias": {str(token_id): -100 for token_id in range(320)}}
    text = completions(server, "hello there", params).text
    assert completions(server, "hello there", params | against).text == text


def test_null_is_the_same_as_no_value(server):
    names = [name for name in REJECTED if name not in ("guided_json", "max_tokens")]
    for ask in (*HTTP_PROMPTS, *HTTP_CHATS):
        prompt = "hello" if ask in HTTP_PROMPTS else MESSAGES
        params = {"max_tokens": 4, "temperature": 0}
        without = ask(server, prompt, params)
        nulls = dict.fromkeys([name for name in names if name not in OWN_RULES.get(ask.__name__, ())])
        if ask.__name__ == "tgi":
            nulls = {name: None for name in nulls if name not in ("logit_bias", "top_logprobs")}
        assert ask(server, prompt, nulls | params) == without


def test_tokens_that_can_end_no_earlier_are_all_there(server):
    params = {"max_tokens": 30, "min_tokens": 30, "temperature": 0}
    assert completions(server, "hello there", params).usage == (8, 30)


def test_sixteen_long_stop_strings_change_no_other_text(server):
    params = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    stops = {"stop": [f"{number}" * 85 for number in range(100, 116)]}
    assert completions(server, "a", params | stops) == completions(server, "a", params)


ONE_TOKEN = {"a-letter": "z", "half-a-character": "\N{GRINNING FACE}", "nothing": "<|im_start|>"}


@pytest.mark.parametrize("kind", ONE_TOKEN)
@pytest.mark.parametrize("num_prompt", [100, 236], ids=["max-tokens", "context"])
def test_an_answer_of_one_token_over_and_over_comes_to_its_end(server, kind, num_prompt):
    count, prompt = 20, [5] * num_prompt
    token = server.post("/tokenize", {"prompt": ONE_TOKEN[kind]}).json()["tokens"][0]
    text = server.post("/detokenize", {"tokens": [token] * count}).json()["prompt"]
    params = {"max_tokens": count, "allowed_token_ids": [token], "ignore_eos": True}
    answer = completions(server, prompt, params)
    assert (answer.usage, answer.finish) == ((num_prompt, count), "length")
    assert answer.text == ("" if kind == "nothing" else text)
    body = {"prompt": prompt, "stream": True, **params}
    *events, done = server.post("/v1/completions", body).body.decode().split("\n\n")[:-1]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert done == "data: [DONE]"
    assert "".join(choice["text"] for choice in choices) == answer.text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
