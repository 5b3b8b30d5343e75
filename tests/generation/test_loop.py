from __future__ import annotations

import asyncio
import threading

import pytest

from genserve.errors import Closed, ModelFailed, Overloaded
from genserve.generation.engine import Engine
from genserve.generation.loop import EngineLoop
from genserve.generation.streams import EventLoopOutbox, ThreadStream
from genserve.metrics import Metrics
from genserve.request import join_deltas
from tests.fakes.logits import VOCAB_SIZE, CachedLogits, greedy_answer
from tests.fakes.sequences import sample_loop, sequence_of

POISON = next(i for i in range(VOCAB_SIZE) if i not in [1, *greedy_answer([1], num_tokens=10)])


class GatedLogits(CachedLogits):
    """Lets decode steps through while its gate is open, so that a test stands still where it wants."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = threading.Semaphore(0)
        self.open = False

    def decode(self, token_ids, past):
        if not self.open:
            self.gate.acquire()
        return super().decode(token_ids, past)

    def open_gate(self):
        self.open = True
        self.gate.release()


def loop_over(model: CachedLogits, *, max_waiting: int = 8) -> EngineLoop:
    return EngineLoop(
        Engine(model, decode=sample_loop),
        name="test",
        num_slots=model.num_slots,
        max_waiting=max_waiting,
        metrics=Metrics().for_model("test"),
    )


@pytest.fixture
def loop():
    loop = loop_over(CachedLogits())
    yield loop
    loop.close()


@pytest.fixture
def gated():
    model = GatedLogits(num_slots=2)
    loop = loop_over(model, max_waiting=1)
    yield model, loop
    model.open_gate()
    loop.close()


def test_a_thread_reads_the_deltas_of_its_request(loop):
    with ThreadStream(loop, sequence_of([5], max_tokens=6)) as stream:
        completion = join_deltas(stream)
    assert list(completion.token_ids) == greedy_answer([5], num_tokens=6)
    assert loop.num_accepted == 0


def test_many_threads_share_the_engine(loop):
    answers = {}

    def ask(prompt: int) -> None:
        with ThreadStream(loop, sequence_of([prompt], max_tokens=8)) as stream:
            answers[prompt] = list(join_deltas(stream).token_ids)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: greedy_answer([i], num_tokens=8) for i in range(10)}


async def test_an_event_loop_reads_several_streams_at_once(loop):
    outbox = EventLoopOutbox(asyncio.get_running_loop())
    streams = [outbox.open(loop, sequence_of([i], max_tokens=8)) for i in range(4)]

    async def read(stream):
        return [token_id async for delta in stream for token_id in delta.token_ids]

    assert await asyncio.gather(*map(read, streams)) == [greedy_answer([i], num_tokens=8) for i in range(4)]


async def test_one_step_wakes_the_event_loop_once_for_all_streams():
    wakes = []

    class CountingOutbox(EventLoopOutbox):
        def deliver(self, parcels):
            wakes.append(len(parcels))
            super().deliver(parcels)

    loop = loop_over(CachedLogits())
    outbox = CountingOutbox(asyncio.get_running_loop())
    streams = [outbox.open(loop, sequence_of([i], max_tokens=20)) for i in range(3)]
    for stream in streams:
        async for _ in stream:
            pass
    loop.close()
    assert 3 in wakes
    assert sum(wakes) == 60


async def test_a_closed_stream_frees_its_slot_within_two_steps(gated):
    model, loop = gated
    outbox = EventLoopOutbox(asyncio.get_running_loop())
    stream = outbox.open(loop, sequence_of([5], max_tokens=50))
    await anext(stream)
    before = loop.num_steps
    stream.close()
    for _ in range(2):
        model.gate.release()
    while loop.num_accepted:
        await asyncio.sleep(0)
    assert loop.num_steps - before <= 2
    assert loop.num_running == 0


def test_the_queue_is_bounded_and_says_when_to_come_back(gated):
    _, loop = gated
    streams = [ThreadStream(loop, sequence_of([i], max_tokens=3)) for i in range(3)]
    with pytest.raises(Overloaded) as refused:
        ThreadStream(loop, sequence_of([9], max_tokens=3))
    assert refused.value.retry_after_s >= 1
    for stream in streams:
        stream.close()


def test_closing_ends_every_request_with_an_error(gated):
    model, loop = gated
    streams = [ThreadStream(loop, sequence_of([i], max_tokens=30)) for i in range(3)]
    closing = threading.Thread(target=loop.close)
    closing.start()
    model.open_gate()
    closing.join()
    for stream in streams:
        with pytest.raises(Closed):
            list(stream)
    with pytest.raises(Closed):
        ThreadStream(loop, sequence_of([1]))
    loop.close()


def test_a_failing_forward_ends_its_requests_and_not_the_loop():
    model = CachedLogits()
    model.poison[POISON] = "raise"
    loop = loop_over(model)
    with pytest.raises(ModelFailed), ThreadStream(loop, sequence_of([POISON])) as stream:
        list(stream)
    with ThreadStream(loop, sequence_of([1], max_tokens=2)) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([1], num_tokens=2)
    assert loop.alive
    loop.close()


def test_an_engine_that_dies_ends_its_requests_and_says_that_it_is_dead():
    class Broken(Engine):
        def step(self):
            raise MemoryError

    loop = EngineLoop(
        Broken(CachedLogits(), decode=sample_loop),
        name="test",
        num_slots=1,
        max_waiting=1,
        metrics=Metrics().for_model("test"),
    )
    with pytest.raises(ModelFailed, match="loaded again"):
        list(ThreadStream(loop, sequence_of([1])))
    loop.close()
    assert not loop.alive


def test_the_gauges_return_to_zero_when_the_last_reader_leaves():
    metrics = Metrics()
    loop = EngineLoop(
        Engine(CachedLogits(), decode=sample_loop),
        name="test",
        num_slots=4,
        max_waiting=8,
        metrics=metrics.for_model("test"),
    )
    with ThreadStream(loop, sequence_of([5], max_tokens=50)) as stream:
        next(stream)
    while metrics.registry.get_sample_value("genserve_num_requests_running", {"model": "test"}):
        pass
    loop.close()
    assert metrics.registry.get_sample_value("genserve_num_requests_waiting", {"model": "test"}) == 0
