"""The command `genserve plan`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genserve.cli.flags import Json, takes_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genserve.planner.loads import PlannedLoad
    from genserve.planner.plan import FleetFigures, FleetTarget, KindPlan

_machine_option = partial(typer.Option, rich_help_panel="Machines")
_rate_option = partial(typer.Option, rich_help_panel="Load: rates")
_trace_option = partial(typer.Option, rich_help_panel="Load: trace")
_target_option = partial(typer.Option, rich_help_panel="Targets")
_queue_option = partial(typer.Option, rich_help_panel="Queue")
_TARGET = re.compile(r"(?:(ttft|itl)_p(\d+(?:\.\d+)?)|(rejected)):(\d+(?:\.\d+)?)")
_DEFAULT_REJECTED = 0.01    # share of the requests
_DEFAULT_REQUESTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFlags:
    """The options of `genserve plan`."""

    step_times: Annotated[
        list[Path],
        _machine_option(
            help="File of `genserve tune --step-times`; repeatable, one for each kind of machine."
        ),
    ]
    cost_per_hour: Annotated[
        list[float] | None,
        _machine_option(min=0, help="Of a replica of each kind, in the order of --step-times."),
    ] = None
    request_rate: Annotated[
        float | None, _rate_option(min=0.001, help="Requests per second, of all turns.")
    ] = None
    burstiness: Annotated[
        float,
        _rate_option(
            min=0.001,
            help="Shape of the gamma distribution of the intervals: 1 is Poisson, less is burstier.",
        ),
    ] = 1.0
    input_len: Annotated[float, _rate_option(min=1, help="Mean tokens of the message of a turn.")] = 256
    output_len: Annotated[float, _rate_option(min=1, help="Mean tokens of an answer.")] = 128
    length_variation: Annotated[
        float,
        _rate_option(
            min=0, help="Standard deviation of the lengths / their mean; log-normal. 0: all are equal."
        ),
    ] = 0.5
    system_prompts: Annotated[int, _rate_option(min=0, help="System prompts that sessions share.")] = 0
    system_len: Annotated[int, _rate_option(min=0, help="Tokens of a system prompt.")] = 0
    turns: Annotated[int, _rate_option(min=1, help="Turns of a session; a prompt has all earlier turns.")] = 1
    think_time: Annotated[
        float, _rate_option(min=0, help="Mean seconds from an answer to the next turn.")
    ] = 10.0
    seed: Annotated[int, _rate_option(min=0, help="Of all that is drawn.")] = 0
    trace: Annotated[
        Path | None,
        _trace_option(
            help="JSON lines as Mooncake's, a CSV file of BurstGPT or Azure, or a detailed report of "
            "`genserve bench`.",
        ),
    ] = None
    speed: Annotated[float, _trace_option(min=0.001, help="2: replay the trace in half its time.")] = 1.0
    num_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Default: 10000 with rates, all of a trace.", rich_help_panel="Load"),
    ] = None
    target: Annotated[
        list[str],
        _target_option(
            "--target",
            metavar="FIGURE:LIMIT",
            help="ttft_p99:MS, itl_p50:MS with any percentile, or rejected:SHARE (default 0.01); repeatable.",
        ),
    ] = field(default_factory=list)
    replicas: Annotated[
        list[int] | None, _target_option(min=1, help="Simulate this number instead of a search; repeatable.")
    ] = None
    max_replicas: Annotated[int, _target_option(min=1, help="Search up to here.")] = 64
    max_queue: Annotated[int, _queue_option(min=1, help="As of `genserve serve`, for each replica.")] = 256
    max_queue_tokens: Annotated[
        int | None, _queue_option(min=0, help="Likewise. Default: 4 times the KV cache; 0: no limit.")
    ] = None
    max_queue_wait_s: Annotated[
        float, _queue_option("--max-queue-wait-s", min=0, help="Likewise; 0: no limit.")
    ] = 10.0
    processes: Annotated[
        int | None, typer.Option(min=1, help="Fleets to simulate at the same time. Default: one per core.")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Plot the fleets to this .png, .svg or .pdf.")] = None
    json_: Json = False

    def targets(self) -> list[FleetTarget]:
        """Return the targets, with one for rejections in any case; raises BadParameter."""
        from genserve.planner.plan import FleetTarget

        targets = []
        for text in self.target:
            matched = _TARGET.fullmatch(text)
            if matched is None or float(matched[2] or 0) > 100 or (matched[3] and float(matched[4]) > 1):
                raise typer.BadParameter(
                    f"{text!r} is not ttft_p99:MS, itl_p99:MS, another percentile of them, or rejected:SHARE",
                    param_hint="--target",
                )
            rank = float(matched[2]) if matched[2] else None
            targets.append(FleetTarget(figure=matched[1] or matched[3], rank=rank, limit=float(matched[4])))
        if targets and not any(target.figure == "rejected" for target in targets):
            targets.append(FleetTarget(figure="rejected", rank=None, limit=_DEFAULT_REJECTED))
        return targets

    def costs(self) -> list[float] | list[None]:
        """Return the cost of each kind per hour, or None for each; raises BadParameter."""
        if not self.cost_per_hour:
            return [None] * len(self.step_times)
        if len(self.cost_per_hour) != len(self.step_times):
            raise typer.BadParameter(
                f"there are {len(self.cost_per_hour)} costs for {len(self.step_times)} files of --step-times",
                param_hint="--cost-per-hour",
            )
        return self.cost_per_hour

    def load(self) -> PlannedLoad:
        """Return the load of the trace, or of the rates; raises BadParameter."""
        from genserve.planner.loads import Lengths, SyntheticLoad, TraceLoad

        if (self.trace is None) == (self.request_rate is None):
            raise typer.BadParameter("give either a trace or --request-rate", param_hint="--trace")
        if self.trace is not None:
            return TraceLoad(path=self.trace, speed=self.speed, num_requests=self.num_requests)
        return SyntheticLoad(
            num_requests=self.num_requests or _DEFAULT_REQUESTS,
            rate=self.request_rate or 0.0,
            burstiness=self.burstiness,
            input_len=Lengths(mean=self.input_len, variation=self.length_variation),
            output_len=Lengths(mean=self.output_len, variation=self.length_variation),
            num_system_prompts=self.system_prompts,
            system_len=self.system_len,
            num_turns=self.turns,
            think_s=self.think_time,
            seed=self.seed,
        )


@takes_flags(_PlanFlags)
def plan(flags: _PlanFlags) -> None:
    """Simulate a fleet under a load, and say how many replicas of which machine meet the targets.

    The scheduler, the KV cache, admission control and the router are the product's own; only the clock is
    virtual. One fleet has replicas of one kind.
    """
    from genserve.backends.onnx_session import num_cores
    from genserve.cli.console import print_json
    from genserve.cli.plots import check_plot, draw_fleets
    from genserve.planner.plan import as_document, make_plan, replica_kind
    from genserve.repository.options import RepositoryOptions

    targets, costs = flags.targets(), flags.costs()
    if not targets and not flags.replicas:
        raise typer.BadParameter("give targets, or --replicas to simulate", param_hint="--target")
    load = flags.load()
    if flags.plot is not None:
        check_plot(flags.plot)
    options = RepositoryOptions(
        max_queue=flags.max_queue,
        max_queue_tokens=flags.max_queue_tokens,
        max_queue_wait_s=flags.max_queue_wait_s,
    )
    kinds = [replica_kind(path, options=options) for path in flags.step_times]
    try:
        plans = [
            make_plan(
                kind,
                load,
                targets,
                name=path.stem,
                cost_per_hour=cost,
                counts=flags.replicas or (),
                max_replicas=flags.max_replicas,
                num_processes=flags.processes or num_cores(),
                on_fleet=_show_progress,
            )
            for kind, path, cost in zip(kinds, flags.step_times, costs, strict=True)
        ]
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if flags.plot is not None:
        draw_fleets(plans, targets, path=flags.plot)
    if flags.json_:
        print_json(as_document(plans, targets))
    else:
        _print_plans(plans, targets)
    if targets and not any(each.smallest for each in plans):
        raise typer.Exit(1)


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
