from __future__ import annotations

import queue
import time

from genserve.schedulers.queue_scheduler import Timer


def test_calls_come_in_the_order_of_their_times_and_not_before():
    timer = Timer()
    called: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    now_ns = time.monotonic_ns()
    due = {"late": now_ns + 30_000_000, "early": now_ns + 10_000_000, "past": now_ns - 1}
    for name, when_ns in due.items():
        timer.call_at(when_ns, lambda name=name: called.put((name, time.monotonic_ns())))
    calls = [called.get(timeout=30) for _ in due]
    assert [name for name, _ in calls] == ["past", "early", "late"]
    assert all(at_ns >= due[name] for name, at_ns in calls)


def test_a_call_that_fails_is_logged_and_the_next_one_comes(caplog):
    timer = Timer()
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timer.call_at(0, lambda: 1 / 0)
    timer.call_at(1, lambda: called.put("next"))
    assert called.get(timeout=30) == "next"
    assert "ZeroDivisionError" in caplog.text
