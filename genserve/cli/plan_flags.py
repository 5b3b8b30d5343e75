"""Plan flags: the options of `genserve plan`; those of a load have the names of `genserve bench`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from genserve.planner.replica_search import FleetTarget

_KINDS, _RATES, _TRACE, _TARGETS, _QUEUE = "Machines", "Load: rates", "Load: trace", "Targets", "Queue"
_TARGET = re.compile(r"(?:(ttft|itl)_p(\d+(?:\.\d+)?)|(rejected)):(\d+(?:\.\d+)?)")
_DEFAULT_REJECTED = 0.01    # share of the requests

StepTimes = Annotated[
    list[Path],
    typer.Option(
        help="File of `genserve tune --step-times`; repeatable, one for each kind of machine.",
        rich_help_panel=_KINDS,
    ),
]
CostPerHour = Annotated[
    list[float] | None,
    typer.Option(
        min=0, help="Of a replica of each kind, in the order of --step-times.", rich_help_panel=_KINDS
    ),
]
RequestRate = Annotated[
    float | None, typer.Option(min=0.001, help="Requests per second, of all turns.", rich_help_panel=_RATES)
]
Burstiness = Annotated[
    float,
    typer.Option(
        min=0.001,
        help="Shape of the gamma distribution of the intervals: 1 is Poisson, less is burstier.",
        rich_help_panel=_RATES,
    ),
]
InputLen = Annotated[
    float, typer.Option(min=1, help="Mean tokens of the message of a turn.", rich_help_panel=_RATES)
]
OutputLen = Annotated[float, typer.Option(min=1, help="Mean tokens of an answer.", rich_help_panel=_RATES)]
LengthVariation = Annotated[
    float,
    typer.Option(
        min=0,
        help="Standard deviation of the lengths / their mean; log-normal. 0: all are equal.",
        rich_help_panel=_RATES,
    ),
]
SystemPrompts = Annotated[
    int, typer.Option(min=0, help="System prompts that sessions share.", rich_help_panel=_RATES)
]
SystemLen = Annotated[int, typer.Option(min=0, help="Tokens of a system prompt.", rich_help_panel=_RATES)]
Turns = Annotated[
    int,
    typer.Option(min=1, help="Turns of a session; a prompt has all earlier turns.", rich_help_panel=_RATES),
]
ThinkTime = Annotated[
    float, typer.Option(min=0, help="Mean seconds from an answer to the next turn.", rich_help_panel=_RATES)
]
Seed = Annotated[int, typer.Option(min=0, help="Of all that is drawn.", rich_help_panel=_RATES)]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines as Mooncake's, a CSV file of BurstGPT or Azure, or a detailed report of "
        "`genserve bench`.",
        rich_help_panel=_TRACE,
    ),
]
Speed = Annotated[
    float, typer.Option(min=0.001, help="2: replay the trace in half its time.", rich_help_panel=_TRACE)
]
NumRequests = Annotated[
    int | None,
    typer.Option(min=1, help="Default: 10000 with rates, all of a trace.", rich_help_panel="Load"),
]
Targets = Annotated[
    list[str],
    typer.Option(
        "--target",
        metavar="FIGURE:LIMIT",
        help="ttft_p99:MS, itl_p50:MS with any percentile, or rejected:SHARE (default 0.01); repeatable.",
        rich_help_panel=_TARGETS,
    ),
]
Replicas = Annotated[
    list[int] | None,
    typer.Option(
        min=1, help="Simulate this number instead of a search; repeatable.", rich_help_panel=_TARGETS
    ),
]
MaxReplicas = Annotated[int, typer.Option(min=1, help="Search up to here.", rich_help_panel=_TARGETS)]
MaxQueue = Annotated[
    int, typer.Option(min=1, help="As of `genserve serve`, for each replica.", rich_help_panel=_QUEUE)
]
MaxQueueTokens = Annotated[
    int | None,
    typer.Option(min=0, help="Likewise. Default: 4 times the KV cache; 0: no limit.", rich_help_panel=_QUEUE),
]
MaxQueueWait = Annotated[
    float, typer.Option("--max-queue-wait-s", min=0, help="Likewise; 0: no limit.", rich_help_panel=_QUEUE)
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Fleets to simulate at the same time. Default: one per core.")
]
PlotPath = Annotated[Path | None, typer.Option(help="Plot the fleets to this .png, .svg or .pdf.")]


def read_targets(texts: Iterable[str]) -> list[FleetTarget]:
    """Return the targets, with one for rejections in any case; raises BadParameter."""
    from genserve.planner.replica_search import FleetTarget

    targets = []
    for text in texts:
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


def check_costs(costs: Sequence[float] | None, *, num_kinds: int) -> None:
    """Raise BadParameter unless each kind has a cost, or none has."""
    if costs and len(costs) != num_kinds:
        raise typer.BadParameter(
            f"there are {len(costs)} costs for {num_kinds} files of --step-times",
            param_hint="--cost-per-hour",
        )
