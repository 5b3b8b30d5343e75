"""Plan: for each kind of machine, the smallest fleet that meets the targets, found by simulating several."""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np

from genserve.planner.fleet import Fleet, FleetResult
from genserve.planner.loads import PlannedLoad
from genserve.planner.simulated_replica import ReplicaKind
from genserve.planner.step_model import StepModel
from genserve.repository.options import RepositoryOptions
from genserve.tuning.measured_steps import MeasuredEngine, read_measured_engine

_RANKS = (50.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTarget:
    """The greatest allowed value of a metric."""

    metric: str         # "ttft" or "itl", in milliseconds, or "rejected", a share of the requests
    rank: float | None  # the percentile; None for "rejected"
    limit: float

    @property
    def name(self) -> str:
        """The name, such as `ttft_p99`."""
        return self.metric if self.rank is None else f"{self.metric}_p{self.rank:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMetrics:
    """The metrics of one simulated fleet. Percentiles by rank; NaN where there is no such time."""

    num_replicas: int
    num_requests: int
    rejected: float                     # share of the requests
    too_long: float                     # the share whose prompt and answer exceed the context
    request_rate: float                 # per second, of the requests that were answered
    output_rate: float                  # tokens per second
    utilisation: float
    cached: float                       # share of the prompt tokens
    num_preempted: int
    ttft_ms: Mapping[float, float]
    itl_ms: Mapping[float, float]
    simulated_s: float                  # the duration by the virtual clock
    cpu_s: float                        # the CPU time of the simulation
    missed: Sequence[str]               # names of the targets that are not met

    def as_json(self) -> dict[str, Any]:
        """Return the metrics; percentiles as `p99_ttft_ms`, as in the reports of `genserve bench`."""
        document = asdict(self) | {"meets_targets": not self.missed}
        for name in ("ttft", "itl"):
            times = document.pop(f"{name}_ms")
            document |= {f"p{rank:g}_{name}_ms": ms for rank, ms in times.items()}
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """The simulated fleets of one kind of machine."""

    name: str
    machine: str
    cost_per_hour: float | None     # the cost of one replica
    median_error: float             # the step model's median relative error
    largest_error: float
    fleets: Sequence[FleetMetrics]  # in the order of their sizes

    @property
    def smallest(self) -> FleetMetrics | None:
        """The smallest fleet that meets the targets; None: none does."""
        return next((fleet for fleet in self.fleets if not fleet.missed), None)

    @property
    def cost(self) -> float | None:
        """The cost of that fleet per hour; None: it is not known, or there is none."""
        if self.smallest is None or self.cost_per_hour is None:
            return None
        return self.smallest.num_replicas * self.cost_per_hour


def replica_kind(path: Path, *, options: RepositoryOptions) -> tuple[MeasuredEngine, ReplicaKind]:
    """Return the measured engine of a file, and replicas like it whose queues have the limits of `options`.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    engine = read_measured_engine(path)
    limits = engine.limits
    return engine, ReplicaKind(
        limits=limits,
        step_model=StepModel(engine.steps, max_tokens=limits.max_num_batched_tokens),
        serving=engine.serving,
        queue_limits=options.queue_limits(limits.num_blocks * limits.block_size),
    )


def make_plan(
    measured: tuple[MeasuredEngine, ReplicaKind],
    load: PlannedLoad,
    targets: Sequence[FleetTarget],
    *,
    name: str,
    cost_per_hour: float | None,
    counts: Sequence[int],
    max_replicas: int,
    num_processes: int,
    on_fleet: Callable[[str, FleetMetrics], None],
) -> KindPlan:
    """Simulate fleets of one kind: of `counts` replicas, or if it is empty of as many as a search needs.

    Raises:
        GenserveError: the load cannot be read.
    """
    engine, kind = measured
    note = partial(on_fleet, name)
    if counts:
        number = min(num_processes, len(counts))
        fleets = simulate(kind, load, targets, counts=sorted(counts), num_processes=number, on_fleet=note)
    else:
        fleets = search(
            kind, load, targets, max_replicas=max_replicas, num_processes=num_processes, on_fleet=note
        )
    errors = np.abs(kind.step_model.errors)
    return KindPlan(
        name=name,
        machine=f"{engine.model} on {engine.machine}",
        cost_per_hour=cost_per_hour,
        median_error=float(np.median(errors)),
        largest_error=float(errors.max()),
        fleets=fleets,
    )


def cheapest(plans: Sequence[KindPlan]) -> KindPlan | None:
    """Return the plan whose fleet meets the targets at the lowest cost, or else with the fewest replicas."""
    meeting = [(plan, plan.smallest) for plan in plans if plan.smallest is not None]
    if not meeting:
        return None
    return min(meeting, key=lambda pair: (_cost(pair[0]), pair[1].num_replicas))[0]


def as_document(plans: Sequence[KindPlan], targets: Sequence[FleetTarget]) -> dict[str, Any]:
    """Return what `genserve plan --json` prints."""
    best = cheapest(plans) if targets else None
    return {
        "targets": {target.name: target.limit for target in targets},
        "best": best.name if best else None,
        "kinds": [
            {
                "name": plan.name,
                "machine": plan.machine,
                "step_model_median_error": plan.median_error,
                "step_model_largest_error": plan.largest_error,
                "replicas": plan.smallest.num_replicas if targets and plan.smallest else None,
                "cost_per_hour": plan.cost,
                "fleets": [fleet.as_json() for fleet in plan.fleets],
            }
            for plan in plans
        ],
    }


def _cost(plan: KindPlan) -> float:
    return math.inf if plan.cost is None else plan.cost


def search(
    kind: ReplicaKind,
    load: PlannedLoad,
    targets: Sequence[FleetTarget],
    *,
    max_replicas: int,
    num_processes: int,
    on_fleet: Callable[[FleetMetrics], None],
) -> list[FleetMetrics]:
    """Simulate fleets until the smallest is known that meets the targets; return all, by size.

    It doubles the number of replicas until a fleet meets them, and then divides the interval by as many
    fleets as there are processes. `on_fleet` is called with each fleet.

    Raises:
        GenserveError: the load cannot be read.
    """
    found: dict[int, FleetMetrics] = {}
    with _simulations(kind, load, targets, num_processes=num_processes) as run:
        most_missing, least_meeting = 0, math.inf
        while counts := _next_counts(most_missing, least_meeting, found, max_replicas, num_processes):
            for metrics in run(counts):
                found[metrics.num_replicas] = metrics
                on_fleet(metrics)
            least_meeting = min((n for n, f in found.items() if not f.missed), default=math.inf)
            most_missing = max((n for n, f in found.items() if f.missed and n < least_meeting), default=0)
    return [found[number] for number in sorted(found)]


def simulate(
    kind: ReplicaKind,
    load: PlannedLoad,
    targets: Sequence[FleetTarget],
    *,
    counts: Sequence[int],
    num_processes: int,
    on_fleet: Callable[[FleetMetrics], None],
) -> list[FleetMetrics]:
    """Simulate fleets of some sizes; `on_fleet` is called with each."""
    with _simulations(kind, load, targets, num_processes=num_processes) as run:
        found = []
        for metrics in run(counts):
            found.append(metrics)
            on_fleet(metrics)
    return found


def _next_counts(
    most_missing: int,
    least_meeting: float,
    found: Collection[int],
    max_replicas: int,
    num_processes: int,
) -> list[int]:
    """Return the numbers of replicas to simulate next; empty: the least that meets the targets is known."""
    if math.isinf(least_meeting):
        doubled = (min(max(1, most_missing) * 2**power, max_replicas) for power in range(num_processes + 1))
        return [number for number in dict.fromkeys(doubled) if number not in found][:num_processes]
    between = range(most_missing + 1, int(least_meeting))
    parts = min(num_processes, len(between))
    return sorted({between[len(between) * (part + 1) // (parts + 1)] for part in range(parts)})


@contextmanager
def _simulations(
    kind: ReplicaKind, load: PlannedLoad, targets: Sequence[FleetTarget], *, num_processes: int
) -> Iterator[Callable[[Sequence[int]], Iterable[FleetMetrics]]]:
    """Yield a function that simulates fleets of some sizes at the same time."""
    run = partial(_simulate, kind, load, targets)
    if num_processes == 1:
        yield partial(map, run)
        return
    ignore = (signal.SIGINT, signal.SIG_IGN)    # Ctrl-C reaches all processes, and this one ends the others
    with ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignore
    ) as pool:
        try:
            yield partial(pool.map, run)
        except KeyboardInterrupt:
            for process in active_children():
                process.terminate()
            raise


def _simulate(
    kind: ReplicaKind, load: PlannedLoad, targets: Sequence[FleetTarget], num_replicas: int
) -> FleetMetrics:
    started_s = time.process_time()
    collects = gc.isenabled()
    gc.disable()    # a simulation makes millions of objects and no cycles
    try:
        result = Fleet(kind, num_replicas=num_replicas).run(load.requests())
    finally:
        if collects:
            gc.enable()
    return _fleet_metrics(result, targets, num_replicas=num_replicas, cpu_s=time.process_time() - started_s)


def _fleet_metrics(
    result: FleetResult, targets: Sequence[FleetTarget], *, num_replicas: int, cpu_s: float
) -> FleetMetrics:
    num_requests, times = max(1, result.num_requests), result.times
    ttft_ms = {rank: times.first_s(rank) * 1e3 for rank in _ranks(targets, "ttft")}
    itl_ms = {rank: times.gap_s(rank) * 1e3 for rank in _ranks(targets, "itl")}
    rejected = result.num_rejected / num_requests
    values: dict[str, Mapping[Any, float]] = {"rejected": {None: rejected}, "ttft": ttft_ms, "itl": itl_ms}
    num_answered = result.num_requests - result.num_rejected - result.num_too_long
    return FleetMetrics(
        num_replicas=num_replicas,
        num_requests=result.num_requests,
        rejected=rejected,
        too_long=result.num_too_long / num_requests,
        request_rate=num_answered / result.duration_s,
        output_rate=times.num_tokens / result.duration_s,
        utilisation=result.utilisation,
        cached=result.cached_tokens / max(1, result.prompt_tokens),
        num_preempted=result.num_preempted,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        simulated_s=result.duration_s,
        cpu_s=cpu_s,
        # A fleet that answers nothing keeps no time.
        missed=[
            target.name
            for target in targets
            if values[target.metric][target.rank] > target.limit or not num_answered
        ],
    )


def _ranks(targets: Sequence[FleetTarget], metric: str) -> list[float]:
    """Return the percentiles of a metric that are shown or are in a target."""
    wanted = (target.rank for target in targets if target.metric == metric)
    return sorted({*_RANKS, *(rank for rank in wanted if rank is not None)})
