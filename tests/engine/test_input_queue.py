from __future__ import annotations

import time
from queue import SimpleQueue

import numpy as np
import pytest

from genserve.engine.admission_control import QueueLimits
from genserve.engine.beam_search import BeamSearch
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.engine_thread import EngineThread
from genserve.errors import Closed, GenserveError, Overloaded
from genserve.generation_metrics import Metrics
from tests.fakes.engines import GatedLogits, RecordingSink, engine_thread, wait_for_end
from tests.fakes.logits import PagedLogits
from tests.fakes.sequences import Clock, IdText, logits_request, sequence_of


def test_a_full_queue_rejects_with_a_retry_time(gated):
    _, engine = gated
    streams = [DeltaStream(engine, sequence_of([i], max_tokens=3).request) for i in range(3)]
    with pytest.raises(Overloaded) as rejected:
        DeltaStream(engine, sequence_of([9], max_tokens=3).request)
    assert rejected.value.retry_after_s > 0
    for stream in streams:
        stream.close()


def test_logits_requests_of_one_call_are_accepted_together_or_rejected_together(gated):
    _, engine = gated
    answers: SimpleQueue = SimpleQueue()
    requests = [logits_request([i], on_logits=answers.put) for i in range(4)]
    with pytest.raises(Overloaded):
        engine.submit_logits(requests)
    assert engine.num_accepted == 0
    engine.submit_logits(requests[:3])
    for _ in range(3):
        assert isinstance(answers.get(), np.ndarray)
    assert engine.num_accepted == 0


def rejections(metrics: Metrics, reason: str) -> float:
    labels = {"model": "test", "reason": reason}
    return metrics.registry.get_sample_value("genserve_admission_rejections_total", labels) or 0


@pytest.fixture
def full():
    """An engine with two slots, both taken, whose queue has a limit of 20 tokens and 10 s of its clock."""
    model, clock, metrics = GatedLogits(max_num_seqs=2), Clock(), Metrics()
    limits = QueueLimits(max_requests=8, max_tokens=20, max_wait_s=10)
    engine = engine_thread(model, limits=limits, clock=clock, metrics=metrics)
    running = RecordingSink()
    for prompt in ([1], [2]):
        engine.submit_sequences(sequence_of(prompt, max_tokens=40), sink=running)
    model.gate.release(4)   # now: the first sequence alone could pass four times before the second comes
    while len({output.request for output in list(running.outputs)}) < 2:   # both have started
        time.sleep(0)
    yield model, clock, metrics, engine, running
    model.open_gate()
    engine.close()


def test_the_tokens_of_waiting_prompts_are_limited(full):
    *_, metrics, engine, _ = full
    engine.submit_sequences(sequence_of([5] * 15), sink=RecordingSink())
    with pytest.raises(Overloaded, match=r"\b15\b"):
        engine.submit_sequences(sequence_of([5] * 6), sink=RecordingSink())
    engine.submit_sequences(sequence_of([5] * 5), sink=RecordingSink())
    assert rejections(metrics, "max_queue_tokens") == 1


def test_each_choice_counts_the_prompt_and_a_slot(full):
    *_, engine, _ = full
    engine.submit_sequences(*(sequence_of([5] * 4) for _ in range(3)), sink=RecordingSink())
    three_more = [sequence_of([5] * 4) for _ in range(3)]
    with pytest.raises(Overloaded, match=r"\b12\b") as rejected:
        engine.submit_sequences(*three_more, sink=RecordingSink())
    assert rejected.value.reason == "max_queue_tokens"
    assert engine.num_accepted == 5


def test_a_beam_search_counts_its_beams_and_its_prompt_once(full):
    *_, engine, _ = full
    answers = [sequence_of([5] * 15, use_beam_search=True, max_tokens=4)]
    BeamSearch(answers, width=2, text=IdText())
    engine.submit_sequences(*answers, sink=RecordingSink())
    assert engine.num_accepted == 4
    engine.submit_sequences(sequence_of([5] * 5), sink=RecordingSink())
    engine.cancel(answers[0].request)


def test_a_request_that_waits_too_long_ends_before_its_first_token(full):
    model, clock, metrics, engine, running = full
    waiting = RecordingSink()
    engine.submit_sequences(sequence_of([5]), sink=waiting)
    clock.now_s = 10.5
    model.gate.release(2)
    error = wait_for_end(waiting)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0
    assert rejections(metrics, "queue_timeout") == 1
    assert engine.num_accepted == 2
    assert not any(isinstance(output.content, GenserveError) for output in running.outputs)


def test_a_rejected_request_frees_its_slot(full):
    model, clock, _, engine, _ = full
    rejected, late = RecordingSink(), RecordingSink()
    engine.submit_sequences(sequence_of([5] * 20), sink=rejected)
    clock.now_s = 10.5
    model.gate.release(2)
    wait_for_end(rejected)
    engine.submit_sequences(sequence_of([5] * 20, max_tokens=3), sink=late)
    model.open_gate()
    engine.drain(timeout_s=60)
    engine.close()      # the last output comes after the request has ended
    assert late.outputs[-1].content.finish_reason is not None


def test_a_request_of_which_one_choice_has_started_does_not_time_out():
    model, clock, sink = GatedLogits(max_num_seqs=1), Clock(), RecordingSink()
    engine = engine_thread(model, limits=QueueLimits(max_requests=8, max_wait_s=10), clock=clock)
    engine.submit_sequences(*(sequence_of([i], max_tokens=4) for i in (5, 6)), sink=sink)
    while not sink.outputs:
        time.sleep(0)
    clock.now_s = 1000.0
    model.open_gate()
    engine.drain(timeout_s=60)
    engine.close()
    assert not any(isinstance(output.content, GenserveError) for output in sink.outputs)


def test_a_preempted_request_does_not_time_out():
    # Two sequences of 40 tokens are more than the cache holds: one is preempted.
    model, clock, metrics = PagedLogits(max_num_seqs=2, block_size=8, num_blocks=8), Clock(), Metrics()
    limits = QueueLimits(max_requests=8, max_tokens=100, max_wait_s=1e-9)

    class Ageing(RecordingSink):
        def deliver(self, outputs):
            clock.now_s += 100.0
            super().deliver(outputs)

    sink = Ageing()
    engine = engine_thread(model, limits=limits, clock=clock, metrics=metrics)
    engine.submit_sequences(*(sequence_of([i], max_tokens=40) for i in (5, 6)), sink=sink)
    engine.drain(timeout_s=60)
    engine.close()
    preempted = metrics.registry.get_sample_value("genserve_num_preemptions_total", {"model": "test"})
    assert preempted > 0
    assert not any(isinstance(output.content, GenserveError) for output in sink.outputs)


def test_a_request_that_finds_a_free_place_does_not_time_out_after_a_long_step():
    model, clock, sink = GatedLogits(max_num_seqs=2), Clock(), RecordingSink()
    engine = engine_thread(model, limits=QueueLimits(max_requests=8, max_wait_s=1), clock=clock)
    engine.submit_sequences(sequence_of([1], max_tokens=20), sink=RecordingSink())
    while not engine.num_running:
        time.sleep(0)
    engine.submit_sequences(sequence_of([5], max_tokens=3), sink=sink)
    clock.now_s = 100.0
    model.open_gate()
    assert wait_for_end(sink) is None
    engine.close()


def test_logits_requests_are_exempt_from_the_limits_on_tokens_and_time(full):
    model, clock, _, engine, _ = full
    answers: SimpleQueue = SimpleQueue()
    engine.submit_sequences(sequence_of([5] * 20), sink=RecordingSink())
    engine.submit_logits([logits_request([7] * 30, on_logits=answers.put)])
    clock.now_s = 1000.0
    model.open_gate()
    assert isinstance(answers.get(), np.ndarray)


def num_measured(engine: EngineThread) -> int:
    """Return how many slots the measured throughput of the full engine is based on."""
    return len(engine._queue.admission.prediction._started_s) - 1


def test_a_started_search_counts_all_its_beams_in_the_throughput(full):
    model, _, _, engine, _ = full
    answers = [sequence_of([5], use_beam_search=True, max_tokens=4)]
    BeamSearch(answers, width=2, text=IdText())
    engine.submit_sequences(*answers, sink=RecordingSink())
    before = num_measured(engine)
    model.open_gate()
    engine.drain(timeout_s=60)
    assert num_measured(engine) - before == 2


def test_only_first_steps_count_in_the_throughput():
    # Two sequences of 40 tokens are more than the cache holds: they are preempted while others wait.
    model, metrics = PagedLogits(max_num_seqs=2, block_size=8, num_blocks=8), Metrics()
    engine = engine_thread(model, metrics=metrics)
    engine.submit_sequences(*(sequence_of([i], max_tokens=40) for i in (5, 6, 7)), sink=RecordingSink())
    engine.submit_logits([logits_request([8, i]) for i in (1, 2, 3)])
    engine.drain(timeout_s=60)
    engine.close()
    preempted = metrics.registry.get_sample_value("genserve_num_preemptions_total", {"model": "test"})
    assert preempted > 0
    assert num_measured(engine) <= 3


def test_reserved_places_are_taken_until_the_request_is_submitted(full):
    *_, metrics, engine, _ = full
    reservation = engine.reserve(8)
    with pytest.raises(Overloaded, match=r"\b10\b"):
        engine.reserve(1)
    with pytest.raises(Overloaded):
        engine.submit_sequences(sequence_of([5]), sink=RecordingSink())
    with pytest.raises(Overloaded):
        engine.submit_logits([logits_request([5])])
    assert rejections(metrics, "max_queue") == 3
    eight = [sequence_of([5]) for _ in range(8)]
    engine.submit_sequences(*eight, sink=RecordingSink(), reservation=reservation)
    reservation.release()
    assert (engine.num_accepted, engine.num_preparing) == (10, 0)


def test_a_reservation_is_released_if_the_preparation_fails(full):
    *_, engine, _ = full
    with pytest.raises(KeyError), engine.reserve(8):
        raise KeyError
    assert engine.num_preparing == 0


def test_a_request_waits_from_its_arrival_not_from_the_end_of_its_preparation(full):
    model, clock, metrics, engine, _ = full
    waiting, reservation = RecordingSink(), engine.reserve(1)
    clock.now_s = 8.0
    engine.submit_sequences(sequence_of([5]), sink=waiting, reservation=reservation)
    clock.now_s = 10.5
    model.gate.release(2)
    assert isinstance(wait_for_end(waiting), Overloaded)
    assert rejections(metrics, "queue_timeout") == 1


def test_a_reservation_that_waited_too_long_for_other_preparations_is_rejected(full):
    _, clock, metrics, engine, _ = full
    first, second = engine.reserve(1), engine.reserve(1)
    clock.now_s = 10.5
    first.check()   # it waited for no other preparation
    with pytest.raises(Overloaded, match=r"\b10 s\b"):
        second.check()
    assert rejections(metrics, "queue_timeout") == 1


def test_a_closed_engine_reserves_nothing():
    engine = engine_thread(PagedLogits())
    reservation = engine.reserve(1)
    engine.close()
    with pytest.raises(Closed):
        engine.reserve(1)
    with pytest.raises(Closed):
        reservation.check()


def test_a_request_that_arrived_first_and_was_prepared_last_times_out_first(full):
    model, clock, _, engine, _ = full
    early, late, reservation = RecordingSink(), RecordingSink(), engine.reserve(1)
    clock.now_s = 8.0
    engine.submit_sequences(sequence_of([5]), sink=late)
    engine.submit_sequences(sequence_of([6]), sink=early, reservation=reservation)
    clock.now_s = 10.5
    model.gate.release(2)
    assert isinstance(wait_for_end(early), Overloaded)
    assert not late.outputs
    clock.now_s = 18.5
    model.gate.release(2)
    assert isinstance(wait_for_end(late), Overloaded)
