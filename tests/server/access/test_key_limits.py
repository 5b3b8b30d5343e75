"""The limits of one key, under a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.errors import RateLimited
from genserve.server.access.key_usage import KeyLimits, KeyUsage


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class Request:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def usage(**limits: int) -> tuple[KeyUsage, Clock]:
    clock = Clock()
    return KeyUsage(KeyLimits(**limits), clock=clock), clock


def rejected(key: KeyUsage) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        key.admit(Request())
    return caught.value


def test_a_minutes_worth_of_requests_may_come_at_once_and_then_at_the_rate():
    key, clock = usage(requests_per_minute=30)
    for _ in range(30):
        key.admit(Request())
    error = rejected(key)
    assert error.reason == "requests_per_minute"
    assert error.retry_after_s == pytest.approx(2)
    clock.now_s += 2.001
    key.admit(Request())
    rejected(key)


def test_concurrent_requests_end():
    key, _ = usage(concurrent_requests=2)
    first, second = Request(), Request()
    key.admit(first)
    key.admit(second)
    assert rejected(key).reason == "concurrent_requests"
    key.end(first)
    key.end(first)
    key.admit(Request())
    rejected(key)


def test_tokens_count_while_they_are_generated_and_a_debt_delays_the_next_request():
    key, clock = usage(tokens_per_minute=60)
    request = Request(prompt_tokens=40)
    key.admit(request)
    key.admit(Request())
    request.completion_tokens = 50
    assert rejected(key).retry_after_s == pytest.approx(31)
    request.completion_tokens = 80
    key.end(request)
    assert rejected(key).retry_after_s == pytest.approx(61)
    clock.now_s += 61.001
    key.admit(Request())


def test_a_long_answer_within_the_rate_is_no_debt():
    """Its tokens were used over ten minutes, in which ten times as many came back."""
    key, clock = usage(tokens_per_minute=60)
    request = Request()
    key.admit(request)
    clock.now_s += 600
    request.completion_tokens = 500
    key.admit(Request())


def test_a_rejected_request_uses_nothing():
    key, clock = usage(requests_per_minute=1, concurrent_requests=5)
    key.admit(Request())
    for _ in range(10):
        rejected(key)
    clock.now_s += 60.001
    key.admit(Request())


def test_other_limits_apply_at_once_and_what_was_used_still_counts():
    key, _ = usage(requests_per_minute=10)
    for _ in range(8):
        key.admit(Request())
    key.change(KeyLimits(requests_per_minute=9))
    key.admit(Request())
    rejected(key)
    key.change(KeyLimits(concurrent_requests=9))
    rejected(key)
    key.change(KeyLimits())
    key.admit(Request())


@given(
    per_minute=st.integers(1, 100),
    gaps_s=st.lists(st.floats(0, 120, allow_nan=False), max_size=60),
)
def test_no_interval_has_more_than_the_rate_and_a_retry_after_the_wait_is_admitted(per_minute, gaps_s):
    key, clock = usage(requests_per_minute=per_minute)
    admitted: list[float] = []
    for gap_s in gaps_s:
        clock.now_s += gap_s
        try:
            key.admit(Request())
        except RateLimited as error:
            clock.now_s += error.retry_after_s + 1e-6
            key.admit(Request())
        admitted.append(clock.now_s)
        for number, then_s in enumerate(reversed(admitted), start=1):
            assert number <= per_minute * (1 + (clock.now_s - then_s) / 60) + 1e-6


def test_a_total_never_falls_while_a_request_ends():
    key, _ = usage()
    seen: list[int] = []

    class Ending(Request):
        @property
        def cached_tokens(self) -> int:
            # It is read while the request is counted. Another thread could run then.
            if not seen:
                seen.append(0)
                seen.append(key.totals().requests)
            return 0

        @cached_tokens.setter
        def cached_tokens(self, number: int) -> None:
            pass

    request = Ending()
    key.admit(request)
    key.end(request)
    assert seen == [0, 1]
    assert key.totals().requests == 1
