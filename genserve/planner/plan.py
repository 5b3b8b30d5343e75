"""Plan: for each kind of machine, the smallest fleet that meets the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from genserve.planner.replica_search import FleetFigures, FleetTarget, PlannedLoad, search, simulate
from genserve.planner.simulated_replica import ReplicaKind
from genserve.planner.step_model import StepModel
from genserve.repository.options import RepositoryOptions
from genserve.tuning.measured_steps import MeasuredEngine, read_measured_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The limits of a replica's queue, as the flags of `genserve serve` give them."""

    max_requests: int
    max_tokens: int | None      # None: 4 full KV caches; 0: no limit
    max_wait_s: float           # 0: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """The simulated fleets of one kind of machine."""

    name: str
    machine: str
    cost_per_hour: float | None     # of a replica
    median_error: float             # of the step model, relative
    largest_error: float
    fleets: Sequence[FleetFigures]  # by size

    @property
    def smallest(self) -> FleetFigures | None:
        """The smallest fleet that meets the targets; None: none does."""
        return next((fleet for fleet in self.fleets if not fleet.missed), None)

    @property
    def cost(self) -> float | None:
        """What that fleet costs per hour; None: it is not known, or there is none."""
        if self.smallest is None or self.cost_per_hour is None:
            return None
        return self.smallest.num_replicas * self.cost_per_hour


def replica_kind(path: Path, *, queue: QueueLimits) -> tuple[MeasuredEngine, ReplicaKind]:
    """Return the measured engine of a file, and replicas like it.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    engine = read_measured_engine(path)
    limits = engine.limits
    options = RepositoryOptions(
        max_queue=queue.max_requests, max_queue_tokens=queue.max_tokens, max_queue_wait_s=queue.max_wait_s
    )
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
    on_fleet: Callable[[str, FleetFigures], None],
) -> KindPlan:
    """Simulate fleets of one kind: those of `counts` replicas, or if it is empty as many as a search needs.

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
