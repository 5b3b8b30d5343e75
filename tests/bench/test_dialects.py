"""Each dialect against a server that speaks it, and the events that count as text."""

from __future__ import annotations

import itertools

import pytest

from genserve.bench.answers import LoadResult
from genserve.bench.datasets import BenchPrompt
from genserve.bench.dialects import DIALECTS, Requested
from genserve.bench.endpoint import Target
from genserve.bench.load_loop import Load, run_load
from tests.support.live_server import LiveServer


@pytest.mark.parametrize("name", ["openai-chat", "openai", "tgi", "kserve-generate"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_genserve_server_answers_in_full_length(tiny_server: LiveServer, name: str, temperature: float):
    requested = Requested(model="tiny", temperature=temperature, ignore_eos=True)
    target = Target(base_url=tiny_server.url, dialect=DIALECTS[name], requested=requested)
    load = Load(
        prompts=itertools.repeat(BenchPrompt(text="people of the world", max_tokens=12)), arrivals_s=[0.0] * 4
    )
    result = LoadResult()
    run_load(load, target, result)
    assert not result.failures()
    for answer in result.complete():
        assert len(answer.text_times_s) <= 12, "a random model may answer with special tokens, without text"
        counts = (answer.output_tokens, bool(answer.prompt_tokens))
        assert counts == ((None, False) if name == "kserve-generate" else (12, True))
    assert len(result.complete()) == 4


@pytest.mark.parametrize(
    ("delta", "has_text"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"content": " tea"}, True),
        ({"reasoning_content": "hm"}, True),
        ({"reasoning": "hm"}, True),
        ({"tool_calls": [{"function": {"arguments": "{"}}]}, True),
        ({}, False),
    ],
)
def test_content_reasoning_and_tool_calls_are_text(delta: dict, has_text: bool):
    event = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    assert DIALECTS["openai-chat"].read(event).has_text == has_text


def test_continuous_usage_counts_what_has_arrived():
    event = {
        "choices": [{"text": "tea", "finish_reason": None}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
    }
    chunk = DIALECTS["openai"].read(event)
    assert (chunk.prompt_tokens, chunk.output_tokens, chunk.is_last) == (4, 2, False)


def test_the_name_of_a_model_is_quoted_in_a_path():
    url = DIALECTS["kserve-generate"].url("http://host", model="a b/c")
    assert url == "http://host/v2/models/a%20b%2Fc/generate_stream"
