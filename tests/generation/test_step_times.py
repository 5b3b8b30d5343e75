from __future__ import annotations

import pytest

from genserve.generation.scheduler import StepTimes


def note(times: StepTimes, num_decodes: int, seconds: float, *, prompt: int = 0, drafted: int = 0) -> None:
    times.note(
        num_decodes=num_decodes, num_prompt_tokens=prompt, num_drafted=drafted, seconds=seconds
    )


def test_a_guess_is_taken_before_anything_was_measured():
    assert StepTimes().doubling_prompt_tokens(8) == StepTimes().doubling_drafted_tokens(8) == 23
    assert StepTimes().decode_s(8) is None


def test_what_doubles_a_step_is_learned_from_steps_with_and_without_more_tokens():
    times = StepTimes()
    for _ in range(30):
        note(times, 8, 0.010)
        note(times, 8, 0.016, prompt=20)
        note(times, 8, 0.0105, drafted=5)
    assert times.doubling_prompt_tokens(8) == pytest.approx(0.010 / 0.0003)
    assert times.doubling_drafted_tokens(8) == pytest.approx(0.010 / 0.0001, rel=0.01)


def test_of_numbers_that_were_not_measured_the_nearest_counts():
    times = StepTimes()
    note(times, 2, 0.006)
    note(times, 30, 0.020)
    assert (times.decode_s(1), times.decode_s(5), times.decode_s(32)) == (0.006, 0.006, 0.020)


def test_one_step_that_had_to_wait_changes_little():
    times = StepTimes()
    for seconds in (0.005, 0.005, 100.0):
        note(times, 1, seconds)
    assert times.decode_s(1) == pytest.approx(0.006)


def test_the_last_few_tokens_of_a_prompt_say_nothing_of_a_chunk():
    times = StepTimes()
    note(times, 4, 0.010)
    note(times, 4, 0.0101, prompt=2)
    assert times.doubling_prompt_tokens(4) == 19


def test_steps_of_prompts_alone_and_a_clock_that_stands_still_teach_nothing():
    times = StepTimes()
    note(times, 0, 1.0, prompt=500)
    note(times, 4, 0.0)
    assert times.doubling_prompt_tokens(4) == 19


def test_drafts_are_tried_again_some_time_after_a_step_that_had_to_wait():
    times = StepTimes()
    note(times, 1, 0.020)
    note(times, 1, 0.200, drafted=5)
    assert times.doubling_drafted_tokens(1) < 1
    for _ in range(1000):
        note(times, 1, 0.020)
    assert times.doubling_drafted_tokens(1) > 4
