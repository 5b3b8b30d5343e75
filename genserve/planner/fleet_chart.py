"""Fleet chart: the figures of simulated fleets over the number of their replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genserve.figure_file import new_figure
from genserve.planner.plan import KindPlan
from genserve.planner.replica_search import FleetTarget


def draw(plans: Sequence[KindPlan], targets: Sequence[FleetTarget], *, path: Path) -> None:
    """Draw first token, time between tokens, tokens per second and shares: lines for each kind of machine.

    Targets are dashed lines, and the smallest fleets that meet them are stars. The suffix of `path`
    determines the format.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    figure = new_figure(height=8.0)
    figure.suptitle("genserve plan")
    [[first, between], [rates, shares]] = figure.subplots(2, 2)
    for plan in plans:
        counts = [fleet.num_replicas for fleet in plan.fleets]
        for axis, name in ((first, "ttft_ms"), (between, "itl_ms")):
            for rank in getattr(plan.fleets[0], name):
                times = [getattr(fleet, name)[rank] for fleet in plan.fleets]
                axis.plot(counts, times, marker="o", label=f"{plan.name}, p{rank:g}")
        rates.plot(counts, [fleet.output_rate for fleet in plan.fleets], marker="o", label=plan.name)
        for figure_name in ("utilisation", "cached", "rejected"):
            values = [getattr(fleet, figure_name) for fleet in plan.fleets]
            shares.plot(counts, values, marker="o", label=f"{plan.name}, {figure_name}")
        if targets and plan.smallest is not None:
            place = (plan.smallest.num_replicas, plan.smallest.output_rate)
            rates.scatter(*place, marker="*", s=260, color="black", zorder=3)
    for target in targets:
        axis = {"ttft": first, "itl": between, "rejected": shares}[target.figure]
        axis.axhline(target.limit, color="gray", linestyle="--", label=f"target, {target.name}")
    _finish(first, "first token, ms", is_log=True)
    _finish(between, "between tokens, ms", is_log=True)
    _finish(rates, "tokens per second; stars meet the targets")
    _finish(shares, "share")
    figure.savefig(path)


def _finish(axis: Any, quantity: str, *, is_log: bool = False) -> None:
    axis.set_xlabel("replicas")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel(quantity)
    if is_log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
