"""How much of a prompt was read, and how long an answer took: in each dialect, by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest
from google import genai
from google.genai import types
from huggingface_hub import TextGenerationStreamOutput

from genserve.client import Client
from genserve.completion import PromptProgress, Timings, Usage
from genserve.llm import LLM
from genserve.server.dialects.timings import timings_fields
from tests.support.live_server import LiveServer

LONG = "a long prompt " * 12
CHAT = [{"role": "user", "content": LONG}]
STEP = 32       # tokens of a prompt that a step reads
_salts = count()


@pytest.fixture(scope="module")
def server(tiny_repository: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_repository) as live:
        live.model.engine._engine._scheduler.max_num_batched_tokens = STEP
        yield live


def fresh(**fields: Any) -> dict[str, Any]:
    """A request of which nothing is cached."""
    return {"return_progress": True, "cache_salt": f"salt{next(_salts)}", **fields}


def assert_read(reported: list[dict[str, int]]) -> None:
    total = reported[0]["total"]
    assert total > 2 * STEP
    read = [one["processed"] for one in reported]
    assert read == [*range(STEP, total, STEP), total]
    assert {(one["total"], one["cache"]) for one in reported} == {(total, 0)}
    assert all(one["time_ms"] >= 0 for one in reported)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_chats_report_the_progress_of_their_prompts(client):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 4}
    chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=fresh()))
    reported = [chunk.prompt_progress for chunk in chunks if "prompt_progress" in chunk.model_extra]
    assert_read(reported)
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.content is None for chunk in chunks[1 : 1 + len(reported)])
    with client.chat.completions.stream(**asked, extra_body=fresh()) as stream:
        assert "content.delta" in [event.type for event in stream if stream.current_completion_snapshot]
        assert stream.current_completion_snapshot.choices[0].message.role == "assistant"
    cached = fresh()
    for expected in (0, 1):
        chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=cached))
        [*_, last] = [chunk.prompt_progress for chunk in chunks if "prompt_progress" in chunk.model_extra]
        assert (last["cache"] > 0) == expected


def test_completions_report_the_progress_of_each_prompt(client):
    prompts = [LONG, f"other {LONG}"]
    chunks = list(
        client.completions.create(model="tiny", prompt=prompts, n=2, stream=True, extra_body=fresh())
    )
    for index in (0, 2):
        of_choice = [chunk for chunk in chunks if chunk.choices[0].index == index]
        reported = [chunk.prompt_progress for chunk in of_choice if "prompt_progress" in chunk.model_extra]
        assert reported[-1]["processed"] == reported[-1]["total"]
        assert reported == sorted(reported, key=lambda one: one["processed"])
    assert not any("prompt_progress" in chunk.model_extra for chunk in chunks if chunk.choices[0].index % 2)


def test_responses_report_progress_in_keepalive_events(client):
    asked = {"model": "tiny", "input": LONG, "max_output_tokens": 16}
    events = list(client.responses.create(**asked, stream=True, extra_body=fresh()))
    assert [event.type for event in events[:3]] == ["response.created", "response.in_progress", "keepalive"]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert_read([event.prompt_progress for event in events if event.type == "keepalive"])
    with client.responses.stream(**asked, extra_body=fresh(ignore_eos=True)) as stream:
        [*_, last] = stream
    assert last.type == "response.incomplete"
    assert last.response.timings["predicted_n"] == last.response.usage.output_tokens == 16


def test_messages_report_progress_in_pings(server):
    import anthropic

    asked = {"model": "tiny", "max_tokens": 8, "messages": CHAT}
    events = events_of(httpx2.post(f"{server.url}/v1/messages", json=fresh(**asked, stream=True)).text)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert_read([event["prompt_progress"] for event in events if event["type"] == "ping"])
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none") as client,
        client.messages.stream(**asked, extra_body=fresh(ignore_eos=True)) as stream,
    ):
        assert stream.get_final_message().usage.output_tokens == 8
    whole = httpx2.post(f"{server.url}/v1/messages", json=fresh(**asked)).json()
    assert whole["timings"].keys() == events[-2]["timings"].keys()


def test_ollamas_client_reads_lines_with_progress_and_durations(server):
    options = fresh(num_predict=4, ignore_eos=True)
    asked = {"model": "tiny", "messages": CHAT, "stream": True, "options": options}
    text = httpx2.post(f"{server.url}/api/chat", json=asked).text
    lines = [json.loads(line) for line in text.splitlines()]
    reported = [line["prompt_progress"] for line in lines if "prompt_progress" in line]
    assert_read(reported)
    assert all(line["message"]["content"] == "" for line in lines[: len(reported)])
    with ollama.Client(server.url) as client:
        [*_, last] = client.chat(**asked | {"options": fresh(num_predict=4, ignore_eos=True)})
    assert last.done
    parts = (last.load_duration, last.prompt_eval_duration, last.eval_duration)
    assert all(part >= 0 for part in parts)
    assert 0 < sum(parts) <= last.total_duration


def test_tgis_client_leaves_progress_out_of_the_text(server):
    parameters = fresh(max_new_tokens=4, ignore_eos=True)
    body = {"inputs": LONG, "parameters": parameters}
    events = events_of(httpx2.post(f"{server.url}/generate_stream", json=body).text)
    reported = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert_read(reported)
    assert events[-1]["details"]["timings"]["predicted_n"] == 4
    tokens = [TextGenerationStreamOutput.parse_obj_as_instance(event).token for event in events]
    assert [(token.text, token.special) for token in tokens[: len(reported)]] == [("", True)] * len(reported)
    headers = httpx2.post(f"{server.url}/generate", json=body).headers
    assert {"x-queue-time", "x-inference-time", "x-time-per-token"} <= headers.keys()


def test_geminis_client_reads_parts_with_progress(server):
    options = types.HttpOptions(
        base_url=server.url,
        api_version="v1beta",
        extra_body={"generationConfig": {"returnProgress": True, "cacheSalt": f"salt{next(_salts)}"}},
    )
    config = types.GenerateContentConfig(max_output_tokens=4)
    with genai.Client(api_key="none", http_options=options) as client:
        chunks = list(client.models.generate_content_stream(model="tiny", contents=LONG, config=config))
    assert chunks[0].text is None
    assert chunks[-1].usage_metadata.total_token_count > 0
    url = f"{server.url}/v1beta/models/tiny:streamGenerateContent?alt=sse"
    asked = {"return_progress": True, "maxOutputTokens": 4}
    body = {"contents": [{"parts": [{"text": LONG}]}], "generationConfig": asked}
    events = events_of(httpx2.post(url, json=body).text)
    assert events[0]["promptProgress"]["total"] > 0
    assert "timings" in events[-1]


def test_the_sdk_reports_progress(server, tiny_repository):
    with Client(server.url) as client, LLM("tiny", model_repository=tiny_repository) as llm:
        for source in (client, llm):
            deltas = list(
                source.chat_stream(LONG, return_progress=True, max_tokens=4, cache_salt=f"{next(_salts)}")
            )
            progress = [delta for delta in deltas if isinstance(delta, PromptProgress)]
            assert deltas[: len(progress)] == progress
            assert progress[-1].read_tokens == progress[-1].prompt_tokens == deltas[-1].usage.prompt_tokens
            assert isinstance(deltas[-1].usage.timings, Timings)
            assert not any(isinstance(delta, PromptProgress) for delta in source.chat_stream(LONG))
        assert isinstance(client.chat(LONG, max_tokens=4).usage.timings, Timings)


def test_an_answer_tells_where_its_prompt_left_the_cache_on_request(
    server, client, tiny_repository, monkeypatch
):
    def asked(question: str, **fields: Any) -> dict[str, Any]:
        body = {"return_cache_match": True, "cache_salt": "match", **fields}
        messages = [{"role": "user", "content": f"{LONG} {question}"}]
        return {"model": "tiny", "messages": messages, "max_tokens": 2, "extra_body": body}

    def parts(match: dict[str, Any]) -> tuple[str, str, str]:
        return match["end"], match["prompt"]["text"][:4], match["cached"]["text"][:4]

    create = client.chat.completions.create
    assert create(**asked("one")).cache_match["end"] == "unknown"
    whole = create(**asked("two"))
    assert parts(whole.cache_match) == ("different", "two<", "one<")
    assert whole.timings["cache_n"] <= whole.cache_match["matched_n"] < whole.usage.prompt_tokens
    for options in ({}, {"include_usage": True}):
        *_, last = create(**asked(f"s{len(options)}"), stream=True, stream_options=options)
        assert last.cache_match["end"] == "different"
    assert "cache_match" not in create(**asked("two", return_cache_match=False)).model_extra
    monkeypatch.setattr(server.server.services, "is_local", False)
    hidden = create(**asked("three")).cache_match
    assert ("prompt" in hidden, "cached" in hidden) == (True, False)
    monkeypatch.undo()
    with Client(server.url) as remote, LLM("tiny", model_repository=tiny_repository) as llm:
        for source in (remote, llm):
            options = {"max_tokens": 2, "cache_salt": "sdk", "return_cache_match": True}
            source.chat(LONG, **options)
            *_, last = source.chat_stream(f"{LONG}!", **options)
            match = last.usage.cache_match
            assert match.end == "different"
            assert source.detokenize(match.prompt_token_ids).startswith("!")
            assert match.cached_token_ids


def test_the_last_chunk_has_the_timings(client):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "n": 2, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**asked)
    without_usage = list(client.chat.completions.create(**asked, stream=True))
    options = {"include_usage": True}
    with_usage = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    for answer in (whole, without_usage[-1], with_usage[-1]):
        assert answer.timings["predicted_n"] == 8
        assert answer.timings["cache_n"] + answer.timings["prompt_n"] == whole.usage.prompt_tokens
    assert not any("timings" in chunk.model_extra for chunk in [*without_usage[:-1], *with_usage[:-1]])


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_each_chunk_has_the_timings_on_request(client, options):
    body = {"timings_per_token": True, "ignore_eos": True}
    chunks = list(
        client.completions.create(
            model="tiny", prompt=LONG, max_tokens=4, stream=True, stream_options=options, extra_body=body
        )
    )
    timed = [chunk.timings for chunk in chunks]
    assert timed[-1]["predicted_n"] == 4
    counts = [one["predicted_n"] for one in timed]
    assert counts == sorted(counts)


def test_the_timings_of_several_answers_are_one_object():
    def usage(prompt: int, new: int, cached: int, **timings: Any) -> Usage:
        made = Timings(**{"queue_s": 0.001, "prefill_s": 0.5, "decode_s": 1.0, **timings})
        return Usage(prompt_tokens=prompt, completion_tokens=new, cached_tokens=cached, timings=made)

    one = timings_fields([usage(110, 11, 10, drafted_tokens=6, accepted_tokens=4)])["timings"]
    assert one == {
        "queue_ms": 1.0,
        "cache_n": 10,
        "prompt_n": 100,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 5.0,
        "prompt_per_second": 200.0,
        "predicted_n": 11,
        "predicted_ms": 1000.0,
        "predicted_per_token_ms": 100.0,
        "predicted_per_second": 10.0,
        "draft_n": 6,
        "draft_n_accepted": 4,
    }
    two = timings_fields([usage(110, 11, 10), usage(110, 11, 90, decode_s=2.0)], num_drawn=2)["timings"]
    assert (two["prompt_n"], two["predicted_n"], two["predicted_per_second"]) == (100, 22, 10.0)
    assert "draft_n" not in two
    single = timings_fields([usage(110, 1, 10, decode_s=0.0)])["timings"]
    assert (single["predicted_per_token_ms"], single["predicted_per_second"]) == (0.0, 0.0)
    assert timings_fields([usage(1, 1, 0), Usage(prompt_tokens=1, completion_tokens=1)]) == {}
