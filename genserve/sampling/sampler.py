"""Sampler: rows of logits to token ids and log-probabilities, on the host; pure.

Most rows draw by temperature, top-k, top-p and min-p: `sample_logits` takes all of these in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.completion import TokenLogprob
from genserve.generation.logits_model import FloatArray, LogitsArray, TokenArray, on_host
from genserve.kernels.logits import SAMPLING_RULE, sample_logits, scan_logits
from genserve.sampling.logits_edits import LogitsEdits, apply_edits
from genserve.sampling.staged_sampler import Stages, Truncation, kept, left_by

__all__ = [
    "LOWEST",
    "Asked",
    "Drawn",
    "SamplerOutput",
    "SamplingMetadata",
    "draw",
    "likelihood",
    "sample_rows",
    "select_rows",
    "uniforms",
]


LOWEST = -9999.0    # of a token that cannot be, since JSON has no infinity; vLLM's figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one row is asked for beside its token: how likely that was, and how likely which others."""

    row: int
    num_top: int = 0                # so many of the most likely ones
    named: tuple[int, ...] = ()     # or these
    processed: bool = False         # after all sampling rules; False: as the model has it


def likelihood(
    logits: LogitsArray, token_id: int, *, num_top: int = 0, named: Sequence[int] = ()
) -> TokenLogprob:
    """Return the log-probability of a token, and of others: the best first, of equals the lowest id.

    Args:
        logits: [V] float32, on any device; not modified. With a NaN in it, so has what is returned.
        token_id: below V.
        num_top: so many of the most likely ones; one that cannot be is not among them.
        named: these, instead.
    """
    row = on_host(logits)
    scan = scan_logits(row[None], top_k=min(num_top, row.size), log_sum_exp=True)
    others = [i for i in scan.top_ids[0].tolist() if i >= 0] if num_top else list(named)
    level, *levels = np.maximum(row[[token_id, *others]] - scan.log_sum_exp, LOWEST).tolist()
    top = sorted(zip(others, levels, strict=True), key=lambda one: (-one[1], one[0]))
    return TokenLogprob(logprob=level, top=tuple(top))


# Makes of a seed another one, for a second number per step.
ASIDE = np.uint64(0xD1B54A32D192ED03)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
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


def draw(row: FloatArray, rows: SamplingMetadata, *, index: int, uniform: float) -> Drawn:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """What was picked for R rows, in the memory of the host."""

    token_ids: TokenArray               # [R]
    finite: NDArray[np.bool_]           # [R]; False: a NaN or no finite maximum, the token is void
    logprobs: tuple[TokenLogprob, ...]  # one for each that asked


def sample_rows(
    logits: FloatArray,
    *,
    drawing: Sequence[int],
    rules: SamplingMetadata,
    asking: Sequence[Asked],
    edits: LogitsEdits | None = None,
) -> SamplerOutput:
    """Pick one token per row: the best one, or a draw.

    Args:
        logits: [R, V] float32; `edits` are written into it, nothing else is.
        drawing: the rows that draw, ascending.
        rules: their parameters.
        asking: which log-probabilities are wanted.
        edits: what is to be changed of the logits first.
    """
    raw = {asked.row: logits[asked.row] for asked in asking if not asked.processed}
    if edits is not None:
        raw = {row: own.copy() for row, own in raw.items()}
        apply_edits(logits, edits)
    table = rules.table(drawing, num_rows=len(logits))
    sampled = sample_logits(logits, table)
    token_ids, finite = sampled["token_id"], np.isfinite(sampled["best"])
    processed = {asked.row for asked in asking if asked.processed}
    left: dict[int, FloatArray] = {}
    # What a temperature near 0 divides goes to -inf, as it should; rows that are not finite get NaNs.
    with np.errstate(over="ignore", invalid="ignore"):
        for index, row in enumerate(drawing):
            if rules.alone(index) and finite[row]:
                uniform = table["uniform"][row]
                token_ids[row], left[row] = draw(logits[row], rules, index=index, uniform=uniform)
            elif row in processed:
                left[row] = logits[row] - sampled["best"][row]
                left[row] /= rules.temperature[index]
                left[row][left[row] < sampled["level"][row]] = -np.inf
    logprobs = []
    for asked in asking:
        values = left.get(asked.row, logits[asked.row]) if asked.processed else raw[asked.row]
        token_id = int(token_ids[asked.row])
        logprobs.append(likelihood(values, token_id, num_top=asked.num_top, named=asked.named))
    return SamplerOutput(token_ids=token_ids, finite=finite, logprobs=tuple(logprobs))


def select_rows(array: FloatArray, rows: Sequence[int] | NDArray[np.int64]) -> FloatArray:
    """Return those rows of an array [R, V], which are distinct and ascending.

    Nearly always all are asked for: then it is the array itself, and nothing is copied.
    """
    return array if len(rows) == len(array) else array[rows]
