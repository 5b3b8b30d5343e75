"""Draw: the numbers that rows draw by, and the rows that are taken one by one; pure.

Most rows draw by temperature, top-k, top-p and min-p: `sample_logits` takes all of these in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray
from genserve.generation.stages import Stages, left_by
from genserve.generation.truncation import Truncation, kept
from genserve.kernels.logits import SAMPLING_RULE, sample_logits

__all__ = ["Drawn", "SamplingRows", "draw", "uniforms"]

# Makes of a seed another one, for a second number per step.
ASIDE = np.uint64(0xD1B54A32D192ED03)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How each of R rows draws."""

    temperature: FloatArray             # [R], above 0
    truncations: tuple[Truncation, ...]     # R of them
    stages: tuple[Stages | None, ...]       # R of them; where there are some, the two above are not used
    seed: NDArray[np.uint64]            # [R]
    step: NDArray[np.uint64]            # [R], how many tokens the answer has

    def alone(self, index: int) -> bool:
        """Whether one row has rules that `sample_logits` does not know: `draw` takes it."""
        return self.stages[index] is not None or not self.truncations[index].by_level

    def table(self, rows: Sequence[int], *, num_rows: int) -> NDArray[np.void]:
        """Return the rules of so many rows for `sample_logits`: [num_rows] SAMPLING_RULE.

        Args:
            rows: which these are; all others take the best token, and so do those that `draw` takes.
            num_rows: with the others.
        """
        table = np.zeros(num_rows, SAMPLING_RULE)
        uniform = uniforms(self.seed, self.step).tolist() if rows else ()
        for index, (row, number) in enumerate(zip(rows, uniform, strict=True)):
            temperature = 0.0 if self.alone(index) else self.temperature[index]
            table[row] = self.truncations[index].sampling_rule(temperature=temperature, uniform=number)
        return table

    def chance(self, index: int) -> float:
        """Return a number in [0, 1) of one row that has nothing to do with the one it draws by."""
        one = slice(index, index + 1)
        return float(uniforms(self.seed[one] ^ ASIDE, self.step[one])[0])


class Drawn(NamedTuple):
    """One row's token, and what it was drawn from."""

    token_id: int
    left: FloatArray    # logits after all rules, the best 0: [V]


def uniforms(seed: NDArray[np.uint64], step: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per row, a function of (seed, step) alone.

    Counter-based, so that no generator has a state that the order of a batch could disturb.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators" (OOPSLA 2014), applied to the seed and then to seed and step.
    """
    mixed = _mix(_mix(seed) + step * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def draw(row: FloatArray, rows: SamplingRows, *, index: int, uniform: float) -> Drawn:
    """Draw a row's token by itself, from what its rules leave one after the other.

    Args:
        row: [V] float32 with a finite maximum; not modified.
        rows: the parameters of several rows.
        index: of this one among them.
        uniform: its number of `uniforms`.
    """
    if (stages := rows.stages[index]) is not None:
        ids, values = left_by(row, stages, chance=rows.chance(index))
    else:
        scaled = row - row.max()
        scaled /= rows.temperature[index]
        ids = kept(scaled, rows.truncations[index])
        values = scaled[ids]
    rule = np.array([Truncation().sampling_rule(uniform=uniform)], SAMPLING_RULE)
    place = sample_logits(values[None], rule)["token_id"][0]
    left = np.full_like(row, -np.inf)
    left[ids] = values
    return Drawn(int(ids[place]), left)
