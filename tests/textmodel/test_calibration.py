"""Temperatures and calibration errors, compared with scipy and with sets whose temperature is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from genserve.errors import RepositoryError
from genserve.textmodel.calibration import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Calibration,
    calibration_error,
    fit,
    fit_temperature,
    read_calibration,
    write_calibration,
)
from genserve.textmodel.logits_config import CALIBRATION_FILE, version_files


def labelled_set(temperature: float, *, num: int = 3000, seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Log-probabilities of 2 to 5 options, and labels drawn with their probabilities at a temperature."""
    random = np.random.default_rng(seed)
    logprobs = [
        log_softmax(random.normal(scale=4, size=int(random.integers(2, 6)))) - random.random()
        for _ in range(num)
    ]
    labels = [int(random.choice(len(one), p=np.exp(log_softmax(one / temperature)))) for one in logprobs]
    return logprobs, labels


@pytest.mark.parametrize(
    "temperature",
    [pytest.param(0.5, marks=pytest.mark.extended), pytest.param(1.0, marks=pytest.mark.extended), 2.5],
)
def test_the_temperature_is_the_one_of_least_loss(temperature):
    logprobs, labels = labelled_set(temperature)
    padded = np.array([np.pad(one, (0, 5 - len(one)), constant_values=-np.inf) for one in logprobs])

    def loss(log_temperature: float) -> float:
        found = log_softmax(padded / np.exp(log_temperature), axis=1)
        return -float(np.mean(found[np.arange(len(labels)), labels]))

    reference = np.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x)
    fitted = fit_temperature(logprobs, labels)
    assert fitted == pytest.approx(reference, rel=1e-4)
    assert fitted == pytest.approx(temperature, rel=0.1)


def test_labels_without_an_end_give_the_outermost_temperatures():
    sure = [np.log([0.6, 0.4])] * 10
    assert fit_temperature(sure, [0] * 10) == pytest.approx(MIN_TEMPERATURE)
    assert fit_temperature(sure, [1] * 10) == pytest.approx(MAX_TEMPERATURE)


def test_the_calibration_error_is_the_mean_gap_of_the_bins():
    # Two bins: 0.85 with three of four right, and 0.65 with none of one.
    logprobs = [np.log([0.85, 0.15])] * 4 + [np.log([0.35, 0.65])]
    assert calibration_error(logprobs, [0, 0, 0, 1, 0]) == pytest.approx((4 * 0.1 + 0.65) / 5)
    assert calibration_error([np.log([1.0, 1e-30])], [0]) == pytest.approx(0)
    # The sum of the options' probabilities does not count, only their shares.
    assert calibration_error([one - 3 for one in logprobs], [0, 0, 0, 1, 0]) == pytest.approx(0.21)


def test_a_fit_has_the_error_of_answers_it_was_not_fitted_to():
    logprobs, labels = labelled_set(3.0)
    found = fit(logprobs, labels, groups=range(len(labels)))
    assert found.num_answers == len(labels)
    assert found.error_after < found.error_before / 4
    # One outlier per group: without it the others fit perfectly, so that it is a surprise to each fold.
    odd, marked = [np.log([0.9, 0.1])] * 20, [1] * 4 + [0] * 16
    of_own = fit(odd, marked, groups=[0] * 4 + [*range(1, 17)])
    assert of_own.error_after > calibration_error([one / of_own.temperature for one in odd], marked)


def test_a_calibration_is_read_as_it_was_written_and_is_no_file_of_the_version(tmp_path):
    assert read_calibration(tmp_path) is None
    calibration = Calibration(temperatures={"noul": 1.25}, model={"logits": "0" * 64, "precision": "int8"})
    (tmp_path / "model.onnx").touch()
    write_calibration(tmp_path, calibration, fits={})
    assert read_calibration(tmp_path) == calibration
    assert [path.name for path in version_files(tmp_path)] == ["model.onnx"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"calibration": 2, "temperatures": {}, "model": {}}),
        json.dumps({"calibration": 1, "temperatures": {"noul": 0}, "model": {}}),
        json.dumps({"calibration": 1, "temperatures": {"noul": "warm"}, "model": {}}),
        json.dumps({"calibration": 1, "temperatures": {"noul": 1}}),
        "[" * 100_000,
    ],
)
def test_a_broken_calibration_is_rejected(tmp_path, text):
    (tmp_path / CALIBRATION_FILE).write_text(text)
    with pytest.raises(RepositoryError) as raised:
        read_calibration(tmp_path)
    assert CALIBRATION_FILE in raised.value.message
