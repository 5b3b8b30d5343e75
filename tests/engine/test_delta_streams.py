from __future__ import annotations

import asyncio
import threading
from itertools import repeat

import pytest

from genserve.completion import Delta, FinishReason, Usage, join_deltas
from genserve.engine.delta_streams import DeltaStream, EventLoopSink
from genserve.engine.generation_request import GenerationOutput
from genserve.errors import DeadlineExceeded
from tests.fakes.engines import engine_thread
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import sequence_of


def test_a_thread_reads_the_deltas_of_its_request(engine):
    with DeltaStream(engine, sequence_of([5], max_tokens=6).request) as stream:
        completion = join_deltas(stream)
    assert list(completion.token_ids) == greedy_answer([5], num_tokens=6)
    assert engine.num_accepted == 0


def test_many_threads_share_the_engine(engine):
    answers = {}

    def ask(prompt: int) -> None:
        with DeltaStream(engine, sequence_of([prompt], max_tokens=8).request) as stream:
            answers[prompt] = list(join_deltas(stream).token_ids)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: greedy_answer([i], num_tokens=8) for i in range(10)}


async def test_an_event_loop_reads_several_streams_concurrently(engine):
    sink = EventLoopSink(asyncio.get_running_loop())
    streams = [sink.open(engine, sequence_of([i], max_tokens=8).request) for i in range(4)]

    async def read(stream):
        return [i async for deltas in stream for delta in deltas for i in delta.token_ids]

    assert await asyncio.gather(*map(read, streams)) == [greedy_answer([i], num_tokens=8) for i in range(4)]


async def test_one_step_wakes_the_event_loop_once_for_all_streams():
    wakes = []

    class CountingSink(EventLoopSink):
        def deliver(self, outputs):
            wakes.append(len(outputs))
            super().deliver(outputs)

    engine = engine_thread(PagedLogits())
    sink = CountingSink(asyncio.get_running_loop())
    streams = [sink.open(engine, sequence_of([i], max_tokens=20).request) for i in range(3)]
    for stream in streams:
        async for _ in stream:
            pass
    engine.close()
    assert 3 in wakes
    assert sum(wakes) == 60


async def test_a_closed_stream_frees_its_place_within_two_steps(gated):
    model, engine = gated
    sink = EventLoopSink(asyncio.get_running_loop())
    stream = sink.open(engine, sequence_of([5], max_tokens=50).request)
    await anext(stream)
    before = engine.num_steps
    stream.close()
    for _ in range(2):
        model.gate.release()
    while engine.num_accepted:
        await asyncio.sleep(0)
    assert engine.num_steps - before <= 2
    assert engine.num_running == 0


class Idle:
    """Stands in for an `EngineThread`; the test delivers its deltas."""

    def submit(self, *requests, sink, reservation=None):
        pass

    def cancel(self, request):
        pass


def ended_by_deadline(*token_ids):
    usage = Usage(prompt_tokens=1, completion_tokens=len(token_ids))
    ending = {"finish_reason": FinishReason.LENGTH, "stop_reason": "deadline", "usage": usage}
    return Delta(text="", token_ids=token_ids, **ending)


async def test_a_deadline_before_the_first_token_of_all_choices_is_an_error():
    async def read(*deltas, waits):
        sink = EventLoopSink(asyncio.get_running_loop())
        requests = [sequence_of([1]).request for _ in deltas]
        stream = sink.open(Idle(), *requests)
        sink.deliver([GenerationOutput(*output) for output in zip(requests, repeat(0), deltas, strict=False)])
        if waits:
            await stream.first()
        return [delta.token_ids async for arrived in stream for delta in arrived]

    for waits in (True, False):
        assert await read(ended_by_deadline(5), ended_by_deadline(), waits=waits) == [(5,), ()]
        for none in ([ended_by_deadline()], [ended_by_deadline(), ended_by_deadline()]):
            with pytest.raises(DeadlineExceeded):
                await read(*none, waits=waits)
