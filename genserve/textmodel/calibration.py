"""Calibration: temperatures of decisions, fitted to labelled answers, so that probabilities come true.

The log-probabilities of a question's options are divided by the temperature of the question's type before
they become probabilities (Guo et al., "On Calibration of Modern Neural Networks", 2017). It changes how sure
the model is, and never which option is the likeliest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import RepositoryError
from genserve.files import read_regular_text
from genserve.textmodel.logits_config import CALIBRATION_FILE

FORMAT = 1      # of the file
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
NUM_FOLDS = 5   # of the cross-validation
_NUM_BINS = 10
_NUM_STEPS = 60     # of the golden section: each one shortens the interval to 62 %
_MAX_BYTES = 1 << 20

Logprobs = Sequence[NDArray[np.float64]]    # of each answer, [options]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The temperatures of a model.

    Attributes:
        temperatures: by type of question.
        model: what says that a model is the one that they were fitted for; see `calibrated_model`.
    """

    temperatures: Mapping[str, float]
    model: Mapping[str, Any]


def calibrated_model(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a model's description by its receipts that change the probabilities of options."""
    return {name: value for name, value in described.items() if name != "decoder"}


def read_calibration(folder: Path) -> Calibration | None:
    """Return the calibration in the version folder of a logits stage; None: there is none.

    Raises:
        RepositoryError: the file is broken.
    """
    path = folder / CALIBRATION_FILE
    try:
        written = json.loads(read_regular_text(path, max_bytes=_MAX_BYTES))
        if written["calibration"] != FORMAT:
            raise ValueError(f"its format is {written['calibration']!r}, not {FORMAT}")
        temperatures = {str(name): float(value) for name, value in written["temperatures"].items()}
        if not all(MIN_TEMPERATURE <= value <= MAX_TEMPERATURE for value in temperatures.values()):
            raise ValueError(f"a temperature is not from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}")
        return Calibration(temperatures=temperatures, model=dict(written["model"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RepositoryError(
            f"{path} is not a calibration: {error}", remedy="delete it, and run `genserve calibrate` again"
        ) from None


def write_calibration(folder: Path, calibration: Calibration, *, fits: Mapping[str, Fit]) -> Path:
    """Write a calibration into the version folder of a logits stage; return its file."""
    path = folder / CALIBRATION_FILE
    document = {
        "calibration": FORMAT,
        "temperatures": dict(calibration.temperatures),
        "fits": {name: fit.as_dict() for name, fit in fits.items()},
        "model": dict(calibration.model),
    }
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well a temperature fits the labelled answers to questions of one type.

    Attributes:
        temperature: fitted to all answers.
        num_answers: the number of answers.
        accuracy: the share of answers whose label is the likeliest option.
        error_before: the expected calibration error without a temperature.
        error_after: that of probabilities by temperatures which were fitted to other answers, in
            cross-validation.
    """

    temperature: float
    num_answers: int
    accuracy: float
    error_before: float
    error_after: float

    def as_dict(self) -> dict[str, float]:
        """Return the fields for JSON."""
        return {
            "temperature": self.temperature,
            "num_answers": self.num_answers,
            "accuracy": self.accuracy,
            "error_before": self.error_before,
            "error_after": self.error_after,
        }


def fit(logprobs: Logprobs, labels: Sequence[int], *, groups: Sequence[int]) -> Fit:
    """Fit the temperature of one type of questions.

    Args:
        logprobs: the log-probabilities of the options of each answer; at least `NUM_FOLDS` answers.
        labels: the index of the option that each answer should be.
        groups: a number of each answer; those with the same number are in one fold.
    """
    folds = np.unique(groups, return_inverse=True)[1] % NUM_FOLDS
    shown: list[NDArray[np.float64]] = [*logprobs]
    for fold in range(NUM_FOLDS):
        inside = np.flatnonzero(folds == fold).tolist()
        outside = np.flatnonzero(folds != fold).tolist()
        if inside and outside:
            temperature = fit_temperature([logprobs[i] for i in outside], [labels[i] for i in outside])
            for index in inside:
                shown[index] = logprobs[index] / temperature
    hits = [int(one.argmax()) == label for one, label in zip(logprobs, labels, strict=True)]
    return Fit(
        temperature=fit_temperature(logprobs, labels),
        num_answers=len(labels),
        accuracy=sum(hits) / len(hits),
        error_before=calibration_error(logprobs, labels),
        error_after=calibration_error(shown, labels),
    )


def fit_temperature(logprobs: Logprobs, labels: Sequence[int]) -> float:
    """Return the temperature with the least negative log-likelihood of the labels, by golden section.

    The likelihood is concave in 1 / temperature, so there is one minimum; it is sought between
    `MIN_TEMPERATURE` and `MAX_TEMPERATURE`.
    """
    options = np.full((len(logprobs), max(map(len, logprobs))), -np.inf)
    for row, one in zip(options, logprobs, strict=True):
        row[: len(one)] = one
    chosen = options[np.arange(len(labels)), labels]

    def loss(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        losses = np.logaddexp.reduce(options / temperature, axis=1) - chosen / temperature
        return float(np.mean(losses))

    ratio = (math.sqrt(5) - 1) / 2
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(_NUM_STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return min(max(math.exp((low + high) / 2), MIN_TEMPERATURE), MAX_TEMPERATURE)


def calibration_error(logprobs: Logprobs, labels: Sequence[int]) -> float:
    """Return the expected calibration error, 0 to 1, in ten bins of equal width.

    It is the mean distance between the probability of the likeliest option and the share of answers in its
    bin for which that option is right.
    """
    tops = np.array([float(np.exp(one.max() - np.logaddexp.reduce(one))) for one in logprobs])
    hits = np.array([int(one.argmax()) == label for one, label in zip(logprobs, labels, strict=True)])
    bins = np.minimum((tops * _NUM_BINS).astype(int), _NUM_BINS - 1)
    gaps = [abs(float((hits[bins == one] - tops[bins == one]).sum())) for one in range(_NUM_BINS)]
    return sum(gaps) / len(tops)
