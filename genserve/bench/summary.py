"""Summary: computes the figures of a load, defined as in `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from genserve.bench.answers import Answer, LoadResult

TIME_LABELS = MappingProxyType(
    {
        "ttft": "first token (TTFT)",
        "itl": "between tokens (ITL)",
        "tpot": "per output token (TPOT)",
        "e2el": "whole answer (E2EL)",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution of a time over all requests or chunks, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]      # linearly interpolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a load. Rates are per second, from the start to the end of the load."""

    duration_s: float
    completed: int
    errors: Mapping[str, tuple[int, str]]   # by kind: the number, and the message of the first
    unfinished: int                         # answers that the end of the load cut
    rejections: int                         # rejections after which the request was repeated
    without_text: int                       # complete answers without text
    prompt_tokens: int                      # for the complete answers
    output_tokens: int                      # for the complete and the unfinished answers
    counted_by: str                         # "server", "chunks" or "both": who counted the output tokens
    request_rate: float
    goodput: float | None                   # requests per second within all limits; None: no limits
    output_rate: float
    total_rate: float
    peak_output_rate: float
    peak_concurrency: int
    client_cpu: float                       # the share of one core that the load generator used
    ttft: Distribution | None               # time to first token: the first chunk with text
    tpot: Distribution | None               # time per output token after the first, per request
    itl: Distribution | None                # inter-token latency: between two chunks with text
    e2el: Distribution | None               # end-to-end latency: to the last event

    @property
    def failed(self) -> int:
        """The number of requests that failed, of all kinds."""
        return sum(count for count, _ in self.errors.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures with the names of vLLM's result files, and some more."""
        document: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "rejections": self.rejections,
            "without_text": self.without_text,
            "errors_by_kind": {
                kind: {"count": count, "first": message} for kind, (count, message) in self.errors.items()
            },
            "total_input_tokens": self.prompt_tokens,
            "total_output_tokens": self.output_tokens,
            "output_tokens_counted_by": self.counted_by,
            "request_throughput": self.request_rate,
            "request_goodput": self.goodput,
            "output_throughput": self.output_rate,
            "total_token_throughput": self.total_rate,
            "max_output_tokens_per_s": self.peak_output_rate,
            "max_concurrent_requests": self.peak_concurrency,
            "client_cpu": self.client_cpu,
        }
        for name in ("ttft", "tpot", "itl", "e2el"):
            times: Distribution | None = getattr(self, name)
            if times is not None:
                document |= {f"{kind}_{name}_ms": getattr(times, kind) for kind in ("mean", "median", "std")}
                document |= {f"p{rank:g}_{name}_ms": ms for rank, ms in times.percentiles.items()}
        return document


def summarise(
    result: LoadResult, *, ranks: Sequence[float], limits_ms: Mapping[str, float] | None = None
) -> Summary:
    """Compute the figures of a load.

    Args:
        result: the answers of the load.
        ranks: the percentiles to compute, from 0 to 100.
        limits_ms: the longest times of a request that counts as good: "ttft", "tpot", "e2el".
    """
    complete, unfinished = result.complete(), result.unfinished()
    duration_s = max(result.elapsed_s, 1e-9)
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in complete)
    output_tokens = sum(answer.num_tokens for answer in complete + unfinished)
    good = [answer for answer in complete if _is_good(answer, limits_ms or {})]
    return Summary(
        duration_s=result.elapsed_s,
        completed=len(complete),
        errors=_errors(result),
        unfinished=len(unfinished),
        rejections=sum(len(answer.rejections_s) for answer in result.answers),
        without_text=sum(not answer.text_times_s for answer in complete),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        counted_by=_counted_by(complete),
        request_rate=len(complete) / duration_s,
        goodput=len(good) / duration_s if limits_ms else None,
        output_rate=output_tokens / duration_s,
        total_rate=(prompt_tokens + output_tokens) / duration_s,
        peak_output_rate=_peak_output_rate(complete + unfinished, started_s=result.started_s),
        peak_concurrency=_peak_concurrency(result.answers),
        client_cpu=result.cpu_s / duration_s,
        ttft=_distribution([answer.first_text_s for answer in complete], ranks),
        tpot=_distribution([answer.time_per_output_token_s for answer in complete], ranks),
        itl=_distribution(inter_token_latencies_s(complete), ranks),
        e2el=_distribution([answer.latency_s for answer in complete], ranks),
    )


def inter_token_latencies_s(answers: Sequence[Answer]) -> list[float]:
    """Return the seconds between the chunks with text of each answer."""
    return [float(gap) for answer in answers for gap in np.diff(answer.text_times_s)]


def _distribution(times_s: Sequence[float | None], ranks: Sequence[float]) -> Distribution | None:
    times_ms = np.array([time_s for time_s in times_s if time_s is not None]) * 1e3
    if not len(times_ms):
        return None
    return Distribution(
        mean=float(times_ms.mean()),
        median=float(np.median(times_ms)),
        std=float(times_ms.std()),
        percentiles={rank: float(np.percentile(times_ms, rank)) for rank in ranks},
    )


def _is_good(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    """Whether all times of a complete answer are within the limits."""
    times_s = {
        "ttft": answer.first_text_s,
        # An answer of one token has no time per output token, and so exceeds no limit.
        "tpot": answer.time_per_output_token_s or 0.0,
        "e2el": answer.latency_s,
    }
    limited = [(times_s[name], limit_ms) for name, limit_ms in limits_ms.items()]
    return all(time_s is not None and time_s * 1e3 <= limit_ms for time_s, limit_ms in limited)


def _errors(result: LoadResult) -> dict[str, tuple[int, str]]:
    failures = result.failures()
    first = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return {kind: (count, first[kind]) for kind, count in counts.most_common()}


def _counted_by(complete: Sequence[Answer]) -> str:
    by_server = {answer.output_tokens is not None for answer in complete}
    if len(by_server) == 2:
        return "both"
    return "server" if by_server == {True} else "chunks"


def _peak_output_rate(answers: Sequence[Answer], *, started_s: float) -> float:
    """Return the most tokens in a second; the tokens of an answer are spread evenly over its chunks."""
    seconds = [np.array(answer.text_times_s) - started_s for answer in answers if answer.text_times_s]
    if not seconds:
        return 0.0
    weights = [
        np.full(len(answer.text_times_s), answer.num_tokens / len(answer.text_times_s))
        for answer in answers
        if answer.text_times_s
    ]
    return float(np.bincount(np.concatenate(seconds).astype(int), np.concatenate(weights)).max())


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    """Return the largest number of requests at the server at one time."""
    changes = sorted([(answer.sent_s, 1) for answer in answers] + [(answer.end_s, -1) for answer in answers])
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0
