from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import httpx2
import pytest

from genserve.server.observe import engine_watch
from genserve.server.observe.engine_watch import EngineWatch
from tests.fakes.engines import GatedLogits, RecordingSink, engine_thread
from tests.fakes.sequences import sequence_of
from tests.support.live_server import LiveServer, wait_until


@dataclass(eq=False)
class ScriptedEngine:
    """What a watch reads of an engine."""

    num_accepted: int = 1
    num_turns: int = 0
    seconds: float | None = 0.0
    alive: bool = True
    stalled: bool = False

    def cpu_s(self) -> float | None:
        return self.seconds


def watched(engine: ScriptedEngine) -> EngineWatch:
    watch = EngineWatch(lambda: [("m", engine)])    # type: ignore[list-item]
    watch.check()
    return watch


def test_an_engine_that_waits_within_a_step_hangs_within_five_seconds() -> None:
    engine = ScriptedEngine()
    watch = watched(engine)
    checks = 0
    while not engine.stalled:
        watch.check()
        checks += 1
    assert checks <= 4


def test_an_idle_engine_does_not_hang() -> None:
    engine = ScriptedEngine(num_accepted=0)
    watch = watched(engine)
    for _ in range(600):
        watch.check()
    assert not engine.stalled


@pytest.mark.parametrize(
    ("longest_before", "checks"), [(1, 60), (30, 300)], ids=["a minute", "ten times its longest step"]
)
def test_an_engine_that_computes_a_long_step_does_not_hang(longest_before: int, checks: int) -> None:
    engine = ScriptedEngine()
    watch = watched(engine)

    def compute(num_checks: int) -> None:
        for _ in range(num_checks):
            engine.seconds = (engine.seconds or 0) + 1
            watch.check()

    compute(longest_before)
    engine.num_turns += 1
    compute(checks)
    assert not engine.stalled
    compute(1)
    assert engine.stalled       # an endless loop


def test_an_engine_whose_time_is_unknown_is_taken_to_compute() -> None:
    engine = ScriptedEngine(seconds=None)
    watch = watched(engine)
    for _ in range(50):
        watch.check()
    assert not engine.stalled


def test_the_processor_time_of_a_thread_that_waits_stands_still() -> None:
    model = GatedLogits()
    engine = engine_thread(model)
    watch = EngineWatch(lambda: [("m", engine)])
    engine.submit_sequences(sequence_of([1], max_tokens=3), sink=RecordingSink())
    wait_until(lambda: engine.num_turns == 2)      # which the gate holds
    for _ in range(10):
        watch.check()
    assert engine.stalled
    assert not engine.ready
    model.open_gate()
    wait_until(lambda: not engine.num_accepted)
    watch.check()
    assert engine.ready
    engine.close()
    engine.cpu_s()      # the thread has ended


@pytest.fixture
def server(tiny_repository, monkeypatch):
    monkeypatch.setattr(engine_watch, "_INTERVAL_S", 0.05)
    with LiveServer(tiny_repository) as server:
        yield server


def verdicts(server: LiveServer) -> tuple[int, str, int, int]:
    """The answers of /health, and of KServe's routes for the server and the model."""
    with httpx2.Client(base_url=server.url) as http:
        health = http.get("/health")
        status = health.json()["status"]
        ready, model = (
            http.get(path).status_code for path in ("/v2/health/ready", "/v2/models/tiny/ready")
        )
        assert http.get("/v2/health/live").status_code == 200
    return health.status_code, status, ready, model


ASKED = {"model": "tiny", "prompt": "hi", "max_tokens": 3}


def test_a_hanging_engine_is_alive_and_not_ready_until_it_goes_on(server, monkeypatch, caplog) -> None:
    assert verdicts(server) == (200, "ok", 200, 200)
    gate = threading.Event()
    model = server.model.engine._engine._runner._model
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda batch: gate.wait() and forward(batch))
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx2.post(f"{server.url}/v1/completions", json=ASKED, timeout=60))
    )
    asking.start()
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: server.model.engine.stalled)
        assert verdicts(server) == (503, "stalled", 400, 400)
        gate.set()
        asking.join()
        wait_until(lambda: not server.model.engine.stalled)
    assert verdicts(server) == (200, "ok", 200, 200)
    assert answers[0].status_code == 200
    texts = [record.getMessage() for record in caplog.records if record.name == engine_watch.__name__]
    assert texts[0].startswith("the engine of tiny hangs: it has 1 requests")
    assert texts[1:] == ["the engine of tiny goes on"]


def test_a_dead_engine_is_alive_and_not_ready(server, monkeypatch, caplog) -> None:
    def die():
        raise MemoryError

    monkeypatch.setattr(server.model.engine._engine, "step", die)
    assert httpx2.post(f"{server.url}/v1/completions", json=ASKED).status_code == 500
    assert verdicts(server) == (503, "failed", 400, 400)
    assert httpx2.post(f"{server.url}/v1/completions", json=ASKED).status_code == 503
    assert "engine thread died" in caplog.text
