from __future__ import annotations

import asyncio
import time

import httpx2
from prometheus_client import CollectorRegistry

from genserve.server.observe.event_loop_lag import EventLoopLag
from tests.support.live_server import wait_until

_NAME = "genserve_event_loop_lag"


def registered(lag: EventLoopLag) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(lag)
    return registry


async def test_a_stall_is_counted_and_remembered_as_the_longest():
    lag = EventLoopLag()
    registry = registered(lag)
    lag.start()
    time.sleep(0.3)     # noqa: ASYNC251  the stall
    while not registry.get_sample_value(f"{_NAME}_seconds_count"):
        await asyncio.sleep(0.001)
    lag.stop()
    assert registry.get_sample_value(f"{_NAME}_seconds_bucket", {"le": "0.25"}) == 0
    assert registry.get_sample_value(f"{_NAME}_seconds_sum") >= 0.25
    assert lag.longest_s == registry.get_sample_value(f"{_NAME}_max_seconds") >= 0.25


async def test_a_stopped_probe_counts_no_more():
    lag = EventLoopLag()
    lag.start()
    lag.stop()
    await asyncio.sleep(0.05)
    assert registered(lag).get_sample_value(f"{_NAME}_seconds_count") == 0


def test_a_server_probes_its_loop(tiny_server):
    def count() -> float:
        text = httpx2.get(f"{tiny_server.url}/metrics").text
        [line] = [line for line in text.splitlines() if line.startswith(f"{_NAME}_seconds_count ")]
        return float(line.split()[1])

    before = count()
    wait_until(lambda: count() > before)
    assert f"\n{_NAME}_max_seconds " in httpx2.get(f"{tiny_server.url}/metrics").text
