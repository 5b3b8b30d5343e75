from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from genserve.planner.step_model import StepModel
from genserve.tuning.measured_steps import MeasuredEngine, MeasuredStep, StepSize
from tests.planner.conftest import measured_steps, seconds


def test_steps_between_the_measured_ones_are_predicted(engine: MeasuredEngine) -> None:
    model = StepModel(engine.steps, max_tokens=64)
    assert np.abs(model.errors).max() < 1e-6
    size = StepSize(decodes=3, context_tokens=400, prompt_tokens=17, prompt_pairs=900, rows=4)
    assert model.seconds(size) == pytest.approx(seconds(size))


def test_a_disturbed_measurement_hardly_moves_the_others() -> None:
    steps = measured_steps()
    steps[5] = replace(steps[5], seconds=3 * steps[5].seconds)
    model = StepModel(steps, max_tokens=64)
    assert model.errors[5] < -0.6
    assert np.median(np.abs(model.errors)) < 0.01


def test_more_context_is_never_faster() -> None:
    steps = [replace(step, seconds=0.02 - 1e-6 * step.size.context_tokens) for step in measured_steps()]
    model = StepModel(steps, max_tokens=64)
    assert model.context_token_s == 0
    assert model.seconds(steps[0].size) == pytest.approx(0.02, rel=0.05)


def test_a_step_takes_time_even_where_noise_makes_the_fit_negative() -> None:
    decode = StepSize(decodes=1, context_tokens=100, prompt_tokens=0, prompt_pairs=0, rows=1)
    sizes = [replace(decode, context_tokens=context) for context in (100, 200, 400)]
    steps = [MeasuredStep(size=size, seconds=1e-4 * size.context_tokens - 0.005) for size in sizes]
    model = StepModel(steps, max_tokens=64)
    assert model.context_token_s == pytest.approx(1e-4)
    assert model.seconds(replace(decode, context_tokens=1)) == steps[0].seconds / 2
