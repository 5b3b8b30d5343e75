from __future__ import annotations

import pytest

from genserve.tuning.measurement import Sample, Samples
from genserve.tuning.search_space import Setting

FOUR = Setting(graph="model.onnx", threads=2, batch_size=4)
EIGHT = Setting(graph="model.onnx", threads=2, batch_size=8)


def sample(setting: Setting, context: int, *steps_s: float, cpu_s: float = 0.1) -> Sample:
    return Sample(setting=setting, context=context, steps_s=steps_s, cpu_s=cpu_s, token_bytes=1000)


def test_a_measurement_is_the_median_of_all_rounds_at_each_context() -> None:
    samples = Samples()
    samples.add(sample(FOUR, 512, 0.3, 0.3, 9.0))
    samples.add(sample(FOUR, 64, 0.1))
    samples.add(sample(FOUR, 512, 0.2, 0.2))
    [measurement] = samples.measurements()
    assert measurement.step_s == {64: 0.1, 512: 0.3}
    assert measurement.inter_token_s == 0.3
    assert measurement.tokens_per_s == pytest.approx(2 * 4 / (0.1 + 0.3))
    assert measurement.cache_bytes == 4 * 512 * 1000


def test_what_was_not_measured_at_every_context_does_not_count() -> None:
    samples = Samples()
    samples.add(sample(EIGHT, 64, 0.1))
    samples.add(sample(FOUR, 64, 0.1))
    samples.add(sample(FOUR, 512, 0.1))
    assert [measurement.setting for measurement in samples.measurements()] == [FOUR]


def test_nothing_gives_nothing() -> None:
    assert Samples().measurements() == []


def test_what_others_took_of_the_core_is_a_share_of_the_time_of_all_steps() -> None:
    samples = Samples()
    assert samples.lost_share == 0
    samples.add(sample(FOUR, 64, 0.1, 0.1, cpu_s=0.15))
    samples.add(sample(EIGHT, 64, 0.6, cpu_s=0.45))
    assert samples.lost_share == pytest.approx(0.25)
    samples.add(sample(EIGHT, 64, 0.2, cpu_s=0.9))
    assert samples.lost_share == 0
