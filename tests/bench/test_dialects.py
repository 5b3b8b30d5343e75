"""Each dialect against a server that speaks it, and the events that count as text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from genserve.bench.answers import LoadResult
from genserve.bench.datasets import BenchPrompt, read_dataset
from genserve.bench.dialects import DIALECTS, Requested
from genserve.bench.load_generator import Load, Target, run_load
from tests.support.live_server import LiveServer

PROMPT = BenchPrompt(text="people of the world", max_tokens=12)


def measured(
    server: LiveServer,
    dialect: str,
    prompts: list[BenchPrompt],
    *,
    model: str = "tiny",
    temperature: float = 0.0,
) -> LoadResult:
    requested = Requested(model=model, temperature=temperature, ignore_eos=True)
    target = Target(base_url=server.url, dialect=DIALECTS[dialect], requested=requested)
    result = LoadResult()
    run_load(Load(prompts=itertools.cycle(prompts), arrivals_s=[0.0] * 4), target, result)
    return result


@pytest.mark.parametrize("name", ["openai-chat", "openai", "tgi", "kserve-generate"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_genserve_server_answers_in_full_length(tiny_server: LiveServer, name: str, temperature: float):
    result = measured(tiny_server, name, [PROMPT], temperature=temperature)
    assert not result.failures()
    for answer in result.complete():
        assert len(answer.text_times_s) <= 12, "a random model may answer with special tokens, without text"
        counts = (answer.output_tokens, bool(answer.prompt_tokens))
        assert counts == ((None, False) if name == "kserve-generate" else (12, True))
    assert len(result.complete()) == 4


def test_any_model_of_a_kserve_server_can_be_measured(tiny_server: LiveServer, tmp_path: Path) -> None:
    """The body of infer comes from a file; here, a plain call of the logits stage."""
    ids = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [5, 6, 7]}
    path = tmp_path / "bodies.jsonl"
    path.write_text(json.dumps({"inputs": [ids]}))
    result = measured(tiny_server, "kserve-infer", read_dataset(path, output_len=None), model="tiny_logits")
    assert len(result.complete()) == 4, result.failures()
    for answer in result.complete():
        assert answer.latency_s > 0
        assert (answer.num_tokens, answer.first_text_s, answer.prompt_tokens) == (0, None, None)


def test_a_text_model_is_asked_by_infer_as_by_triton(tiny_server: LiveServer) -> None:
    result = measured(tiny_server, "kserve-infer", [PROMPT])
    assert {failure.message for failure in result.failures()} == {
        "HTTP end point doesn't support models with decoupled transaction policy"
    }


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
