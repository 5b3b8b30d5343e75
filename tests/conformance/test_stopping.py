"""What ends an answer, and how that is said: openai-python and others against a running server."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from genserve import LLM, Completion

PROMPT = "hello there"
EXTRAS = {"ignore_eos": True}  # a random model ends anywhere
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def whole(tiny_repository) -> Completion:
    """The answer of the same model in this process."""
    with LLM(model_repository=tiny_repository) as llm:
        return llm.generate(PROMPT, max_tokens=12, ignore_eos=True)


def complete(client: openai.OpenAI, *, stream: bool = False, **extras: Any) -> tuple[str, str, Any]:
    """The text, the finish reason and the stop reason of a completion."""
    answer = client.completions.create(
        **OPTIONS, prompt=PROMPT, stream=stream, extra_body=EXTRAS | extras
    )
    chunks = list(answer) if stream else [answer]
    last = chunks[-1].choices[0]
    return "".join(c.choices[0].text for c in chunks), last.finish_reason, last.model_extra["stop_reason"]


def chat(client: openai.OpenAI, *, stream: bool = False, **extras: Any) -> tuple[str, str, Any]:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(
        **OPTIONS, messages=messages, stream=stream, extra_body=EXTRAS | extras
    )
    if not stream:
        choice = answer.choices[0]
        return choice.message.content, choice.finish_reason, choice.model_extra["stop_reason"]
    chunks = list(answer)
    last = chunks[-1].choices[0]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    return text, last.finish_reason, last.model_extra["stop_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [complete, chat])
def test_the_stop_that_ended_the_text_is_named(client, ask, stream):
    text, finish_reason, stop_reason = ask(client, stream=stream)
    assert (finish_reason, stop_reason) == ("length", None)
    stop = text[4:6]
    assert ask(client, stream=stream, stop=[stop]) == (text[: text.index(stop)], "stop", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_be_included(client, whole, stream):
    stop = whole.text[4:6]
    extras = {"stop": [stop], "include_stop_str_in_output": True}
    kept = whole.text[: whole.text.index(stop) + len(stop)]
    assert complete(client, stream=stream, **extras) == (kept, "stop", stop)


def test_a_stop_token_is_named_and_its_text_may_be_included(client, whole):
    stop_id = whole.token_ids[6]
    first = whole.token_ids.index(stop_id)
    text, finish_reason, stop_reason = complete(client, stop_token_ids=[stop_id])
    assert (finish_reason, stop_reason) == ("stop", stop_id)
    kept, _, _ = complete(client, stop_token_ids=[stop_id], include_stop_str_in_output=True)
    assert whole.text.startswith(kept)
    assert len(kept) > len(text) or first == 0


def test_a_stop_string_within_min_tokens_does_not_end_the_text(client, whole):
    stop = whole.text[0]
    text, _, stop_reason = complete(client, stop=[stop], min_tokens=8)
    assert whole.text.startswith(text)
    assert len(text) > 1
    assert stop_reason in (stop, None)
    assert complete(client, stop=[stop])[0] == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [complete, chat])
def test_a_repetition_ends_the_answer(client, ask, stream):
    circling = {"logit_bias": {"270": 100}, "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    _, finish_reason, stop_reason = ask(client, stream=stream, **circling)
    assert (finish_reason, stop_reason) == ("repetition", "repetition_detected")


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_match_of_a_regex_ends_the_text(client, whole, stream):
    stop, regex = whole.text[4:6], f"(?s:.)\\x{{{ord(whole.text[5]):x}}}"
    first = whole.text.index(stop[1], 1) - 1
    assert complete(client, stream=stream, stop_regex=regex) == (whole.text[:first], "stop", regex)


def test_a_malformed_regex_is_rejected(client):
    with pytest.raises(openai.BadRequestError, match="unclosed group") as raised:
        complete(client, stop_regex="(")
    assert raised.value.param == "stop_regex"


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_may_be_included(client, tiny_server, stream):
    ids = range(tiny_server.model.tokenizer.vocab_size)
    special = next(i for i in ids if not tiny_server.model.tokenizer.decode([i]))
    name = tiny_server.model.tokenizer.decode([special], skip_special_tokens=False)
    extras = {"logit_bias": {str(special): 100}, "max_tokens": 3}
    assert complete(client, stream=stream, **extras)[0] == ""
    assert complete(client, stream=stream, **extras, skip_special_tokens=False)[0] == name * 3


def test_the_tokens_of_the_logprobs_are_those_of_the_text(client, tiny_server):
    extras = EXTRAS | {"logit_bias": {"2": 5.0}, "skip_special_tokens": False}
    choice = client.completions.create(**OPTIONS, prompt=PROMPT, logprobs=1, extra_body=extras).choices[0]
    name = tiny_server.model.tokenizer.decode([2], skip_special_tokens=False)
    assert name in choice.text
    assert "".join(choice.logprobs.tokens) == choice.text


def test_a_token_that_a_stop_holds_back_in_part_is_streamed_once(client, tiny_server):
    texts = tiny_server.model.tokenizer.token_texts()
    wanted = next(index for index, text in enumerate(texts) if len(text) > 1 and text.isascii())
    chunks = client.chat.completions.create(
        **OPTIONS,
        messages=[{"role": "user", "content": PROMPT}],
        stop=[f"{texts[wanted][-1]}\0"],
        logprobs=True,
        logit_bias={wanted: 100},
        stream=True,
    )
    found = [chunk.choices[0].logprobs for chunk in chunks]
    tokens = [entry.token for part in found if part for entry in part.content]
    assert tokens == [texts[wanted]] * 12


@pytest.mark.parametrize("ask", ["completions", "chat"])
def test_stream_interval_is_the_number_of_tokens_of_an_event(client, ask):
    """The first has one, and the last what is left; a step may bring several."""
    extras = EXTRAS | {"stream_interval": 5, "return_token_ids": True}
    if ask == "chat":
        messages = [{"role": "user", "content": PROMPT}]
        chunks = client.chat.completions.create(**OPTIONS, messages=messages, stream=True, extra_body=extras)
    else:
        chunks = client.completions.create(**OPTIONS, prompt=PROMPT, stream=True, extra_body=extras)
    counts = [len(chunk.choices[0].model_extra.get("token_ids") or ()) for chunk in chunks]
    first, *others, last = [count for count in counts if count]
    assert first == 1
    assert all(count >= 5 for count in others)
    assert first + sum(others) + last == 12


def test_max_time_ms_ends_the_answer(client):
    extras = {"max_time_ms": 1, "max_tokens": 100}
    _, finish_reason, stop_reason = complete(client, **extras)
    assert (finish_reason, stop_reason) == ("length", "deadline")


def test_tgi_reports_the_stop_in_its_details(tiny_server, whole):
    stop = whole.text[4:6]
    parameters = {"max_new_tokens": 12, "details": True, "ignore_eos": True, "stop": [stop]}
    body = httpx2.post(
        f"{tiny_server.url}/generate", json={"inputs": PROMPT, "parameters": parameters}
    ).json()
    assert body["details"]["finish_reason"] == "stop_sequence"
    assert body["details"]["stop_reason"] == stop
