from __future__ import annotations

import asyncio
import threading

from genserve.completion import join_deltas
from genserve.generation.delta_streams import DeltaStream, EventLoopSink
from tests.fakes.engines import engine_thread
from tests.fakes.logits import PagedLogits, greedy_answer
from tests.fakes.sequences import sequence_of


def test_a_thread_reads_the_deltas_of_its_request(engine):
    with DeltaStream(engine, sequence_of([5], max_tokens=6)) as stream:
        completion = join_deltas(stream)
    assert list(completion.token_ids) == greedy_answer([5], num_tokens=6)
    assert engine.num_accepted == 0


def test_many_threads_share_the_engine(engine):
    answers = {}

    def ask(prompt: int) -> None:
        with DeltaStream(engine, sequence_of([prompt], max_tokens=8)) as stream:
            answers[prompt] = list(join_deltas(stream).token_ids)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: greedy_answer([i], num_tokens=8) for i in range(10)}


async def test_an_event_loop_reads_several_streams_concurrently(engine):
    sink = EventLoopSink(asyncio.get_running_loop())
    streams = [sink.open(engine, sequence_of([i], max_tokens=8)) for i in range(4)]

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
    streams = [sink.open(engine, sequence_of([i], max_tokens=20)) for i in range(3)]
    for stream in streams:
        async for _ in stream:
            pass
    engine.close()
    assert 3 in wakes
    assert sum(wakes) == 60


async def test_a_closed_stream_frees_its_place_within_two_steps(gated):
    model, engine = gated
    sink = EventLoopSink(asyncio.get_running_loop())
    stream = sink.open(engine, sequence_of([5], max_tokens=50))
    await anext(stream)
    before = engine.num_steps
    stream.close()
    for _ in range(2):
        model.gate.release()
    while engine.num_accepted:
        await asyncio.sleep(0)
    assert engine.num_steps - before <= 2
    assert engine.num_running == 0
