"""The command `genserve plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from genserve.cli import plan_flags as flags
from genserve.cli.flags import Json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from genserve.planner.plan import KindPlan
    from genserve.planner.replica_search import FleetFigures, FleetTarget, PlannedLoad

_DEFAULT_REQUESTS = 10_000


def plan(
    step_times: flags.StepTimes,
    cost_per_hour: flags.CostPerHour = None,
    request_rate: flags.RequestRate = None,
    burstiness: flags.Burstiness = 1.0,
    input_len: flags.InputLen = 256,
    output_len: flags.OutputLen = 128,
    length_variation: flags.LengthVariation = 0.5,
    system_prompts: flags.SystemPrompts = 0,
    system_len: flags.SystemLen = 0,
    turns: flags.Turns = 1,
    think_time: flags.ThinkTime = 10.0,
    seed: flags.Seed = 0,
    trace: flags.TraceFile = None,
    speed: flags.Speed = 1.0,
    num_requests: flags.NumRequests = None,
    target: flags.Targets = [],  # noqa: B006  # typer copies it
    replicas: flags.Replicas = None,
    max_replicas: flags.MaxReplicas = 64,
    max_queue: flags.MaxQueue = 256,
    max_queue_tokens: flags.MaxQueueTokens = None,
    max_queue_wait_s: flags.MaxQueueWait = 10.0,
    processes: flags.Processes = None,
    plot: flags.PlotPath = None,
    json_: Json = False,
) -> None:
    """Simulate a fleet under a load, and say how many replicas of which machine meet the targets.

    The scheduler, the KV cache, admission control and the router are the product's own; only the clock is
    virtual. One fleet has replicas of one kind.
    """
    from genserve.backends.onnx_session import num_cores
    from genserve.cli.console import print_json
    from genserve.figure_file import check_plot
    from genserve.planner.fleet_chart import draw
    from genserve.planner.plan import QueueLimits, as_document, make_plan, replica_kind

    targets = flags.read_targets(target)
    flags.check_costs(cost_per_hour, num_kinds=len(step_times))
    if not targets and not replicas:
        raise typer.BadParameter("give targets, or --replicas to simulate", param_hint="--target")
    if (trace is None) == (request_rate is None):
        raise typer.BadParameter("give either a trace or --request-rate", param_hint="--trace")
    if plot is not None:
        check_plot(plot)
    load = _trace_load(trace, speed, num_requests) if trace else _synthetic_load(
        rate=request_rate or 0.0,
        burstiness=burstiness,
        lengths=(input_len, output_len, length_variation),
        system=(system_prompts, system_len),
        turns=(turns, think_time),
        num_requests=num_requests or _DEFAULT_REQUESTS,
        seed=seed,
    )
    queue = QueueLimits(max_requests=max_queue, max_tokens=max_queue_tokens, max_wait_s=max_queue_wait_s)
    kinds = [replica_kind(path, queue=queue) for path in step_times]
    costs: list[float | None] = [*cost_per_hour] if cost_per_hour else [None] * len(kinds)
    try:
        plans = [
            make_plan(
                kind,
                load,
                targets,
                name=path.stem,
                cost_per_hour=cost,
                counts=replicas or (),
                max_replicas=max_replicas,
                num_processes=processes or num_cores(),
                on_fleet=_show_progress,
            )
            for kind, path, cost in zip(kinds, step_times, costs, strict=True)
        ]
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if plot is not None:
        draw(plans, targets, path=plot)
    if json_:
        print_json(as_document(plans, targets))
    else:
        _print_plans(plans, targets)
    if targets and not any(each.smallest for each in plans):
        raise typer.Exit(1)


def _trace_load(path: Path, speed: float, num_requests: int | None) -> PlannedLoad:
    from genserve.planner.trace_files import TraceLoad

    return TraceLoad(path=path, speed=speed, num_requests=num_requests)


def _synthetic_load(
    *,
    rate: float,
    burstiness: float,
    lengths: tuple[float, float, float],
    system: tuple[int, int],
    turns: tuple[int, float],
    num_requests: int,
    seed: int,
) -> PlannedLoad:
    from genserve.planner.synthetic_load import Lengths, SyntheticLoad

    input_len, output_len, variation = lengths
    return SyntheticLoad(
        num_requests=num_requests,
        rate=rate,
        burstiness=burstiness,
        input_len=Lengths(mean=input_len, variation=variation),
        output_len=Lengths(mean=output_len, variation=variation),
        num_system_prompts=system[0],
        system_len=system[1],
        num_turns=turns[0],
        think_s=turns[1],
        seed=seed,
    )


def _show_progress(name: str, figures: FleetFigures) -> None:
    """Say on stderr which fleet has been simulated."""
    from genserve.cli.console import make_console

    rate = figures.num_requests / max(figures.cpu_s, 1e-9) * 60
    make_console(stderr=True).print(
        f"{name}: simulated {figures.num_replicas} replicas, {figures.num_requests} requests, "
        f"{rate:.0f} requests/min"
    )


def _print_plans(plans: Sequence[KindPlan], targets: Sequence[FleetTarget]) -> None:
    from genserve.planner.plan import cheapest

    for each in plans:
        print(
            f"{each.name}: {each.machine}; the step model errs by {each.median_error:.1%} (median), "
            f"{each.largest_error:.1%} at most"
        )
        _print_fleets(each.fleets, targets)
        print()
    if not targets:
        return
    print(f"targets: {', '.join(f'{target.name} {target.limit:g}' for target in targets)}")
    for each in plans:
        print(f"{each.name}: {_answer(each)}")
    best = cheapest(plans)
    if best is not None and len(plans) > 1:
        print(f"{'cheapest' if best.cost_per_hour is not None else 'fewest'}: {best.name}")


def _answer(each: KindPlan) -> str:
    if each.smallest is None:
        largest = each.fleets[-1]
        return f"{largest.num_replicas} replicas miss {', '.join(largest.missed)}; try --max-replicas"
    cost = f", {each.cost:g} per hour" if each.cost is not None else ""
    return f"{each.smallest.num_replicas} replicas meet them{cost}"


def _print_fleets(fleets: Sequence[FleetFigures], targets: Sequence[FleetTarget]) -> None:
    from rich.table import Table

    from genserve.cli.console import print_table

    table = Table(box=None, pad_edge=False)
    times = [(name, rank) for name in ("ttft", "itl") for rank in getattr(fleets[0], f"{name}_ms")]
    headings = ("replicas", "tokens/s", *(f"{name.upper()} p{rank:g}" for name, rank in times))
    for heading in (*headings, "busy", "cached", "rejected"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for fleet in fleets:
        values = [getattr(fleet, f"{name}_ms")[rank] for name, rank in times]
        remark = f"misses {', '.join(fleet.missed)}" if fleet.missed else "meets the targets" * bool(targets)
        too_long = f"; {fleet.too_long:.1%} of the requests are too long" if fleet.too_long else ""
        table.add_row(
            str(fleet.num_replicas),
            f"{fleet.output_rate:.0f}",
            *(f"{ms:.1f}" for ms in values),
            f"{fleet.utilisation:.0%}",
            f"{fleet.cached:.0%}",
            f"{fleet.rejected:.1%}",
            remark + too_long,
        )
    print_table(table)
