"""Bench runs: the loads of one `genserve bench`, measured one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from genserve.bench.answers import LoadResult
from genserve.bench.arrivals import arrival_times
from genserve.bench.datasets import BenchPrompt
from genserve.bench.endpoint import Target
from genserve.bench.load_loop import Load, run_load
from genserve.cli.bench_plans import Plan
from genserve.cli.bench_report import ProgressLine, Report
from genserve.errors import InvalidRequest, Unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What all loads of a command have in common."""

    burstiness: float
    seed: int                   # of the intervals
    duration_s: float | None
    timeout_s: float
    retry_rejected: bool


def run_plans(
    plans: Sequence[Plan], target: Target, prompts: Iterator[BenchPrompt], *, pace: Pace, report: Report
) -> bool:
    """Measure the loads, and report each when it ends; returns whether Ctrl-C ended the last one.

    Args:
        plans: the loads.
        target: where the requests go.
        prompts: without end; each request takes the next one.
        pace: what the loads have in common.
        report: receives the results.
    """
    for number, plan in enumerate(plans):
        result = LoadResult()
        load = Load(
            prompts=prompts,
            arrivals_s=_arrivals(plan, pace, number=number),
            max_concurrency=plan.concurrency,
            duration_s=pace.duration_s,
            timeout_s=pace.timeout_s,
            retry_rejected=pace.retry_rejected,
        )
        try:
            with ProgressLine(plan.title, result, total=plan.num_prompts) as line:
                run_load(load, target, result, on_tick=line.show)
        except KeyboardInterrupt:
            report.add(plan, result)
            return True
        report.add(plan, result)
    return False


def _arrivals(plan: Plan, pace: Pace, *, number: int) -> Iterator[float]:
    if plan.is_closed_loop:
        return itertools.repeat(0.0, plan.num_prompts) if plan.num_prompts else itertools.repeat(0.0)
    assert plan.num_prompts is not None
    rng = np.random.default_rng([pace.seed, number])
    return iter(arrival_times(plan.num_prompts, rate=plan.rate, burstiness=pace.burstiness, rng=rng))


def warm_up(
    target: Target, prompts: Iterator[BenchPrompt], *, num_requests: int, timeout_s: float
) -> None:
    """Send some requests one after the other; the first ones of a server are slower.

    Raises:
        Unreachable: no server answers.
        InvalidRequest: the server rejects all of them, or its answers are not those of the dialect.
    """
    result = LoadResult()
    arrivals_s = itertools.repeat(0.0, num_requests)
    load = Load(prompts=prompts, arrivals_s=arrivals_s, max_concurrency=1, timeout_s=timeout_s)
    with ProgressLine("warm-up", result, total=num_requests) as line:
        run_load(load, target, result, on_tick=line.show)
    failures = result.failures()
    if len(failures) < num_requests or not failures:
        return
    [failure, *_] = failures
    if failure.kind in ("connection", "timeout"):
        raise Unreachable(
            f"no server answers at {target.url}: {failure.message}",
            remedy="start one with `genserve serve`, or set --url",
        )
    raise InvalidRequest(
        f"{target.url} failed with {failure.kind}: {failure.message}",
        remedy="see the model, --backend, --endpoint, --extra-body and GENSERVE_API_KEY",
    )
