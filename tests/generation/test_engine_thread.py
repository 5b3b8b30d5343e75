from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import pytest

from genserve.completion import join_deltas
from genserve.errors import Closed, GenserveError, ModelFailed, Overloaded
from genserve.generation.admission_control import QueueLimits
from genserve.generation.beam_search import BeamSearch
from genserve.generation.delta_streams import DeltaStream, EventLoopSink
from genserve.generation.engine import Engine
from genserve.generation.engine_thread import EngineThread
from genserve.generation.speculation import DraftModel, Speculation
from genserve.generation_metrics import Metrics
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer, logits_after
from tests.fakes.sequences import Clock, IdText, logits_request, sample_loop, sequence_of

ROOM_FOR_EIGHT = QueueLimits(max_requests=8)
POISON = next(i for i in range(VOCAB_SIZE) if i not in [1, *greedy_answer([1], num_tokens=10)])


class GatedLogits(PagedLogits):
    """Lets steps behind the first of a sequence through while its gate is open: a test stands still there."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = threading.Semaphore(0)
        self.open = False

    def forward(self, batch):
        if not self.open and batch.num_computed_tokens.any():
            self.gate.acquire()
        return super().forward(batch)

    def open_gate(self):
        self.open = True
        self.gate.release()


class Recorder:
    """An sink that keeps what comes."""

    def __init__(self):
        self.outputs = []

    def deliver(self, outputs):
        self.outputs += outputs


def loop_over(
    model: PagedLogits,
    *,
    limits: QueueLimits = ROOM_FOR_EIGHT,
    clock: Callable[[], float] = time.monotonic,
    metrics: Metrics | None = None,
) -> EngineThread:
    return EngineThread(
        Engine(model, decode=sample_loop, clock=clock),
        name="test",
        max_num_seqs=model.max_num_seqs,
        limits=limits,
        metrics=(metrics or Metrics()).for_model("test"),
    )


@pytest.fixture
def loop():
    loop = loop_over(PagedLogits())
    yield loop
    loop.close()


@pytest.fixture
def gated():
    model = GatedLogits(max_num_seqs=2)
    loop = loop_over(model, limits=QueueLimits(max_requests=1))
    yield model, loop
    model.open_gate()
    loop.close()


def test_a_thread_reads_the_deltas_of_its_request(loop):
    with DeltaStream(loop, sequence_of([5], max_tokens=6)) as stream:
        completion = join_deltas(stream)
    assert list(completion.token_ids) == greedy_answer([5], num_tokens=6)
    assert loop.num_accepted == 0


def test_many_threads_share_the_engine(loop):
    answers = {}

    def ask(prompt: int) -> None:
        with DeltaStream(loop, sequence_of([prompt], max_tokens=8)) as stream:
            answers[prompt] = list(join_deltas(stream).token_ids)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: greedy_answer([i], num_tokens=8) for i in range(10)}


async def test_an_event_loop_reads_several_streams_at_once(loop):
    sink = EventLoopSink(asyncio.get_running_loop())
    streams = [sink.open(loop, sequence_of([i], max_tokens=8)) for i in range(4)]

    async def read(stream):
        return [i async for deltas in stream for delta in deltas for i in delta.token_ids]

    assert await asyncio.gather(*map(read, streams)) == [greedy_answer([i], num_tokens=8) for i in range(4)]


async def test_one_step_wakes_the_event_loop_once_for_all_streams():
    wakes = []

    class CountingSink(EventLoopSink):
        def deliver(self, outputs):
            wakes.append(len(outputs))
            super().deliver(outputs)

    loop = loop_over(PagedLogits())
    sink = CountingSink(asyncio.get_running_loop())
    streams = [sink.open(loop, sequence_of([i], max_tokens=20)) for i in range(3)]
    for stream in streams:
        async for _ in stream:
            pass
    loop.close()
    assert 3 in wakes
    assert sum(wakes) == 60


async def test_a_closed_stream_frees_its_slot_within_two_steps(gated):
    model, loop = gated
    sink = EventLoopSink(asyncio.get_running_loop())
    stream = sink.open(loop, sequence_of([5], max_tokens=50))
    await anext(stream)
    before = loop.num_steps
    stream.close()
    for _ in range(2):
        model.gate.release()
    while loop.num_accepted:
        await asyncio.sleep(0)
    assert loop.num_steps - before <= 2
    assert loop.num_running == 0


def test_with_one_answer_of_a_beam_search_all_are_cancelled(gated):
    model, loop = gated
    sink = Recorder()
    answers = [sequence_of([5], use_beam_search=True, max_tokens=50) for _ in range(2)]
    BeamSearch(answers, width=2, text=IdText())
    loop.submit(*answers, sink=sink)
    while not loop.num_steps:  # the prefill
        time.sleep(0)
    loop.cancel(answers[1])
    model.open_gate()
    loop.drain(timeout_s=10)
    assert loop.num_accepted == 0
    with DeltaStream(loop, sequence_of([1], max_tokens=5)) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([1], num_tokens=5)
    assert not any(isinstance(content, GenserveError) for _, content in sink.outputs)


def test_the_queue_is_bounded_and_says_when_to_come_back(gated):
    _, loop = gated
    streams = [DeltaStream(loop, sequence_of([i], max_tokens=3)) for i in range(3)]
    with pytest.raises(Overloaded) as refused:
        DeltaStream(loop, sequence_of([9], max_tokens=3))
    assert refused.value.retry_after_s > 0
    for stream in streams:
        stream.close()


def test_a_drain_waits_for_what_was_accepted(gated):
    model, loop = gated
    with DeltaStream(loop, sequence_of([1], max_tokens=3)) as stream:
        next(stream)
        loop.drain(timeout_s=0)
        assert loop.num_accepted == 1
        draining = threading.Thread(target=loop.drain, kwargs={"timeout_s": 60})
        draining.start()
        model.open_gate()
        draining.join()
        assert loop.num_accepted == 0
        assert join_deltas(stream).usage.completion_tokens == 3


def test_closing_ends_every_request_with_an_error(gated):
    model, loop = gated
    streams = [DeltaStream(loop, sequence_of([i], max_tokens=30)) for i in range(3)]
    closing = threading.Thread(target=loop.close)
    closing.start()
    model.open_gate()
    closing.join()
    for stream in streams:
        with pytest.raises(Closed):
            list(stream)
    with pytest.raises(Closed):
        DeltaStream(loop, sequence_of([1]))
    loop.close()


def test_a_failing_forward_ends_its_requests_and_not_the_loop():
    model = PagedLogits()
    model.poison[POISON] = "raise"
    loop = loop_over(model)
    with pytest.raises(ModelFailed), DeltaStream(loop, sequence_of([POISON])) as stream:
        list(stream)
    with DeltaStream(loop, sequence_of([1], max_tokens=2)) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([1], num_tokens=2)
    assert loop.alive
    loop.close()


def dying_loop() -> EngineThread:
    class Broken(Engine):
        def step(self):
            raise MemoryError

    return EngineThread(
        Broken(PagedLogits(), decode=sample_loop),
        name="test",
        max_num_seqs=1,
        limits=QueueLimits(max_requests=1),
        metrics=Metrics().for_model("test"),
    )


def test_an_engine_that_dies_ends_its_requests_and_says_that_it_is_dead():
    loop = dying_loop()
    with pytest.raises(ModelFailed, match="loaded again"):
        list(DeltaStream(loop, sequence_of([1])))
    loop.close()
    assert not loop.alive


def test_the_gauges_return_to_zero_when_the_last_reader_leaves():
    metrics = Metrics()
    loop = EngineThread(
        Engine(PagedLogits(), decode=sample_loop),
        name="test",
        max_num_seqs=4,
        limits=QueueLimits(max_requests=8),
        metrics=metrics.for_model("test"),
    )
    with DeltaStream(loop, sequence_of([5], max_tokens=50)) as stream:
        next(stream)
    while metrics.registry.get_sample_value("genserve_num_requests_running", {"model": "test"}):
        pass
    loop.close()
    assert metrics.registry.get_sample_value("genserve_num_requests_waiting", {"model": "test"}) == 0


class Caller:
    """A plain loop over the logits, as a model.py has it: all ids, every time."""

    def __init__(self, loop: EngineThread, prompt: list[int]) -> None:
        self.token_ids = list(prompt)
        self._loop = loop
        self._answers: SimpleQueue = SimpleQueue()

    def ask(self) -> None:
        request = logits_request(self.token_ids, on_logits=self._answers.put)
        self._loop.submit_logits([request])

    def receive(self) -> None:
        logits = self._answers.get()
        np.testing.assert_array_equal(logits, logits_after(self.token_ids))
        self.token_ids.append(int(logits.argmax()))


def test_an_answer_without_a_token_has_no_time_to_its_first():
    metrics = Metrics()
    loop = loop_over(PagedLogits(max_num_seqs=1), metrics=metrics)
    late = sequence_of([7], deadline_s=0.0)
    loop.submit(sequence_of([5], max_tokens=3), late, sink=Recorder())
    loop.drain(timeout_s=10)
    assert (late.num_new_tokens, late.stop_reason) == (0, "deadline")
    name = "genserve_time_to_first_token_seconds_count"
    assert metrics.registry.get_sample_value(name, {"model": "test"}) == 1
    loop.close()


def test_plain_loops_of_many_threads_are_answered_beside_generation(loop):
    def call(caller: Caller) -> None:
        for _ in range(12):
            caller.ask()
            caller.receive()

    callers = [Caller(loop, [i, i + 1]) for i in range(6)]
    threads = [threading.Thread(target=call, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    with DeltaStream(loop, sequence_of([50], max_tokens=30)) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([50], num_tokens=30)
    for thread in threads:
        thread.join()
    assert [c.token_ids[2:] for c in callers] == [greedy_answer([i, i + 1], num_tokens=12) for i in range(6)]
    assert loop.num_accepted == 0


def test_a_step_waits_for_the_loops_that_always_come_back_at_once():
    class CountingClock(Clock):
        num_calls = 0

        def __call__(self):
            self.num_calls += 1
            return super().__call__()

    model, clock = PagedLogits(), CountingClock()  # it stands still: by this clock nobody stays away
    loop = loop_over(model, clock=clock)
    early, late = Caller(loop, [1, 2]), Caller(loop, [3, 4])
    for _ in range(3):
        early.ask()
        late.ask()
        early.receive()
        late.receive()
    before = loop.num_steps
    for _ in range(10):
        early.ask()
        seen = clock.num_calls
        while clock.num_calls < seen + 3:  # a step of its own would look at the clock three times
            time.sleep(0)
        late.ask()
        early.receive()
        late.receive()
    assert loop.num_steps - before == 10
    loop.close()


def test_a_loop_that_stays_away_is_not_waited_for():
    model, clock = PagedLogits(), Clock()
    loop = loop_over(model, clock=clock)
    stays, leaves = Caller(loop, [1, 2]), Caller(loop, [3, 4])
    for _ in range(3):
        stays.ask()
        leaves.ask()
        stays.receive()
        leaves.receive()
    clock.now_s += 1
    for _ in range(3):
        stays.ask()
        stays.receive()
    loop.close()


def test_the_rows_of_a_call_are_accepted_together_or_not_at_all(gated):
    _, loop = gated
    answers: SimpleQueue = SimpleQueue()
    requests = [logits_request([i], on_logits=answers.put) for i in range(4)]
    with pytest.raises(Overloaded):
        loop.submit_logits(requests)
    assert loop.num_accepted == 0
    loop.submit_logits(requests[:3])
    for _ in range(3):
        assert isinstance(answers.get(), np.ndarray)
    assert loop.num_accepted == 0


def test_sequences_wait_for_held_slots_and_get_them():
    loop = loop_over(PagedLogits(max_num_seqs=1))
    caller = Caller(loop, [1, 2])
    for _ in range(4):
        caller.ask()
        caller.receive()
    with DeltaStream(loop, sequence_of([5], max_tokens=6)) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([5], num_tokens=6)
    loop.close()


def test_a_cancelled_logits_request_is_not_answered_and_makes_room(gated):
    model, loop = gated
    answers: SimpleQueue = SimpleQueue()
    stream = DeltaStream(loop, sequence_of([1], max_tokens=30))
    next(stream)  # from now on the engine stands in a decode step
    request = logits_request([2, 3], on_logits=answers.put)
    loop.submit_logits([request])
    loop.cancel(request)
    model.open_gate()
    list(stream)
    assert loop.num_accepted == 0
    assert answers.empty()


def test_closing_answers_logits_requests_with_an_error(gated):
    model, loop = gated
    answers: SimpleQueue = SimpleQueue()
    stream = DeltaStream(loop, sequence_of([1], max_tokens=30))
    next(stream)
    loop.submit_logits([logits_request([2, 3], on_logits=answers.put)])
    closing = threading.Thread(target=loop.close)
    closing.start()
    model.open_gate()
    closing.join()
    # The step that ran while the loop closed may have been the answer's.
    assert isinstance(answers.get(), Closed | np.ndarray)
    with pytest.raises(Closed):
        loop.submit_logits([logits_request([1])])


def test_an_engine_that_dies_answers_logits_requests():
    loop = dying_loop()
    answers: SimpleQueue = SimpleQueue()
    loop.submit_logits([logits_request([1], on_logits=answers.put)])
    assert isinstance(answers.get(), ModelFailed)
    loop.close()


def test_a_receiver_that_raises_harms_nobody(loop):
    def raises(_):
        raise KeyError("oops")

    loop.submit_logits([logits_request([1, 2], on_logits=raises)])
    caller = Caller(loop, [3])
    caller.ask()
    caller.receive()
    assert loop.alive


def test_drafted_tokens_are_counted_and_those_that_were_right():
    metrics, model = Metrics(), PagedLogits()
    draft = DraftModel(PagedLogits(), vocab_size=model.vocab_size)
    loop = EngineThread(
        Engine(model, decode=sample_loop, speculation=Speculation(draft), clock=Clock()),
        name="test",
        max_num_seqs=model.max_num_seqs,
        limits=QueueLimits(max_requests=1),
        metrics=metrics.for_model("test"),
    )
    with DeltaStream(loop, sequence_of([5], max_tokens=9)) as stream:
        completion = join_deltas(stream)
    loop.close()
    assert list(completion.token_ids) == greedy_answer([5], num_tokens=9)
    for what in ("draft", "accepted"):
        name = f"genserve_spec_decode_num_{what}_tokens_total"
        assert metrics.registry.get_sample_value(name, {"model": "test"}) == 7


def ended(sink: Recorder) -> GenserveError | None:
    """Wait for the end of the first request whose outputs come there, and return its error."""
    while not sink.outputs:
        time.sleep(0)
    content = sink.outputs[-1][1]
    return content if isinstance(content, GenserveError) else None


def rejections(metrics: Metrics, reason: str) -> float:
    labels = {"model": "test", "reason": reason}
    return metrics.registry.get_sample_value("genserve_admission_rejections_total", labels) or 0


@pytest.fixture
def full():
    """A loop over two slots that others hold, where a request may wait for ten seconds of its clock."""
    model, clock, metrics = GatedLogits(max_num_seqs=2), Clock(), Metrics()
    limits = QueueLimits(max_requests=8, max_tokens=20, max_wait_s=10)
    loop = loop_over(model, limits=limits, clock=clock, metrics=metrics)
    model.gate.release(4)
    running = Recorder()
    for prompt in ([1], [2]):
        loop.submit(sequence_of(prompt, max_tokens=40), sink=running)
    while len({sequence for sequence, _ in list(running.outputs)}) < 2:   # both have begun
        time.sleep(0)
    yield model, clock, metrics, loop, running
    model.open_gate()
    loop.close()


def test_prompts_that_wait_are_bounded_in_tokens(full):
    *_, metrics, loop, _ = full
    loop.submit(sequence_of([5] * 15), sink=Recorder())
    with pytest.raises(Overloaded, match="15 tokens are waiting"):
        loop.submit(sequence_of([5] * 6), sink=Recorder())
    loop.submit(sequence_of([5] * 5), sink=Recorder())
    assert rejections(metrics, "max_queue_tokens") == 1


def test_each_answer_to_a_prompt_counts_its_tokens_and_a_place(full):
    *_, loop, _ = full
    loop.submit(*(sequence_of([5] * 4) for _ in range(3)), sink=Recorder())
    three_more = [sequence_of([5] * 4) for _ in range(3)]
    with pytest.raises(Overloaded, match="12 tokens are waiting"):
        loop.submit(*three_more, sink=Recorder())
    assert loop.num_accepted == 5


def test_a_beam_search_counts_its_beams_and_its_prompt_once(full):
    *_, loop, _ = full
    answers = [sequence_of([5] * 15, use_beam_search=True, max_tokens=4)]
    BeamSearch(answers, width=2, text=IdText())
    loop.submit(*answers, sink=Recorder())
    assert loop.num_accepted == 4
    loop.submit(sequence_of([5] * 5), sink=Recorder())
    loop.cancel(answers[0])


def test_a_request_that_has_waited_too_long_ends_before_its_first_token(full):
    model, clock, metrics, loop, running = full
    waiting = Recorder()
    loop.submit(sequence_of([5]), sink=waiting)
    clock.now_s = 10.5
    model.gate.release(2)
    error = ended(waiting)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    assert rejections(metrics, "queue_timeout") == 1
    assert loop.num_accepted == 2
    assert not any(isinstance(content, GenserveError) for _, content in running.outputs)


def test_a_refused_request_leaves_its_place_to_the_next(full):
    model, clock, _, loop, _ = full
    refused, late = Recorder(), Recorder()
    loop.submit(sequence_of([5] * 20), sink=refused)
    clock.now_s = 10.5
    model.gate.release(2)
    ended(refused)
    loop.submit(sequence_of([5] * 20, max_tokens=3), sink=late)
    model.open_gate()
    loop.drain(timeout_s=60)
    assert late.outputs[-1][1].finish_reason is not None


def test_a_request_of_which_one_answer_has_begun_is_not_refused():
    model, clock, sink = GatedLogits(max_num_seqs=1), Clock(), Recorder()
    loop = loop_over(model, limits=QueueLimits(max_requests=8, max_wait_s=10), clock=clock)
    loop.submit(*(sequence_of([i], max_tokens=4) for i in (5, 6)), sink=sink)
    while not sink.outputs:
        time.sleep(0)
    clock.now_s = 1000.0
    model.open_gate()
    loop.drain(timeout_s=60)
    loop.close()
    assert not any(isinstance(content, GenserveError) for _, content in sink.outputs)


def test_a_preempted_request_waits_as_long_as_it_takes():
    # Two sequences of 40 tokens are more than the cache holds: one has to leave and come back.
    model, clock, metrics = PagedLogits(max_num_seqs=2, block_size=8, num_blocks=8), Clock(), Metrics()
    limits = QueueLimits(max_requests=8, max_tokens=100, max_wait_s=1e-9)

    class Ageing(Recorder):
        def deliver(self, outputs):
            clock.now_s += 100.0
            super().deliver(outputs)

    sink = Ageing()
    loop = loop_over(model, limits=limits, clock=clock, metrics=metrics)
    loop.submit(*(sequence_of([i], max_tokens=40) for i in (5, 6)), sink=sink)
    loop.drain(timeout_s=60)
    loop.close()
    preempted = metrics.registry.get_sample_value("genserve_num_preemptions_total", {"model": "test"})
    assert preempted > 0
    assert not any(isinstance(content, GenserveError) for _, content in sink.outputs)


def test_a_request_that_finds_a_free_slot_is_not_refused_however_long_the_step_before_took():
    model, clock, sink = GatedLogits(max_num_seqs=2), Clock(), Recorder()
    loop = loop_over(model, limits=QueueLimits(max_requests=8, max_wait_s=1), clock=clock)
    loop.submit(sequence_of([1], max_tokens=20), sink=Recorder())
    while not loop.num_running:
        time.sleep(0)
    loop.submit(sequence_of([5], max_tokens=3), sink=sink)
    clock.now_s = 100.0
    model.open_gate()
    assert ended(sink) is None
    loop.close()


def test_the_next_token_of_a_loop_is_not_refused_for_tokens_or_time(full):
    model, clock, _, loop, _ = full
    answers: SimpleQueue = SimpleQueue()
    loop.submit(sequence_of([5] * 20), sink=Recorder())
    loop.submit_logits([logits_request([7] * 30, on_logits=answers.put)])
    clock.now_s = 1000.0
    model.open_gate()
    assert isinstance(answers.get(), np.ndarray)


def num_measured(loop: EngineThread) -> int:
    """Return how many slots were taken, by what has been measured of the full engine."""
    return len(loop._admission._started_s) - 1


def test_all_beams_of_a_search_are_measured_as_they_are_counted(full):
    model, _, _, loop, _ = full
    answers = [sequence_of([5], use_beam_search=True, max_tokens=4)]
    BeamSearch(answers, width=2, text=IdText())
    loop.submit(*answers, sink=Recorder())
    before = num_measured(loop)
    model.open_gate()
    loop.drain(timeout_s=60)
    assert num_measured(loop) - before == 2


def test_only_first_steps_are_measured():
    # Two sequences of 40 tokens are more than the cache holds: they leave and come back, with others in line.
    model, metrics = PagedLogits(max_num_seqs=2, block_size=8, num_blocks=8), Metrics()
    loop = loop_over(model, metrics=metrics)
    loop.submit(*(sequence_of([i], max_tokens=40) for i in (5, 6, 7)), sink=Recorder())
    loop.submit_logits([logits_request([8, i]) for i in (1, 2, 3)])
    loop.drain(timeout_s=60)
    loop.close()
    preempted = metrics.registry.get_sample_value("genserve_num_preemptions_total", {"model": "test"})
    assert preempted > 0
    assert num_measured(loop) <= 3


def test_places_that_are_reserved_are_taken_until_the_request_is_submitted(full):
    *_, metrics, loop, _ = full
    reservation = loop.reserve(8)
    with pytest.raises(Overloaded, match="10 requests are running or waiting; the limit is 10"):
        loop.reserve(1)
    with pytest.raises(Overloaded):
        loop.submit(sequence_of([5]), sink=Recorder())
    with pytest.raises(Overloaded):
        loop.submit_logits([logits_request([5])])
    assert rejections(metrics, "max_queue") == 3
    loop.submit(*(sequence_of([5]) for _ in range(8)), sink=Recorder(), reservation=reservation)
    reservation.release()
    assert (loop.num_accepted, loop.num_preparing) == (10, 0)


def test_a_reservation_is_given_back_where_the_preparation_fails(full):
    *_, loop, _ = full
    with pytest.raises(KeyError), loop.reserve(8):
        raise KeyError
    assert loop.num_preparing == 0


def test_a_request_waits_from_when_it_came_and_not_from_when_it_was_prepared(full):
    model, clock, metrics, loop, _ = full
    waiting, reservation = Recorder(), loop.reserve(1)
    clock.now_s = 8.0
    loop.submit(sequence_of([5]), sink=waiting, reservation=reservation)
    clock.now_s = 10.5
    model.gate.release(2)
    assert isinstance(ended(waiting), Overloaded)
    assert rejections(metrics, "queue_timeout") == 1


def test_one_that_has_waited_too_long_for_others_to_be_prepared_is_refused(full):
    _, clock, metrics, loop, _ = full
    first, second = loop.reserve(1), loop.reserve(1)
    clock.now_s = 10.5
    first.check()   # it waited for nobody
    with pytest.raises(Overloaded, match="has waited for 10 s"):
        second.check()
    assert rejections(metrics, "queue_timeout") == 1


def test_nothing_is_reserved_by_a_loop_that_was_closed():
    loop = loop_over(PagedLogits())
    reservation = loop.reserve(1)
    loop.close()
    with pytest.raises(Closed):
        loop.reserve(1)
    with pytest.raises(Closed):
        reservation.check()


def test_one_that_came_first_and_was_prepared_last_is_refused_first(full):
    model, clock, _, loop, _ = full
    early, late, reservation = Recorder(), Recorder(), loop.reserve(1)
    clock.now_s = 8.0
    loop.submit(sequence_of([5]), sink=late)
    loop.submit(sequence_of([6]), sink=early, reservation=reservation)
    clock.now_s = 10.5
    model.gate.release(2)
    assert isinstance(ended(early), Overloaded)
    assert not late.outputs
    clock.now_s = 18.5
    model.gate.release(2)
    assert isinstance(ended(late), Overloaded)
