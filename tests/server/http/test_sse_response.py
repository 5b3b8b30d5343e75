from __future__ import annotations

import asyncio
import gc
import json

import httpx2
import pytest
from starlette.types import Message

from genserve.completion import Delta, FinishReason, Usage
from genserve.engine.delta_streams import EventLoopSink
from genserve.engine.generation_request import GenerationOutput
from genserve.errors import InvalidRequest, ModelFailed
from genserve.server.http.sse_response import EventStream, Frames, _events, event, while_connected
from tests.fakes.sequences import sequence_of


class Idle:
    """Stands in for an `EngineThread`; the test delivers its deltas."""

    def submit(self, *sequences, sink, reservation=None):
        pass

    def cancel(self, sequence):
        pass


class Texts(Frames):
    """Write the text of a delta."""

    def delta(self, delta):
        return event(delta.text)

    def error(self, error):
        return event(error.message)


def delta(text, finish_reason=None):
    return Delta(text=text, token_ids=(1,), finish_reason=finish_reason, usage=USAGE)


HI = {"role": "user", "content": "hi"}
LENGTH = {"max_tokens": 8, "ignore_eos": True}
TGI_LENGTH = {"max_new_tokens": 8, "ignore_eos": True}
USAGE = Usage(prompt_tokens=1, completion_tokens=1)
LAST = delta("last", FinishReason.LENGTH)


async def bodies(*steps):
    """The bodies that are sent if each step's deltas arrive before the next read."""
    sink = EventLoopSink(asyncio.get_running_loop())
    request = sequence_of([1]).request
    response = EventStream(sink.open(Idle(), request), Texts())
    coming = iter(steps)
    sent = []

    def deliver():
        sink.deliver([GenerationOutput(request, 0, content) for content in next(coming, ())])

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            deliver()

    deliver()  # the answer begins with its first delta
    await response.begin(asyncio.Future)
    await response({"type": "http", "method": "POST"}, asyncio.Future, send)
    return [body for body in sent if body]


async def test_queued_deltas_are_written_together_as_separate_events():
    written = await bodies([delta("a"), delta("b")], [delta("c")], [LAST])
    assert written == [b"data: a\n\ndata: b\n\n", b"data: c\n\n", b"data: last\n\n"]


async def test_deltas_before_an_error_are_written_before_it():
    written = await bodies([delta("a"), ModelFailed("gone")])
    assert written == [b"data: a\n\n", b"data: gone\n\n"]


async def test_the_beginning_precedes_an_error_without_a_delta(monkeypatch):
    # That comes after the first ping: no delta has, but the status is sent.
    monkeypatch.setattr(Texts, "start", lambda self, num_cached_tokens: b"start ")
    sink = EventLoopSink(asyncio.get_running_loop())
    request = sequence_of([1]).request
    stream = sink.open(Idle(), request)
    sink.deliver([GenerationOutput(request, 0, ModelFailed("gone"))])
    assert [written async for written in _events(stream, Texts())] == [b"start data: gone\n\n"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [HI], "n": 2}),
        ("/v1/chat/completions", {"messages": [HI], "return_token_ids": True}),
        ("/v1/completions", {"prompt": ["hi", "ho"], "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "hi", "logprobs": 2, "stream_options": {"include_usage": True}}),
        ("/", {"inputs": "hi", "parameters": {"top_n_tokens": 2, "do_sample": True} | TGI_LENGTH}),
        ("/", {"inputs": "hi", "parameters": {"return_full_text": True} | TGI_LENGTH}),
    ],
)
def test_events_are_json_as_python_writes_it(tiny_server, path, body):
    with httpx2.Client(base_url=tiny_server.url) as http:
        text = http.post(path, json=(LENGTH if path != "/" else {}) | body | {"stream": True}).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line not in ("", "data: [DONE]")]
    assert len(events) > 2
    assert [json.dumps(json.loads(one)) for one in events] == events


async def test_the_error_of_abandoned_work_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def receive() -> Message:
        return await asyncio.Future()

    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(while_connected(work, receive))
    await asyncio.sleep(0)
    work.set_exception(InvalidRequest("quotes the request"))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    del work, waiting
    gc.collect()
    assert not caplog.records
