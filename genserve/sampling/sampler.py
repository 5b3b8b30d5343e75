"""Sampler: rows of logits to token ids and log-probabilities; pure.

Greedy rows, and draws by temperature, top-k, top-p and min-p, take one call of `sample_logits`
(kernels/src/sampling.hpp); torch_sampler.py draws on a GPU, sampler_chain.py with other samplers or orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.completion import TokenLogprob
from genserve.kernels.sampling_kernels import SAMPLING_RULE, sample_logits, scan_logits
from genserve.sampling.logits_array import FloatArray, LogitsArray, TokenArray, on_host, select_rows
from genserve.sampling.logits_processors import LogitsEdits, apply_edits
from genserve.sampling.sampler_chain import NUMPY_OPS, SamplerChain, apply_cutting
from genserve.sampling.sampling_params import SamplingParams

LOWEST_LOGPROB = -9999.0    # vLLM's value for a token that cannot be sampled, since JSON has no infinity
# Makes a second seed of a sequence's seed, for the second number of a step.
_SECOND_SEED = np.uint64(0xD1B54A32D192ED03)


class SamplingRule(NamedTuple):
    """How a sequence draws, as `sample_logits` reads it."""

    top_p: float
    top_k: int
    temperature: float
    log_min_p: float


GREEDY_RULE = SamplingRule(top_p=1.0, top_k=0, temperature=0.0, log_min_p=-math.inf)


def sampling_rule(params: SamplingParams) -> SamplingRule:
    """Return the rule of a request."""
    log_min_p = math.log(params.min_p) if params.min_p else -math.inf
    return SamplingRule(params.top_p, params.top_k, params.temperature, log_min_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRequest:
    """The log-probabilities that one row reports: of its token, and of the likeliest or of given tokens."""

    row: int
    num_top: int = 0                    # how many of the most likely tokens are reported
    token_ids: tuple[int, ...] = ()     # the given tokens, if there are any
    processed: bool = False             # after all sampling rules; False: as the model has them
    surprise: bool = False              # read by the samplers of the row, not by the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """How R rows are sampled: D of them by a draw, the rest greedily."""

    drawing: Sequence[int]              # the D rows that draw, ascending
    rules: NDArray[np.void]             # [D] SAMPLING_RULE
    chains: Sequence[SamplerChain | None]   # D; of a row with a chain the rule's `uniform` alone is used
    chances: Sequence[float]            # D numbers in [0, 1) for the chains; empty if no row has one
    logprobs: Sequence[LogprobsRequest] = ()    # the unprocessed ones are of distinct rows, ascending
    edits: LogitsEdits | None = None

    @staticmethod
    def of(
        drawing: Sequence[int],
        rules: Sequence[SamplingRule],
        *,
        chains: Sequence[SamplerChain | None],
        seeds: Sequence[int],
        steps: Sequence[int],
        logprobs: Sequence[LogprobsRequest] = (),
        edits: LogitsEdits | None = None,
    ) -> SamplingMetadata:
        """Return the metadata of rows, given the seed and the number of answer tokens of each that draws.

        A request without a seed gets one from `InputProcessor`.
        """
        seed, step = np.array(seeds, dtype=np.uint64), np.array(steps, dtype=np.uint64)
        numbers = uniforms(seed, step).tolist()
        return SamplingMetadata(
            drawing=drawing,
            rules=np.array([(u, *rule) for u, rule in zip(numbers, rules, strict=True)], SAMPLING_RULE),
            chains=chains,
            chances=uniforms(seed ^ _SECOND_SEED, step).tolist() if any(chains) else (),
            logprobs=logprobs,
            edits=edits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """The tokens and log-probabilities of R rows, in the memory of the host."""

    token_ids: TokenArray               # [R]
    finite: NDArray[np.bool_]           # [R]; False: a NaN or no finite maximum, the token is void
    logprobs: tuple[TokenLogprob, ...]  # one for each request of the metadata


def sample_on_host(logits: FloatArray, metadata: SamplingMetadata) -> SamplerOutput:
    """Sample one token per row of logits [R, V] float32, which only `metadata.edits` modify."""
    of_raw = [request for request in metadata.logprobs if not request.processed]
    rows = [request.row for request in of_raw]
    if metadata.edits is None:
        raw = select_rows(logits, rows)
    else:
        raw = logits[rows]
        apply_edits(logits, metadata.edits)
    table = np.zeros(len(logits), SAMPLING_RULE)    # the temperature 0 means greedy
    table[list(metadata.drawing)] = metadata.rules
    sampled = sample_logits(logits, table)
    token_ids, finite = sampled["token_id"], np.isfinite(sampled["best"])
    left: dict[int, tuple[FloatArray, TokenArray | None]] = {}
    if metadata.chances:
        for row, index in _chained(metadata):
            if finite[row]:
                left[row], token_ids[row] = _draw_by_chain(logits[row], metadata, index)
    logprobs = dict(zip(of_raw, _logprobs(raw, token_ids, of_raw), strict=True))
    for request in metadata.logprobs:
        if request.processed:
            row = request.row
            if row in left:
                values = NUMPY_OPS.spread(*left[row], vocab_size=logits.shape[1])
            else:
                values = _processed(logits[row], rule=table[row], found=sampled[row])[None]
            [logprobs[request]] = _logprobs(values, token_ids, [request])
    ordered = tuple(logprobs[request] for request in metadata.logprobs)
    return SamplerOutput(token_ids=token_ids, finite=finite, logprobs=ordered)


def _chained(metadata: SamplingMetadata) -> Iterator[tuple[int, int]]:
    """Yield each row with a chain of samplers, and its index among the rows that draw."""
    for index, (row, chain) in enumerate(zip(metadata.drawing, metadata.chains, strict=True)):
        if chain is not None:
            yield row, index


def _draw_by_chain(
    row: FloatArray, metadata: SamplingMetadata, index: int
) -> tuple[tuple[FloatArray, TokenArray | None], int]:
    """Return what the samplers of a row leave, as `apply_cutting` does, and the token drawn from it."""
    chain = metadata.chains[index]
    assert chain is not None
    left, ids = apply_cutting(row[None], [chain], chances=[metadata.chances[index]], ops=NUMPY_OPS)
    uniform = metadata.rules["uniform"][index]
    rule = np.array([(uniform, 1.0, 0, 1.0, -math.inf)], SAMPLING_RULE)
    column = int(sample_logits(left, rule)["token_id"][0])
    return (left, ids), column if ids is None else int(ids[column])


def _processed(row: FloatArray, *, rule: np.void, found: np.void) -> FloatArray:
    """Return the logits that the token of a row was sampled from: [V]."""
    if not rule["temperature"]:
        return row
    # A temperature near 0 scales tokens to -inf, as it should; rows that are not finite get NaNs.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: FloatArray = row - found["best"]
        scaled /= rule["temperature"]
        scaled[scaled < found["level"]] = -np.inf
    return scaled


def uniforms(seed: NDArray[np.uint64], step: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per row, a function of (seed, step) alone.

    Counter-based: no generator has a state that the order of a batch could change.

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


def token_logprob(
    logits: LogitsArray, token_id: int, *, num_top: int = 0, token_ids: Sequence[int] = ()
) -> TokenLogprob:
    """Return the log-probability of a token and of the likeliest ones, ties in the order of their ids.

    Args:
        logits: [V] float32, on any device; not modified. A NaN in it makes all log-probabilities NaN.
        token_id: below V.
        num_top: the number of most likely tokens to report; masked tokens are left out.
        token_ids: the tokens to report instead.
    """
    request = LogprobsRequest(row=0, num_top=num_top, token_ids=tuple(token_ids))
    [found] = _logprobs(on_host(logits)[None], np.array([token_id]), [request])
    return found


def _logprobs(
    logits: FloatArray, token_ids: TokenArray, requests: Sequence[LogprobsRequest]
) -> list[TokenLogprob]:
    """Return what requests ask for: of logits [N, V], one row each, and of token_ids [R], by their rows."""
    if not requests:
        return []
    num_top = min(max(request.num_top for request in requests), logits.shape[1])
    scan = scan_logits(logits, top_k=num_top, log_sum_exp=True)
    own_ids = token_ids[[request.row for request in requests]]
    own = np.maximum(logits[np.arange(len(logits)), own_ids] - scan.log_sum_exp, LOWEST_LOGPROB)
    found = []
    for index, (request, logprob) in enumerate(zip(requests, own.tolist(), strict=True)):
        others = list(request.token_ids)
        if request.num_top:
            others = [i for i in scan.top_ids[index, : request.num_top].tolist() if i >= 0]
        top: list[tuple[int, float]] = []
        if others:
            levels = np.maximum(logits[index, others] - scan.log_sum_exp[index], LOWEST_LOGPROB)
            top = sorted(zip(others, levels.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(logprob=logprob, top=tuple(top)))
    return found


def best_ids(row: FloatArray, count: int) -> TokenArray:
    """Return the ids of the `count` highest values of a row [V], the best first, of equals the lowest id.

    There are fewer if the others are -inf.
    """
    ids: TokenArray = scan_logits(row[None], top_k=min(count, row.size)).top_ids[0]
    return ids if ids[-1] >= 0 else ids[ids >= 0]
