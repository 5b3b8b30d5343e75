from __future__ import annotations

import pytest

from genserve.generation.step_times import StepTimes


def test_a_guess_is_taken_before_anything_was_measured():
    assert StepTimes().doubling_tokens(8) == 23
    assert StepTimes().decode_s(8) is None


def test_what_doubles_a_step_is_learned_from_steps_with_and_without_more_tokens():
    times = StepTimes()
    for _ in range(30):
        times.note(num_decodes=8, num_more=0, seconds=0.010)
        times.note(num_decodes=8, num_more=20, seconds=0.016)
    assert times.doubling_tokens(8) == pytest.approx(0.010 / 0.0003)


def test_of_numbers_that_were_not_measured_the_nearest_counts():
    times = StepTimes()
    times.note(num_decodes=2, num_more=0, seconds=0.006)
    times.note(num_decodes=30, num_more=0, seconds=0.020)
    assert (times.decode_s(1), times.decode_s(5), times.decode_s(32)) == (0.006, 0.006, 0.020)


def test_one_step_that_had_to_wait_changes_little():
    times = StepTimes()
    for _ in range(10):
        times.note(num_decodes=1, num_more=0, seconds=0.005)
    times.note(num_decodes=1, num_more=0, seconds=100.0)
    assert times.decode_s(1) == pytest.approx(0.006)


def test_steps_of_prompts_alone_and_a_clock_that_stands_still_teach_nothing():
    times = StepTimes()
    times.note(num_decodes=0, num_more=500, seconds=1.0)
    times.note(num_decodes=4, num_more=0, seconds=0.0)
    assert times.doubling_tokens(4) == 19
