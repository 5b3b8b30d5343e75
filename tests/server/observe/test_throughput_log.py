from __future__ import annotations

import logging

import httpx2
import pytest

from genserve.generation_metrics import Metrics
from genserve.server.observe.throughput_log import ThroughputLog
from tests.fakes.sequences import Clock
from tests.support.live_server import LiveServer, wait_until


@pytest.fixture
def lines(caplog):
    name = "genserve.server.observe.throughput_log"
    caplog.set_level(logging.INFO, logger=name)

    def taken() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name == name]
        caplog.clear()
        return messages

    return taken


def test_a_model_that_works_has_a_line_and_an_idle_one_none(lines):
    metrics, clock = Metrics(), Clock()
    log = ThroughputLog(metrics, clock=clock)
    works = metrics.for_model("works")
    metrics.for_model("idle")
    works.step(seconds=0.1, prompt_tokens=200, preempted=0)
    works.first_token(seconds=0.1, prompt_tokens=300, cached_tokens=100)
    works.generated(tokens=50, prompt_tokens=200, latencies_s={})
    works.occupancy(running=2, waiting=1, waiting_tokens=7, cache_usage=0.25)
    clock.now_s += 10
    log.write()
    assert lines() == [
        "works: Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 33.3%"
    ]


def test_a_line_counts_since_the_last_one_and_ends_with_the_work(lines):
    metrics, clock = Metrics(), Clock()
    log = ThroughputLog(metrics, clock=clock)
    model = metrics.for_model("m")
    model.occupancy(running=1, waiting=0, waiting_tokens=0, cache_usage=0.5)
    shown = []
    for tokens in (40, 80, 0):
        model.generated(tokens=tokens, prompt_tokens=0, latencies_s={})
        clock.now_s += 4
        log.write()
        shown += lines()
    generated = [line.split("generation throughput: ")[1].split(" ")[0] for line in shown]
    assert generated == ["10.0", "20.0", "0.0"]
    model.occupancy(running=0, waiting=0, waiting_tokens=0, cache_usage=0.0)
    log.write()
    assert lines() == []


def test_a_server_writes_the_line_while_it_generates(tiny_repository, monkeypatch, lines):
    monkeypatch.setattr("genserve.server.observe.throughput_log._INTERVAL_S", 0.01)
    seen: list[str] = []
    with LiveServer(tiny_repository) as server:
        body = {"prompt": "a b c", "max_tokens": 8, "ignore_eos": True}
        assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
        wait_until(lambda: seen.extend(lines()) or seen)
    assert seen[0].startswith("tiny: Avg prompt throughput: ")
