"""Who is refused, and when they should come back; by a clock that the test moves."""

from __future__ import annotations

import pytest

from genserve.errors import Overloaded
from genserve.generation.admission_control import AdmissionControl, QueueLimits
from genserve.metrics import Metrics


def control(*, num_slots: int = 2, **limits: float | None) -> AdmissionControl:
    wanted = QueueLimits(**({"max_requests": 1000} | limits))  # type: ignore[arg-type]
    return AdmissionControl(num_slots=num_slots, limits=wanted, metrics=Metrics().for_model("test"))


def busy(admission: AdmissionControl) -> AdmissionControl:
    """Fill its two slots."""
    admission.num_accepted += 2
    return admission


def join(admission: AdmissionControl, *, num_tokens: int = 1, priority: int = 0, now_s: float = 0.0) -> None:
    admission.check(1, num_tokens=num_tokens, priority=priority, now_s=now_s)
    admission.num_accepted += 1
    admission.wait(1, num_tokens=num_tokens, priority=priority)


def serve_full(admission: AdmissionControl, *, seconds: float, count: int) -> None:
    """Let so many begin while the engine is full, one in each step."""
    for _ in range(count):
        admission.note_step(seconds, num_begun=1, full=True, num_waiting=1)


def test_prompts_beyond_the_limit_on_tokens_wait_elsewhere() -> None:
    admission = control(max_tokens=10)
    join(admission, num_tokens=6)
    join(admission, num_tokens=4)
    with pytest.raises(Overloaded, match="10 tokens are waiting") as refused:
        join(admission, num_tokens=1)
    assert "--max-queue-tokens" in refused.value.remedy
    admission.begin(1, num_tokens=6, priority=0)
    join(admission, num_tokens=6)


def test_a_prompt_longer_than_all_that_may_wait_is_taken_where_none_waits() -> None:
    admission = control(max_tokens=10)
    join(admission, num_tokens=99)
    with pytest.raises(Overloaded):
        join(admission)


def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    admission = busy(control(max_wait_s=10))
    serve_full(admission, seconds=2.0, count=8)
    for _ in range(5):
        join(admission)     # the fifth waits for 10 s
    with pytest.raises(Overloaded, match="would wait about 12 s"):
        join(admission)


def test_before_the_engine_was_full_nobody_is_refused_for_a_wait_that_is_not_known() -> None:
    admission = control(max_wait_s=0.001)
    for _ in range(50):
        join(admission)
    admission.note_step(60.0, num_begun=1, full=True, num_waiting=1)   # one is not enough for two slots
    join(admission)


def test_a_line_that_free_slots_are_about_to_take_refuses_nobody() -> None:
    admission = control(num_slots=4, max_wait_s=3)
    serve_full(admission, seconds=2.0, count=8)
    admission.note_step(2.0, num_begun=1, full=False, num_waiting=0)
    for _ in range(5):
        join(admission)     # the fifth has nobody in front of it but those that the slots take
    with pytest.raises(Overloaded, match="would wait about 4 s"):
        join(admission)


def test_those_that_begin_together_count_until_nobody_waits() -> None:
    admission = busy(control(max_wait_s=10))
    for _ in range(4):
        admission.note_step(8.0, num_begun=0, full=True, num_waiting=9)
        admission.note_step(1.0, num_begun=3, full=False, num_waiting=9)     # of four free slots
        admission.note_step(1.0, num_begun=1, full=True, num_waiting=8)
    for _ in range(4):
        join(admission)     # the fourth waits for 10 s
    with pytest.raises(Overloaded, match=r"would wait about 1[23] s"):
        join(admission)


def test_where_memory_is_short_free_slots_are_no_help() -> None:
    admission = control(num_slots=4, max_wait_s=3)
    serve_full(admission, seconds=2.0, count=8)
    join(admission)
    with pytest.raises(Overloaded, match="would wait about 4 s"):
        join(admission)


def test_the_prediction_follows_an_engine_that_becomes_slower() -> None:
    admission = busy(control(max_wait_s=10))
    serve_full(admission, seconds=0.1, count=8)
    join(admission)
    admission.note_step(90.0, num_begun=0, full=True, num_waiting=1)
    with pytest.raises(Overloaded, match="would wait"):
        join(admission)


def test_those_of_lower_priority_are_no_line_for_one_of_higher() -> None:
    admission = busy(control(max_wait_s=10))
    serve_full(admission, seconds=2.0, count=8)
    for _ in range(5):
        join(admission, priority=1)
    with pytest.raises(Overloaded):
        join(admission, priority=1)
    join(admission, priority=0)


def test_the_refused_are_told_to_come_back_one_after_the_other() -> None:
    admission = busy(control(max_wait_s=10))
    serve_full(admission, seconds=2.0, count=8)
    for _ in range(5):
        join(admission)
    told = []
    for _ in range(12):
        with pytest.raises(Overloaded) as refused:
            join(admission, now_s=100.0)
        told.append(refused.value.retry_after_s)
    assert told == pytest.approx([*range(1, 11), 10, 10])   # later the line might have run dry
    with pytest.raises(Overloaded) as refused:
        join(admission, now_s=105.0)
    assert refused.value.retry_after_s == pytest.approx(6)


def test_a_refusal_by_an_engine_that_nobody_knows_yet_says_half_a_second() -> None:
    admission = control(max_requests=0, num_slots=1)
    join(admission)
    with pytest.raises(Overloaded, match="the limit is 1") as refused:
        join(admission)
    assert refused.value.retry_after_s == pytest.approx(0.5)


def test_a_line_that_everybody_has_left_is_forgotten() -> None:
    admission = control(num_slots=4, max_wait_s=3)
    serve_full(admission, seconds=2.0, count=8)
    join(admission)
    admission.begin(1, num_tokens=1, priority=0)
    admission.num_accepted -= 1
    for _ in range(4):
        join(admission)
