from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest

from genserve.completion import PromptProgress, join_deltas
from genserve.engine.admission_control import QueueLimits
from genserve.engine.beam_search import BeamSearch
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.engine import Engine
from genserve.engine.engine_thread import EngineThread
from genserve.engine.speculation import DraftModel, Speculation
from genserve.errors import Closed, GenserveError, ModelFailed
from genserve.generation_metrics import Metrics
from tests.fakes.engines import LogitsLoop, RecordingSink, engine_thread
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer
from tests.fakes.sequences import (
    Clock,
    IdText,
    logits_request,
    made_sequences,
    request_of,
    sample_loop,
    sequence_of,
)

POISON = next(i for i in range(VOCAB_SIZE) if i not in [1, *greedy_answer([1], num_tokens=10)])


def test_cancelling_a_request_cancels_all_answers_of_its_beam_search(gated):
    model, engine = gated
    sink = RecordingSink()
    answers = [sequence_of([5], use_beam_search=True, max_tokens=50) for _ in range(2)]
    BeamSearch(answers, width=2, text=IdText())
    request = request_of(*answers)
    engine.submit(request, sink=sink)
    while not engine.num_steps:  # the prefill
        time.sleep(0)
    engine.cancel(request)
    model.open_gate()
    engine.drain(timeout_s=10)
    assert engine.num_accepted == 0
    with DeltaStream(engine, sequence_of([1], max_tokens=5).request) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([1], num_tokens=5)
    assert not any(isinstance(output.content, GenserveError) for output in sink.outputs)


def test_drain_waits_for_accepted_requests(gated):
    model, engine = gated
    with DeltaStream(engine, sequence_of([1], max_tokens=3).request) as stream:
        next(stream)
        engine.drain(timeout_s=0)
        assert engine.num_accepted == 1
        draining = threading.Thread(target=engine.drain, kwargs={"timeout_s": 60})
        draining.start()
        model.open_gate()
        draining.join()
        assert engine.num_accepted == 0
        assert join_deltas(stream).usage.completion_tokens == 3


def test_closing_ends_every_request_with_an_error(gated):
    model, engine = gated
    streams = [DeltaStream(engine, sequence_of([i], max_tokens=30).request) for i in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    model.open_gate()
    closing.join()
    for stream in streams:
        with pytest.raises(Closed):
            list(stream)
    with pytest.raises(Closed):
        DeltaStream(engine, sequence_of([1]).request)
    engine.close()


def test_a_failing_forward_ends_its_requests_but_not_the_engine():
    model = PagedLogits()
    model.poison[POISON] = "raise"
    engine = engine_thread(model)
    with pytest.raises(ModelFailed), DeltaStream(engine, sequence_of([POISON]).request) as stream:
        list(stream)
    with DeltaStream(engine, sequence_of([1], max_tokens=2).request) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([1], num_tokens=2)
    assert engine.alive
    engine.close()


def dying_engine() -> EngineThread:
    class Broken(Engine):
        def step(self):
            raise MemoryError

    return EngineThread(
        Broken(PagedLogits(), decode=sample_loop),
        name="test",
        max_num_seqs=1,
        limits=QueueLimits(max_requests=1),
        metrics=Metrics().for_model("test"),
        sequences_of=made_sequences,
    )


def test_a_dying_engine_ends_its_requests_and_is_not_alive():
    engine = dying_engine()
    with pytest.raises(ModelFailed, match="load its model again"):
        list(DeltaStream(engine, sequence_of([1]).request))
    engine.close()
    assert not engine.alive


def test_the_gauges_return_to_zero_when_the_last_reader_leaves():
    metrics = Metrics()
    engine = EngineThread(
        Engine(PagedLogits(), decode=sample_loop),
        name="test",
        max_num_seqs=4,
        limits=QueueLimits(max_requests=8),
        metrics=metrics.for_model("test"),
        sequences_of=made_sequences,
    )
    with DeltaStream(engine, sequence_of([5], max_tokens=50).request) as stream:
        next(stream)
    while metrics.registry.get_sample_value("genserve_num_requests_running", {"model": "test"}):
        pass
    engine.close()
    assert metrics.registry.get_sample_value("genserve_num_requests_waiting", {"model": "test"}) == 0


def test_an_answer_without_tokens_has_no_time_to_first_token():
    metrics = Metrics()
    engine = engine_thread(PagedLogits(max_num_seqs=1), metrics=metrics)
    late = sequence_of([7], deadline_s=0.0)
    engine.submit_sequences(sequence_of([5], max_tokens=3), late, sink=RecordingSink())
    engine.drain(timeout_s=10)
    assert (late.num_new_tokens, late.stop_reason) == (0, "deadline")
    name = "genserve_time_to_first_token_seconds_count"
    assert metrics.registry.get_sample_value(name, {"model": "test"}) == 1
    engine.close()


def test_loops_over_logits_on_many_threads_are_answered_during_generation(engine):
    def call(caller: LogitsLoop) -> None:
        for _ in range(12):
            caller.ask()
            caller.receive()

    callers = [LogitsLoop(engine, [i, i + 1]) for i in range(6)]
    threads = [threading.Thread(target=call, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    with DeltaStream(engine, sequence_of([50], max_tokens=30).request) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([50], num_tokens=30)
    for thread in threads:
        thread.join()
    assert [c.token_ids[2:] for c in callers] == [greedy_answer([i, i + 1], num_tokens=12) for i in range(6)]
    assert engine.num_accepted == 0


def loops_that_come_back(engine: EngineThread) -> tuple[LogitsLoop, LogitsLoop]:
    """Return two loops that the engine has learned to wait for."""
    loops = LogitsLoop(engine, [1, 2]), LogitsLoop(engine, [3, 4])
    for _ in range(3):
        for loop in loops:
            loop.ask()
        for loop in loops:
            loop.receive()
    return loops


def test_a_step_waits_for_loops_that_always_resume_quickly():
    class CountingClock(Clock):
        num_calls = 0

        def __call__(self):
            self.num_calls += 1
            return super().__call__()

    model, clock = PagedLogits(), CountingClock()  # it does not advance, so no pause is ever too long
    engine = engine_thread(model, clock=clock)
    early, late = loops_that_come_back(engine)
    before = engine.num_steps
    for _ in range(10):
        early.ask()
        seen = clock.num_calls
        while clock.num_calls < seen + 3:  # a step without the other loop would read the clock three times
            time.sleep(0)
        late.ask()
        early.receive()
        late.receive()
    assert engine.num_steps - before == 10
    engine.close()


def test_a_step_does_not_wait_for_a_loop_that_never_resumes():
    model, clock = PagedLogits(), Clock()
    engine = engine_thread(model, clock=clock)
    stays, _ = loops_that_come_back(engine)
    clock.now_s += 1
    for _ in range(3):
        stays.ask()
        stays.receive()
    engine.close()


def test_sequences_wait_for_held_places_and_get_them():
    engine = engine_thread(PagedLogits(max_num_seqs=1))
    caller = LogitsLoop(engine, [1, 2])
    for _ in range(4):
        caller.ask()
        caller.receive()
    with DeltaStream(engine, sequence_of([5], max_tokens=6).request) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([5], num_tokens=6)
    engine.close()


def test_a_cancelled_logits_request_is_not_answered_and_frees_its_slot(gated):
    model, engine = gated
    answers: SimpleQueue = SimpleQueue()
    stream = DeltaStream(engine, sequence_of([1], max_tokens=30).request)
    next(stream)  # from now on the engine is held in a decode step
    request = logits_request([2, 3], on_logits=answers.put)
    engine.submit_logits([request])
    engine.cancel(request)
    model.open_gate()
    list(stream)
    assert engine.num_accepted == 0
    assert answers.empty()


def test_closing_answers_logits_requests_with_an_error(gated):
    model, engine = gated
    answers: SimpleQueue = SimpleQueue()
    stream = DeltaStream(engine, sequence_of([1], max_tokens=30).request)
    next(stream)
    engine.submit_logits([logits_request([2, 3], on_logits=answers.put)])
    closing = threading.Thread(target=engine.close)
    closing.start()
    model.open_gate()
    closing.join()
    # The step that ran while the engine closed may have answered it.
    assert isinstance(answers.get(), Closed | np.ndarray)
    with pytest.raises(Closed):
        engine.submit_logits([logits_request([1])])


def test_a_dying_engine_answers_logits_requests_with_an_error():
    engine = dying_engine()
    answers: SimpleQueue = SimpleQueue()
    engine.submit_logits([logits_request([1], on_logits=answers.put)])
    assert isinstance(answers.get(), ModelFailed)
    engine.close()


def test_a_raising_receiver_of_logits_affects_no_other_request(engine):
    def raises(_):
        raise KeyError("oops")

    engine.submit_logits([logits_request([1, 2], on_logits=raises)])
    caller = LogitsLoop(engine, [3])
    caller.ask()
    caller.receive()
    assert engine.alive


def test_drafted_and_accepted_tokens_are_counted():
    metrics, model = Metrics(), PagedLogits()
    draft = DraftModel(PagedLogits(), vocab_size=model.vocab_size)
    engine = EngineThread(
        Engine(model, decode=sample_loop, speculation=Speculation(draft), clock=Clock()),
        name="test",
        max_num_seqs=model.max_num_seqs,
        limits=QueueLimits(max_requests=1),
        metrics=metrics.for_model("test"),
        sequences_of=made_sequences,
    )
    with DeltaStream(engine, sequence_of([5], max_tokens=9).request) as stream:
        completion = join_deltas(stream)
    engine.close()
    assert list(completion.token_ids) == greedy_answer([5], num_tokens=9)
    timings = completion.usage.timings
    assert timings is not None
    assert (timings.drafted_tokens, timings.accepted_tokens) == (7, 7)
    for what in ("draft", "accepted"):
        name = f"genserve_spec_decode_num_{what}_tokens_total"
        assert metrics.registry.get_sample_value(name, {"model": "test"}) == 7


class TickingLogits(PagedLogits):
    """Each step takes a second of a clock."""

    def __init__(self, clock):
        super().__init__(num_blocks=64)
        self._clock = clock

    def forward(self, batch):
        self._clock.now_s += 1
        return super().forward(batch)


def slow_reader(model: PagedLogits | None = None) -> EngineThread:
    """An engine that reads 8 tokens in a step; each step takes a second."""
    clock = Clock()
    model = model or TickingLogits(clock)
    return EngineThread(
        Engine(model, decode=sample_loop, max_num_batched_tokens=8, clock=clock),
        name="test",
        max_num_seqs=model.max_num_seqs,
        limits=QueueLimits(max_requests=8),
        metrics=Metrics().for_model("test"),
        sequences_of=made_sequences,
    )


def reporting(*sequences):
    request = replace(request_of(*sequences), return_progress=True)
    for sequence in sequences:
        sequence.request = request
    return request


def test_a_request_hears_how_much_of_its_prompt_was_read():
    engine = slow_reader()
    prompt = [n % VOCAB_SIZE for n in range(20)]
    with DeltaStream(engine, reporting(sequence_of(prompt, max_tokens=3))) as stream:
        first = list(stream)
    with DeltaStream(engine, reporting(sequence_of(prompt, max_tokens=3))) as stream:
        second = list(stream)
    with DeltaStream(engine, sequence_of(prompt, max_tokens=3, cache_salt="x").request) as stream:
        silent = list(stream)
    engine.close()
    progress = [delta for delta in first if isinstance(delta, PromptProgress)]
    assert first[: len(progress)] == progress
    assert [(one.read_tokens, one.prompt_tokens) for one in progress] == [(8, 20), (16, 20), (20, 20)]
    assert [after.seconds - one.seconds for one, after in pairwise(progress)] == pytest.approx([1, 1])
    again = [one for one in second if isinstance(one, PromptProgress)]
    assert [(one.cached_tokens, one.read_tokens) for one in again] == [(19, 20)]
    assert not any(isinstance(delta, PromptProgress) for delta in silent)
    assert join_deltas(first) == join_deltas(second) == join_deltas(silent)


def test_only_the_first_choice_reports_that_its_prompt_was_read():
    engine = slow_reader()
    prompt = [n % VOCAB_SIZE for n in range(20)]
    sequences = [sequence_of(prompt, max_tokens=2, seed=seed) for seed in range(3)]
    with DeltaStream(engine, reporting(*sequences)) as stream:
        deltas = list(stream)
    choices = [sequence_of(prompt, max_tokens=1, use_beam_search=True) for _ in range(2)]
    BeamSearch(choices, width=2, text=IdText())
    with DeltaStream(engine, reporting(*choices)) as stream:
        beams = list(stream)
    engine.close()
    for answers in (deltas, beams):
        progress = [delta for delta in answers if isinstance(delta, PromptProgress)]
        assert {delta.choice for delta in progress} == {0}
        assert progress[-1].read_tokens == 20


def test_an_answer_has_its_timings():
    engine = slow_reader()
    prompt = [n % VOCAB_SIZE for n in range(20)]
    with DeltaStream(engine, sequence_of(prompt, max_tokens=5).request) as stream:
        timings = join_deltas(stream).usage.timings
    engine.close()
    assert timings is not None
    assert (timings.queue_s + timings.prefill_s, timings.decode_s) == (3, 4)
    assert timings.drafted_tokens == 0


class BreakingLogits(PagedLogits):
    """Its second step fails."""

    def forward(self, batch):
        if batch.num_computed_tokens.any():
            raise ValueError("broken")
        return super().forward(batch)


def test_a_prompt_that_fails_while_it_is_read_ends_its_reports():
    engine = slow_reader(BreakingLogits())
    sink = RecordingSink()
    engine.submit(reporting(sequence_of([*range(20)], max_tokens=3)), sink=sink)
    engine.drain(timeout_s=10)
    first, last = (output.content for output in sink.outputs)
    assert isinstance(first, PromptProgress)
    assert isinstance(last, ModelFailed)
    assert not engine._reading
    engine.close()


class NeverReady:
    """An adapter for which there is no room."""

    sha256 = "0" * 64
    is_ready = False
    error = None


class NoRoom:
    """The source of such adapters."""

    def acquire(self, name, *, count, priority, on_change):
        return NeverReady()

    def release(self, adapter):
        pass


@pytest.mark.parametrize("num_held", [2, 5])
def test_requests_that_wait_for_adapters_take_no_slot_of_others(num_held):
    clock = Clock()

    class Slow(PagedLogits):
        def forward(self, batch):
            clock.now_s += 1
            return super().forward(batch)

    model = Slow(max_num_seqs=2)
    engine = EngineThread(
        Engine(model, decode=sample_loop, clock=clock),
        name="test",
        max_num_seqs=model.max_num_seqs,
        limits=QueueLimits(max_requests=20, max_wait_s=50),
        metrics=Metrics().for_model("test"),
        sequences_of=made_sequences,
        adapters=NoRoom(),
    )
    held = [sequence_of([1]) for _ in range(num_held)]
    for sequence in held:
        sequence.request = replace(request_of(sequence), adapter="a")
    others = [sequence_of([i], max_tokens=tokens) for i, tokens in enumerate([40, 40, 1])]
    sink = RecordingSink()
    engine.submit(*(sequence.request for sequence in (*others, *held)), sink=sink)
    while engine.num_accepted > num_held:
        time.sleep(0)
    # The engine was full, and answers took 40 s, but now both slots are free.
    assert engine.num_free == 20 + 2 - num_held
    with DeltaStream(engine, sequence_of([1], max_tokens=5).request) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([1], num_tokens=5)
    assert not any(isinstance(output.content, GenserveError) for output in sink.outputs)
    engine.close()
