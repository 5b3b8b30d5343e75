"""Both clients against a real socket; each test covers both."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from genserve.client import AsyncClient, AsyncStream, Client, Stream
from genserve.completion import Completion, Delta, FinishReason, Usage
from genserve.errors import (
    Closed,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    StreamBroken,
    Unreachable,
)
from genserve.prompt import Message
from tests.client.either_client import BlockingClient
from tests.client.scripted_server import PATIENCE_S, Reply, ScriptedServer, event_reply, json_reply, scripted


@pytest.fixture(params=[Client, BlockingClient], ids=["sync", "async"])
def make_client(request: pytest.FixtureRequest) -> Any:
    return request.param


def token(token_id: int, text: str, *, special: bool = False) -> dict[str, Any]:
    return {"id": token_id, "text": text, "logprob": -0.5, "special": special}


def tgi_event(index: int, tok: object, whole: str | None = None, **details: Any) -> dict[str, Any]:
    return {"index": index, "token": tok, "generated_text": whole, "details": details or None}


TGI_REPLY = json_reply(
    {
        "generated_text": " is here",
        "details": {
            "finish_reason": "length", "generated_tokens": 2, "seed": None, "prefill": [],
            "tokens": [token(318, " is"), token(994, " here")],
        },
    },
    headers={"x-prompt-tokens": "5"},
)
TGI_EVENTS = (
    tgi_event(1, token(318, " is")),
    tgi_event(2, token(994, " here")),
    tgi_event(3, token(0, "</s>", special=True), " is here", finish_reason="eos_token", generated_tokens=3,
              input_length=5, seed=None),
)
CHAT_REPLY = json_reply(
    {
        "id": "chatcmpl-1", "object": "chat.completion", "model": "smollm2",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Hi!"}, "finish_reason": "stop",
             "stop_reason": None, "token_ids": [7, 8], "logprobs": None}
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
    }
)


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **extra}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": None}


CHAT_USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}}
CHAT_EVENTS = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Hi"}, token_ids=[7]),
    chunk({"content": "!"}, token_ids=[8]),
    chunk({}, "stop", stop_reason=None),
    CHAT_USAGE,
    "[DONE]",
)


@contextmanager
def talk(make_client: Any, *replies: Reply, **options: Any) -> Iterator[tuple[Any, ScriptedServer]]:
    with scripted(*replies) as server, make_client(server.url, **options) as client:
        yield client, server


def test_generate_reads_the_whole_answer(make_client: Any) -> None:
    with talk(make_client, TGI_REPLY) as (client, _):
        assert client.generate("Tea") == Completion(
            text=" is here",
            token_ids=(318, 994),
            finish_reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=5, completion_tokens=2),
        )


def test_generate_sends_tgis_body_without_disabled_parameters(make_client: Any) -> None:
    with talk(make_client, TGI_REPLY) as (client, server):
        client.generate("Tea")
    assert server.received[0].line == "POST /generate HTTP/1.1"
    assert server.received[0].body == {"inputs": "Tea", "parameters": {"details": True, "do_sample": False}}


def test_every_option_has_its_name_in_tgis_dialect(make_client: Any) -> None:
    with talk(make_client, TGI_REPLY) as (client, server):
        client.generate(
            "Tea", model="m", max_tokens=3, temperature=0.5, top_k=4, top_p=0.9, stop="END",
            stop_token_ids=[2], ignore_eos=True, seed=0, logprobs=True,
        )
    assert server.received[0].body == {
        "inputs": "Tea",
        "model": "m",
        "parameters": {
            "details": True, "do_sample": True, "max_new_tokens": 3, "temperature": 0.5, "top_k": 4,
            "top_p": 0.9, "stop": ["END"], "stop_token_ids": [2], "ignore_eos": True, "seed": 0,
        },
    }


def test_greedy_decoding_sends_no_parameter_that_makes_tgi_sample(make_client: Any) -> None:
    with talk(make_client, TGI_REPLY) as (client, server):
        client.generate("Tea", temperature=0, top_k=4, top_p=0.5)
    assert server.received[0].body["parameters"] == {"details": True, "do_sample": False}


def test_every_option_has_its_name_in_openais_dialect(make_client: Any) -> None:
    with talk(make_client, CHAT_REPLY) as (client, server):
        client.chat(
            [Message(role="system", content="Be brief."), {"role": "user", "content": "Hi"}],
            model="m", max_tokens=3, temperature=0.5, top_k=4, top_p=0.9, stop=["END", "."],
            stop_token_ids=[2], ignore_eos=True, seed=0, logprobs=True,
        )
    assert server.received[0].line == "POST /v1/chat/completions HTTP/1.1"
    assert server.received[0].body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "stop": ["END", "."],
        "stop_token_ids": [2], "ignore_eos": True, "seed": 0, "logprobs": True, "return_token_ids": True,
        "separate_reasoning": False,
    }


def test_a_chat_always_sends_its_temperature(make_client: Any) -> None:
    with talk(make_client, CHAT_REPLY) as (client, server):
        client.chat("Hi")
    assert server.received[0].body["temperature"] == 0


def test_chat_reads_the_whole_answer(make_client: Any) -> None:
    with talk(make_client, CHAT_REPLY) as (client, _):
        assert client.chat("Hi") == Completion(
            text="Hi!",
            token_ids=(7, 8),
            finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=9, completion_tokens=2),
        )


def test_the_last_delta_of_a_stream_has_finish_reason_and_usage(make_client: Any) -> None:
    with talk(make_client, event_reply(*TGI_EVENTS)) as (client, server):
        deltas = list(client.stream("Tea"))
    assert server.received[0].line == "POST /generate_stream HTTP/1.1"
    assert deltas == [
        Delta(text=" is", token_ids=(318,)),
        Delta(text=" here", token_ids=(994,)),
        Delta(
            text="",
            token_ids=(0,),
            finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=5, completion_tokens=3),
        ),
    ]


def test_text_held_back_until_the_last_event_is_not_lost(make_client: Any) -> None:
    last = tgi_event(2, token(994, ""), "a b", finish_reason="length", generated_tokens=2, input_length=1)
    with talk(make_client, event_reply(tgi_event(1, token(1, "a")), last)) as (client, _):
        assert list(client.stream("Tea").text_stream) == ["a", " b"]


def test_the_last_delta_of_a_chat_stream_has_finish_reason_and_usage(make_client: Any) -> None:
    with talk(make_client, event_reply(*CHAT_EVENTS)) as (client, server):
        deltas = list(client.chat_stream("Hi"))
    body = server.received[0].body
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert deltas == [
        Delta(text="Hi", token_ids=(7,)),
        Delta(text="!", token_ids=(8,)),
        Delta(
            text="",
            token_ids=(),
            finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=9, completion_tokens=2),
        ),
    ]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("length", None, FinishReason.LENGTH),
        ("stop", None, FinishReason.STOP),
        ("stop", 2, FinishReason.STOP),
        ("stop", "END", FinishReason.STOP),
    ],
)
def test_a_chat_distinguishes_a_stop_string_from_the_end_of_sequence(
    make_client: Any, finish_reason: str, stop_reason: object, expected: FinishReason
) -> None:
    end = chunk({}, finish_reason, stop_reason=stop_reason)
    events = (chunk({"content": "Hi"}), end, CHAT_USAGE, "[DONE]")
    with talk(make_client, event_reply(*events)) as (client, _):
        answer = client.chat_stream("Hi").final()
        assert (answer.finish_reason, answer.stop_reason) == (expected, stop_reason)


def test_logprobs_are_read_if_requested_and_null_is_nan(make_client: Any) -> None:
    content = {"content": [{"token": "Hi", "logprob": -0.25}, {"token": "!", "logprob": None}]}
    events = (chunk({"content": "Hi!"}, token_ids=[7, 8], logprobs=content), chunk({}, "length"), CHAT_USAGE)
    with talk(make_client, event_reply(*TGI_EVENTS), event_reply(*events)) as (client, _):
        assert client.stream("Tea", logprobs=True).final().logprobs == (-0.5, -0.5, -0.5)
        first, second = client.chat_stream("Hi", logprobs=True).final().logprobs
    assert first == -0.25
    assert second != second


def test_final_returns_the_whole_answer_after_a_part_was_read(make_client: Any) -> None:
    with talk(make_client, event_reply(*TGI_EVENTS)) as (client, _), client.stream("Tea") as stream:
        assert next(stream).text == " is"
        assert stream.final().text == " is here"


def test_models_are_listed(make_client: Any) -> None:
    reply = json_reply({"object": "list", "data": [{"id": "a"}, {"id": "b"}]})
    with talk(make_client, reply) as (client, server):
        assert client.models() == ["a", "b"]
    assert server.received[0].line == "GET /v1/models HTTP/1.1"


def test_every_request_has_the_key(make_client: Any) -> None:
    with talk(make_client, TGI_REPLY, event_reply(*CHAT_EVENTS), api_key="secret") as (client, server):
        client.generate("Tea")
        client.chat_stream("Hi").final()
    assert [r.headers["authorization"] for r in server.received] == ["Bearer secret", "Bearer secret"]


def test_a_misspelt_option_is_rejected_before_the_request(make_client: Any) -> None:
    with talk(make_client) as (client, server):
        with pytest.raises(InvalidRequest, match="temperature") as caught:
            client.generate("Tea", temprature=1)
        assert caught.value.field == "temprature"
        assert server.received == []


def test_a_rejected_stream_raises_at_the_call(make_client: Any) -> None:
    body = {"error": "no such model", "code": "model_not_found", "remedy": "a, b"}
    rejection = json_reply(body, status=404)
    with talk(make_client, rejection) as (client, _), pytest.raises(ModelNotFound) as caught:
        client.stream("Tea", model="m")
    assert caught.value.remedy == "a, b"


def test_a_request_to_a_server_that_is_not_ready_is_retried(make_client: Any) -> None:
    loading = json_reply({"error": "loading", "code": "model_not_ready"}, status=503)
    with talk(make_client, loading, TGI_REPLY) as (client, server):
        assert client.generate("Tea").text == " is here"
    assert len(server.received) == 2


def test_a_connection_closed_without_an_answer_is_retried(make_client: Any) -> None:
    with talk(make_client, Reply(no_answer=True), event_reply(*TGI_EVENTS)) as (client, _):
        assert client.stream("Tea").final().text == " is here"


def test_after_two_retries_the_last_error_is_raised(make_client: Any) -> None:
    loading = json_reply({"error": "loading", "code": "model_not_ready"}, status=503)
    with talk(make_client, loading, loading, loading) as (client, server), pytest.raises(ModelNotReady):
        client.generate("Tea")
    assert len(server.received) == 3


def test_an_overload_has_the_retry_after_of_the_reply(make_client: Any) -> None:
    full = json_reply({"error": "full", "error_type": "overloaded"}, status=429, headers={"retry-after": "9"})
    with talk(make_client, full, max_retries=0) as (client, _), pytest.raises(Overloaded) as caught:
        client.generate("Tea")
    assert caught.value.retry_after_s == 9


def test_a_failed_model_is_not_retried(make_client: Any) -> None:
    failed = json_reply({"error": "nan", "error_type": "generation"}, status=424)
    with talk(make_client, failed) as (client, server), pytest.raises(ModelFailed):
        client.generate("Tea")
    assert len(server.received) == 1


def test_without_a_server_the_remedy_is_to_start_one(make_client: Any) -> None:
    with scripted() as server:
        url = server.url
    with make_client(url, max_retries=0) as client, pytest.raises(Unreachable) as caught:
        client.stream("Tea")
    assert url in caught.value.message
    assert "genserve serve" in caught.value.remedy


def test_a_timeout_is_unreachable(make_client: Any) -> None:
    with (
        talk(make_client, Reply(stays_open=True), timeout_s=0.05) as (client, server),
        pytest.raises(Unreachable),
    ):
        client.generate("Tea")
    assert len(server.received) == 1


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"generated_text": "a"}', b"null"])
def test_a_reply_of_another_shape_is_unreachable(make_client: Any, body: bytes) -> None:
    with (
        talk(make_client, Reply(body=body, headers={"x-prompt-tokens": "1"})) as (client, _),
        pytest.raises(Unreachable, match="genserve"),
    ):
        client.generate("Tea")


@pytest.mark.parametrize(
    "reply", [event_reply(*TGI_EVENTS[:2]), event_reply(*TGI_EVENTS[:2], is_cut=True)], ids=["ended", "cut"]
)
def test_a_stream_without_its_last_event_is_broken_after_its_deltas(make_client: Any, reply: Reply) -> None:
    with talk(make_client, reply) as (client, server), client.stream("Tea") as stream:
        assert [next(stream).text, next(stream).text] == [" is", " here"]
        with pytest.raises(StreamBroken):
            next(stream)
        with pytest.raises(StreamBroken):
            stream.final()
    assert len(server.received) == 1


def test_a_chat_stream_without_its_usage_is_broken(make_client: Any) -> None:
    with (
        talk(make_client, event_reply(*CHAT_EVENTS[:4], "[DONE]")) as (client, _),
        pytest.raises(StreamBroken),
    ):
        client.chat_stream("Hi").final()


@pytest.mark.parametrize(
    ("method", "event"),
    [
        ("stream", {"error": "nan", "error_type": "generation", "code": "model_failed"}),
        ("chat_stream", {"error": {"message": "nan", "type": "server_error", "code": "model_failed"}}),
    ],
)
def test_an_error_within_a_stream_is_raised_after_its_deltas(
    make_client: Any, method: str, event: dict[str, Any]
) -> None:
    first = TGI_EVENTS[0] if method == "stream" else CHAT_EVENTS[1]
    with (
        talk(make_client, event_reply(first, event, "[DONE]")) as (client, _),
        getattr(client, method)("Hi") as stream,
    ):
        assert next(stream).token_ids
        with pytest.raises(ModelFailed, match="nan"):
            next(stream)


def test_closing_a_stream_early_disconnects(make_client: Any) -> None:
    with talk(make_client, event_reply(TGI_EVENTS[0], stays_open=True)) as (client, server):
        stream = client.stream("Tea")
        next(stream)
        stream.close()
        stream.close()
        assert server.client_left.wait(PATIENCE_S)
        assert list(stream) == []


def test_leaving_the_block_of_an_unread_stream_disconnects(make_client: Any) -> None:
    with talk(make_client, event_reply(stays_open=True)) as (client, server):
        with client.stream("Tea"):
            pass
        assert server.client_left.wait(PATIENCE_S)


@pytest.mark.parametrize("num_read", [0, 1])
def test_garbage_collection_of_a_stream_disconnects(make_client: Any, num_read: int) -> None:
    with talk(make_client, event_reply(TGI_EVENTS[0], stays_open=True)) as (client, server):
        stream = client.stream("Tea")
        for _ in range(num_read):
            next(stream)
        del stream
        gc.collect()
        if isinstance(client, BlockingClient):
            client.collect_garbage()
        assert server.client_left.wait(PATIENCE_S)


def test_a_closed_client_raises_closed(make_client: Any) -> None:
    with scripted() as server, make_client(server.url) as client:
        client.close()
        client.close()
        with pytest.raises(Closed):
            client.generate("Tea")
        with pytest.raises(Closed), client:
            pass


def test_a_stream_of_a_closed_client_raises_closed(make_client: Any) -> None:
    with scripted(event_reply(TGI_EVENTS[0], stays_open=True)) as server, make_client(server.url) as client:
        stream = client.stream("Tea")
        next(stream)
        client.close()
        with pytest.raises(Closed):
            next(stream)


def test_a_client_with_another_transport_raises_closed_too() -> None:
    with scripted() as server, httpx2.Client() as http:
        client = Client(server.url, http_client=http)
        client.close()
        with pytest.raises(Closed):
            client.models()


def test_another_transport_is_used_and_stays_open() -> None:
    with scripted(TGI_REPLY) as server, httpx2.Client(headers={"x-mine": "1"}) as http:
        with Client(server.url, http_client=http) as client:
            client.generate("Tea")
        assert not http.is_closed
        assert server.received[0].headers["x-mine"] == "1"


async def test_a_stream_is_awaited_or_entered_and_closed_after_the_block() -> None:
    with scripted(event_reply(*TGI_EVENTS), event_reply(*TGI_EVENTS)) as server:
        async with AsyncClient(server.url) as client:
            async with client.stream("Tea") as entered:
                assert [text async for text in entered.text_stream] == [" is", " here"]
            awaited = await client.stream("Tea")
            assert (await awaited.final()).text == " is here"


async def test_entering_a_rejected_stream_raises_the_error() -> None:
    rejection = json_reply({"error": "no", "error_type": "validation", "code": "invalid_request"}, status=422)
    with scripted(rejection) as server:
        async with AsyncClient(server.url) as client:
            with pytest.raises(InvalidRequest):
                async with client.stream("Tea"):
                    pytest.fail("it was rejected")


def public_signatures(kind: type) -> dict[str, list[inspect.Parameter]]:
    return {
        name: list(inspect.signature(member).parameters.values())
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(("one", "other"), [(Client, AsyncClient), (Stream, AsyncStream)])
def test_the_two_clients_have_the_same_methods_with_the_same_parameters(one: type, other: type) -> None:
    assert public_signatures(one) == public_signatures(other)
    assert public_signatures(one)
