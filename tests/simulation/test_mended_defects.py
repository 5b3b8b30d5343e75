"""Defects that the simulation has found, each in the few steps that show it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from genserve.engine.admission_control import QueueLimits
from genserve.engine.engine import Engine
from genserve.engine.engine_thread import EngineThread
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.scheduler import Scheduler
from genserve.errors import ModelFailed, ModelNotReady, Overloaded
from tests.fakes.engines import RecordingSink
from tests.fakes.logits import PagedLogits
from tests.fakes.sequences import logits_request, sample_loop, sequence_of
from tests.simulation.simulated_repository import METRICS
from tests.simulation.virtual_threads import SimpleQueue, current, virtual_product, virtual_threads


def simulated(scenario: Callable[[], None]) -> None:
    """Run a scenario on virtual threads; it raises what is wrong."""
    failures: list[Exception] = []

    def main() -> None:
        try:
            scenario()
        except Exception as error:
            failures.append(error)

    with virtual_product(), virtual_threads(Random(0), switch_rate=0.0) as threads:
        threads.run(main)
    if failures:
        raise failures[0]


def engine_with_a_reserved_slot(**limits: Any) -> EngineThread:
    """Return an engine whose only slot is reserved, for 2 s, for a loop that pauses for half a second."""
    threads = current()
    engine = EngineThread(
        Engine(PagedLogits(max_num_seqs=1), decode=sample_loop, clock=lambda: threads.now_ns / 1e9),
        name="test",
        max_num_seqs=1,
        limits=QueueLimits(max_requests=8, **limits),
        metrics=METRICS.for_model("test"),
    )
    token_ids = [1, 2]
    for _ in range(3):
        answers = SimpleQueue()
        engine.submit_logits([logits_request(token_ids, on_logits=answers.put)])
        token_ids.append(int(answers.get().argmax()))
        threads.sleep(0.5)
    return engine


def test_a_deadline_is_kept_while_all_slots_are_reserved_for_loops():
    def scenario() -> None:
        engine, sink = engine_with_a_reserved_slot(), RecordingSink()
        began_s = engine.now_s
        sequence = sequence_of([7], deadline_s=began_s + 0.1)
        engine.submit_sequences(sequence, sink=sink)
        engine.drain(timeout_s=10)
        assert engine.now_s - began_s == pytest.approx(0.1, abs=1e-3)
        [output] = sink.outputs
        assert (output.content.token_ids, sequence.stop_reason) == ((), "deadline")
        engine.close()

    simulated(scenario)


def test_the_longest_wait_is_kept_while_all_slots_are_reserved_for_loops():
    def scenario() -> None:
        engine, sink = engine_with_a_reserved_slot(max_wait_s=0.1), RecordingSink()
        began_s = engine.now_s
        engine.submit_sequences(sequence_of([7]), sink=sink)
        engine.drain(timeout_s=10)
        assert engine.now_s - began_s == pytest.approx(0.1, abs=1e-3)
        [output] = sink.outputs
        assert isinstance(output.content, Overloaded)
        engine.close()

    simulated(scenario)


@pytest.mark.parametrize(
    ("where", "method"), [(Scheduler, "add"), (Scheduler, "remove"), (KVCacheManager, "free")]
)
def test_every_request_ends_when_the_engine_fails_outside_of_a_forward(where, method, monkeypatch):
    def fails(*_args: Any, **_options: Any) -> None:
        raise ValueError("planted")

    def scenario() -> None:
        monkeypatch.setattr(where, method, fails)
        threads, sink = current(), RecordingSink()
        engine = EngineThread(
            Engine(PagedLogits(), decode=sample_loop, clock=lambda: threads.now_ns / 1e9),
            name="test",
            max_num_seqs=4,
            limits=QueueLimits(max_requests=8),
            metrics=METRICS.for_model("test"),
        )
        answers = SimpleQueue()
        engine.submit_sequences(*(sequence_of([7, i], max_tokens=1) for i in range(3)), sink=sink)
        with suppress(ModelNotReady):
            engine.submit_logits([logits_request([1], on_logits=answers.put)])
        engine.drain(timeout_s=10)
        assert engine.num_accepted == 0
        assert not engine.alive
        assert [type(output.content) for output in sink.outputs] == [ModelFailed] * 3

    simulated(scenario)
