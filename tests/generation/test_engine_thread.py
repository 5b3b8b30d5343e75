from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

from genserve.completion import join_deltas
from genserve.errors import Closed, GenserveError, ModelFailed
from genserve.generation.admission_control import QueueLimits
from genserve.generation.beam_search import BeamSearch
from genserve.generation.delta_streams import DeltaStream
from genserve.generation.engine import Engine
from genserve.generation.engine_thread import EngineThread
from genserve.generation.speculation import DraftModel, Speculation
from genserve.generation_metrics import Metrics
from tests.fakes.engines import LogitsLoop, RecordingSink, engine_thread
from tests.fakes.logits import VOCAB_SIZE, PagedLogits, greedy_answer
from tests.fakes.sequences import Clock, IdText, logits_request, sample_loop, sequence_of

POISON = next(i for i in range(VOCAB_SIZE) if i not in [1, *greedy_answer([1], num_tokens=10)])


def test_cancelling_one_answer_of_a_beam_search_cancels_all(gated):
    model, engine = gated
    sink = RecordingSink()
    answers = [sequence_of([5], use_beam_search=True, max_tokens=50) for _ in range(2)]
    BeamSearch(answers, width=2, text=IdText())
    engine.submit(*answers, sink=sink)
    while not engine.num_steps:  # the prefill
        time.sleep(0)
    engine.cancel(answers[1])
    model.open_gate()
    engine.drain(timeout_s=10)
    assert engine.num_accepted == 0
    with DeltaStream(engine, sequence_of([1], max_tokens=5)) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([1], num_tokens=5)
    assert not any(isinstance(content, GenserveError) for _, content in sink.outputs)


def test_drain_waits_for_accepted_requests(gated):
    model, engine = gated
    with DeltaStream(engine, sequence_of([1], max_tokens=3)) as stream:
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
    streams = [DeltaStream(engine, sequence_of([i], max_tokens=30)) for i in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    model.open_gate()
    closing.join()
    for stream in streams:
        with pytest.raises(Closed):
            list(stream)
    with pytest.raises(Closed):
        DeltaStream(engine, sequence_of([1]))
    engine.close()


def test_a_failing_forward_ends_its_requests_but_not_the_engine():
    model = PagedLogits()
    model.poison[POISON] = "raise"
    engine = engine_thread(model)
    with pytest.raises(ModelFailed), DeltaStream(engine, sequence_of([POISON])) as stream:
        list(stream)
    with DeltaStream(engine, sequence_of([1], max_tokens=2)) as stream:
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
    )


def test_a_dying_engine_ends_its_requests_and_is_not_alive():
    engine = dying_engine()
    with pytest.raises(ModelFailed, match="load its model again"):
        list(DeltaStream(engine, sequence_of([1])))
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
    )
    with DeltaStream(engine, sequence_of([5], max_tokens=50)) as stream:
        next(stream)
    while metrics.registry.get_sample_value("genserve_num_requests_running", {"model": "test"}):
        pass
    engine.close()
    assert metrics.registry.get_sample_value("genserve_num_requests_waiting", {"model": "test"}) == 0


def test_an_answer_without_tokens_has_no_time_to_first_token():
    metrics = Metrics()
    engine = engine_thread(PagedLogits(max_num_seqs=1), metrics=metrics)
    late = sequence_of([7], deadline_s=0.0)
    engine.submit(sequence_of([5], max_tokens=3), late, sink=RecordingSink())
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
    with DeltaStream(engine, sequence_of([50], max_tokens=30)) as stream:
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
    with DeltaStream(engine, sequence_of([5], max_tokens=6)) as stream:
        assert list(join_deltas(stream).token_ids) == greedy_answer([5], num_tokens=6)
    engine.close()


def test_a_cancelled_logits_request_is_not_answered_and_frees_its_place(gated):
    model, engine = gated
    answers: SimpleQueue = SimpleQueue()
    stream = DeltaStream(engine, sequence_of([1], max_tokens=30))
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
    stream = DeltaStream(engine, sequence_of([1], max_tokens=30))
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
    )
    with DeltaStream(engine, sequence_of([5], max_tokens=9)) as stream:
        completion = join_deltas(stream)
    engine.close()
    assert list(completion.token_ids) == greedy_answer([5], num_tokens=9)
    for what in ("draft", "accepted"):
        name = f"genserve_spec_decode_num_{what}_tokens_total"
        assert metrics.registry.get_sample_value(name, {"model": "test"}) == 7
