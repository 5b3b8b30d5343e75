"""Step model: how long a step takes, fitted to the measured steps of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from genserve.tuning.measured_steps import MeasuredStep, StepSize

_NUM_ROUNDS = 20        # rounds of the fit
_LEAST_ERROR = 0.01     # relative; smaller ones are noise, which must not dominate the weights
_LEAST_SHARE = 0.5      # no step is shorter than this share of the shortest measured one


class StepModel:
    """Predicts the seconds of a step of any size.

        seconds = h(tokens) + a x context_tokens + b x prompt_pairs + c x rows

    `tokens` are decodes and prompt tokens together, `h` is piecewise linear between the powers of two. The
    coefficients minimise the sum of the relative errors, which a few disturbed measurements hardly move. None
    of a, b and c is negative. No step takes less than half as long as the shortest one that was measured.

    Attributes:
        errors: the relative error of each measured step; positive: the model predicts too much.
        context_token_s: the coefficient a.
    """

    def __init__(self, steps: Sequence[MeasuredStep], *, max_tokens: int) -> None:
        """Fit the model; steps have at most `max_tokens` tokens."""
        sizes = [step.size for step in steps]
        seconds = np.array([step.seconds for step in steps])
        tokens = [size.decodes + size.prompt_tokens for size in sizes]
        self._knots = _knots(tokens)
        columns = np.column_stack(
            [
                self._hats(tokens),
                [size.context_tokens for size in sizes],
                [size.prompt_pairs for size in sizes],
                [size.rows for size in sizes],
            ]
        )
        found = _fit(columns, seconds, num_free=len(self._knots))
        self.errors = columns @ found / seconds - 1
        self._least_s = _LEAST_SHARE * float(seconds.min())
        self.context_token_s, self._pair_s, self._row_s = map(float, found[-3:])
        # `h` by the number of tokens: a table is quicker than interpolation.
        self._tokens_s = [
            float(value) for value in self._hats(range(max_tokens + 1)) @ found[: len(self._knots)]
        ]

    def seconds(self, size: StepSize) -> float:
        """Return how long a step takes."""
        return max(
            self._least_s,
            self._tokens_s[size.decodes + size.prompt_tokens]
            + self.context_token_s * size.context_tokens
            + self._pair_s * size.prompt_pairs
            + self._row_s * size.rows,
        )

    def _hats(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return the weights of the knots for numbers of tokens, [n, knots]; linear beyond the last one."""
        identity = np.eye(len(self._knots))
        if len(self._knots) == 1:
            return np.ones((len(tokens), 1))
        index = np.clip(np.searchsorted(self._knots, tokens) - 1, 0, len(self._knots) - 2)
        low, high = self._knots[index], self._knots[index + 1]
        share = np.maximum(0, (np.asarray(tokens) - low) / (high - low))[:, None]
        return np.asarray((1 - share) * identity[index] + share * identity[index + 1])


def _knots(tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the powers of two up to the most tokens of a step, and this number."""
    least, most = min(tokens), max(tokens)
    powers = [2.0**power for power in range(32) if least < 2**power < most / 1.1]
    return np.array(sorted({float(least), *powers, float(most)}))


def _fit(columns: NDArray[np.float64], seconds: NDArray[np.float64], *, num_free: int) -> NDArray[np.float64]:
    """Return the coefficients with the least sum of relative errors.

    Those after the first `num_free` are not negative.
    """
    kept = list(range(columns.shape[1]))
    while True:
        weights = 1 / seconds
        for _ in range(_NUM_ROUNDS):
            scaled = columns[:, kept] * weights[:, None]
            found, *_ = np.linalg.lstsq(scaled, seconds * weights, rcond=None)
            errors = np.abs(columns[:, kept] @ found / seconds - 1)
            weights = 1 / (seconds * np.sqrt(np.maximum(errors, _LEAST_ERROR)))
        signs = zip(kept, found, strict=True)
        negative = [index for index, value in signs if index >= num_free and value < 0]
        if not negative:
            coefficients = np.zeros(columns.shape[1])
            coefficients[kept] = found
            return coefficients
        kept.remove(negative[0])
