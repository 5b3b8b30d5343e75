"""The command `genserve plan`."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.cli.flags import JSON_FLAG
from genserve.cli.parser import UsageError
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genserve.planner.loads import PlannedLoad
    from genserve.planner.plan import FleetMetrics, FleetTarget, KindPlan

_machine_flag = partial(Flag, heading="Machines")
_rate_flag = partial(Flag, heading="Load: rates")
_trace_flag = partial(Flag, heading="Load: trace")
_target_flag = partial(Flag, heading="Targets")
_queue_flag = partial(Flag, heading="Queue")
_TARGET = re.compile(r"(?:(ttft|itl)_p(\d+(?:\.\d+)?)|(rejected)):(\d+(?:\.\d+)?)")
_DEFAULT_REJECTED = 0.01    # share of rejected requests
_DEFAULT_REQUESTS = 10_000


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The options of `genserve plan`."""

    step_times: list[Path] = flag(
        MISSING,
        _machine_flag(help="File of `genserve tune --step-times`; repeatable, one for each kind of machine."),
    )
    cost_per_hour: list[float] | None = flag(
        None, _machine_flag(help="Cost of a replica of each kind, in the order of --step-times.", minimum=0)
    )
    request_rate: float | None = flag(
        None, _rate_flag(help="Requests per second, of all turns.", minimum=0.001)
    )
    burstiness: float = flag(
        1.0,
        _rate_flag(
            help="Shape of the gamma distribution of the intervals: 1 is Poisson, less is burstier.",
            minimum=0.001,
        ),
    )
    input_len: float = flag(256, _rate_flag(help="Mean tokens of the message of a turn.", minimum=1))
    output_len: float = flag(128, _rate_flag(help="Mean tokens of an answer.", minimum=1))
    length_variation: float = flag(
        0.5,
        _rate_flag(
            help="Standard deviation of the lengths / their mean; log-normal. 0: all are equal.", minimum=0
        ),
    )
    system_prompts: int = flag(0, _rate_flag(help="System prompts that sessions share.", minimum=0))
    system_len: int = flag(0, _rate_flag(help="Tokens of a system prompt.", minimum=0))
    turns: int = flag(1, _rate_flag(help="Turns of a session; a prompt has all earlier turns.", minimum=1))
    think_time: float = flag(
        10.0, _rate_flag(help="Mean seconds from an answer to the next turn.", minimum=0)
    )
    seed: int = flag(0, _rate_flag(help="The same seed draws the same load.", minimum=0))
    trace: Path | None = flag(
        None,
        _trace_flag(
            help="JSON lines as Mooncake's, a CSV file of BurstGPT or Azure, or a detailed report of "
            "`genserve bench`."
        ),
    )
    speed: float = flag(1.0, _trace_flag(help="2: replay the trace in half its time.", minimum=0.001))
    num_requests: int | None = flag(
        None, Flag(help="Default: 10000 with rates, all of a trace.", heading="Load", minimum=1)
    )
    target: list[str] = flag(
        list,
        _target_flag(
            help="ttft_p99:MS, itl_p50:MS with any percentile, or rejected:SHARE (default 0.01); repeatable.",
            metavar="FIGURE:LIMIT",
        ),
    )
    replicas: list[int] | None = flag(
        None, _target_flag(help="Simulate this number instead of a search; repeatable.", minimum=1)
    )
    max_replicas: int = flag(64, _target_flag(help="Search up to here.", minimum=1))
    max_queue: int = flag(256, _queue_flag(help="As of `genserve serve`, for each replica.", minimum=1))
    max_queue_tokens: int | None = flag(
        None, _queue_flag(help="Likewise. Default: 4 times the KV cache; 0: no limit.", minimum=0)
    )
    max_queue_wait_s: float = flag(10.0, _queue_flag(help="Likewise; 0: no limit.", minimum=0))
    processes: int | None = flag(
        None, Flag(help="Fleets to simulate at the same time. Default: one per core.", minimum=1)
    )
    plot: Path | None = flag(None, Flag(help="Plot the fleets to this .png, .svg or .pdf."))
    json_: bool = flag(False, JSON_FLAG)

    def targets(self) -> list[FleetTarget]:
        """Return the targets, which always include one for rejections; raises UsageError."""
        from genserve.planner.plan import FleetTarget

        targets = []
        for text in self.target:
            matched = _TARGET.fullmatch(text)
            if matched is None or float(matched[2] or 0) > 100 or (matched[3] and float(matched[4]) > 1):
                raise UsageError(
                    f"--target: {text!r} is not ttft_p99:MS, itl_p99:MS, another percentile of them, or "
                    "rejected:SHARE"
                )
            rank = float(matched[2]) if matched[2] else None
            targets.append(FleetTarget(metric=matched[1] or matched[3], rank=rank, limit=float(matched[4])))
        if targets and not any(target.metric == "rejected" for target in targets):
            targets.append(FleetTarget(metric="rejected", rank=None, limit=_DEFAULT_REJECTED))
        return targets

    def costs(self) -> list[float] | list[None]:
        """Return the cost of each kind per hour, or None for each; raises UsageError."""
        if not self.cost_per_hour:
            return [None] * len(self.step_times)
        if len(self.cost_per_hour) != len(self.step_times):
            raise UsageError(
                f"--cost-per-hour has {len(self.cost_per_hour)} costs for the {len(self.step_times)} files "
                "of --step-times"
            )
        return self.cost_per_hour

    def load(self) -> PlannedLoad:
        """Return the load of the trace, or of the rates; raises UsageError."""
        from genserve.planner.loads import Lengths, SyntheticLoad, TraceLoad

        if (self.trace is None) == (self.request_rate is None):
            raise UsageError("give either --trace or --request-rate")
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


def plan(flags: PlanFlags) -> None:
    """Simulate a fleet under a load, and say how many replicas of which machine meet the targets.

    The scheduler, the KV cache, admission control and the router are the product's own; only the clock is
    virtual. One fleet has replicas of one kind.
    """
    from genserve.cli.console import print_json
    from genserve.cli.plots import check_plot, draw_fleets
    from genserve.machine import num_cores
    from genserve.planner.plan import as_document, make_plan, replica_kind
    from genserve.repository.options import RepositoryOptions

    targets, costs = flags.targets(), flags.costs()
    if not targets and not flags.replicas:
        raise UsageError("give each --target, or the --replicas to simulate")
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
        raise SystemExit(130) from None
    if flags.plot is not None:
        draw_fleets(plans, targets, path=flags.plot)
    if flags.json_:
        print_json(as_document(plans, targets))
    else:
        _print_plans(plans, targets)
    if targets and not any(each.smallest for each in plans):
        raise SystemExit(1)


def _show_progress(name: str, metrics: FleetMetrics) -> None:
    """Print on stderr which fleet has been simulated."""
    from genserve.cli.console import make_console

    rate = metrics.num_requests / max(metrics.cpu_s, 1e-9) * 60
    make_console(stderr=True).print(
        f"{name}: simulated {metrics.num_replicas} replicas, {metrics.num_requests} requests, "
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
    from genserve.cli.console import counted

    if each.smallest is None:
        largest = each.fleets[-1]
        misses = "misses" if largest.num_replicas == 1 else "miss"
        replicas = counted(largest.num_replicas, "replica")
        return f"{replicas} {misses} {', '.join(largest.missed)}; try --max-replicas"
    cost = f", {each.cost:g} per hour" if each.cost is not None else ""
    smallest = each.smallest.num_replicas
    return f"{counted(smallest, 'replica')} {'meets' if smallest == 1 else 'meet'} them{cost}"


def _print_fleets(fleets: Sequence[FleetMetrics], targets: Sequence[FleetTarget]) -> None:
    from rich.table import Table

    from genserve.cli.console import print_table

    table = Table(box=None, pad_edge=False)
    times = [(name, rank) for name in ("ttft", "itl") for rank in getattr(fleets[0], f"{name}_ms")]
    headings = ("replicas", "tokens/s", *(f"{name.upper()} p{rank:g} ms" for name, rank in times))
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
