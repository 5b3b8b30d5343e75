from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from genserve.planner.step_model import StepModel
from genserve.tuning.measured_steps import MeasuredEngine, StepSize
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
