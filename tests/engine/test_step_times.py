"""The measured times of steps, and what tokens of prompts and drafts cost."""

from __future__ import annotations

import pytest

from genserve.engine.step_times import StepTimes


def test_step_times_are_guessed_before_the_first_measurement():
    assert StepTimes().doubling_prompt_tokens(8) == StepTimes().doubling_drafted_tokens(8) == 23
    assert StepTimes().decode_s(8) is None


def test_step_times_learn_how_many_tokens_double_a_step():
    times = StepTimes()
    for _ in range(30):
        times.record(0.010, num_decodes=8)
        times.record(0.016, num_decodes=8, num_prompt_tokens=20)
        times.record(0.0105, num_decodes=8, num_drafted=5)
    assert times.doubling_prompt_tokens(8) == pytest.approx(0.010 / 0.0003)
    assert times.doubling_drafted_tokens(8) == pytest.approx(0.010 / 0.0001, rel=0.01)


def test_the_nearest_measured_number_of_decodes_counts():
    times = StepTimes()
    times.record(0.006, num_decodes=2)
    times.record(0.020, num_decodes=30)
    assert (times.decode_s(1), times.decode_s(5), times.decode_s(32)) == (0.006, 0.006, 0.020)


def test_one_slow_step_changes_the_averages_little():
    times = StepTimes()
    for seconds in (0.005, 0.005, 100.0):
        times.record(seconds, num_decodes=1)
    assert times.decode_s(1) == pytest.approx(0.006)


def test_a_few_tokens_of_a_prompt_are_not_measured():
    times = StepTimes()
    times.record(0.010, num_decodes=4)
    times.record(0.0101, num_decodes=4, num_prompt_tokens=2)
    assert times.doubling_prompt_tokens(4) == 19


def test_steps_without_decodes_or_without_time_are_not_measured():
    times = StepTimes()
    times.record(1.0, num_decodes=0, num_prompt_tokens=500)
    times.record(0.0, num_decodes=4)
    assert times.doubling_prompt_tokens(4) == 19


def test_drafting_resumes_some_time_after_a_slow_step():
    times = StepTimes()
    times.record(0.020, num_decodes=1)
    times.record(0.200, num_decodes=1, num_drafted=5)
    assert times.doubling_drafted_tokens(1) < 1
    for _ in range(1000):
        times.record(0.020, num_decodes=1)
    assert times.doubling_drafted_tokens(1) > 4
