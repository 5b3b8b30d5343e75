"""Plots: draws the results of `genserve bench`, `plan` and `tune` for `--plot`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from genserve.bench.answers import LoadResult
from genserve.bench.summary import TIME_LABELS, Distribution, Summary, inter_token_latencies_s
from genserve.errors import InvalidRequest, MissingDependency

if TYPE_CHECKING:
    from genserve.planner.plan import FleetTarget, KindPlan
    from genserve.tuning.measurement import BestSetting, Goal, Measurement

_BENCH_TIMES = ("ttft", "itl", "e2el")
_STAR = {"marker": "*", "s": 260, "color": "black", "zorder": 3}


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn, before anything is measured.

    Raises:
        MissingDependency: matplotlib is not installed.
        InvalidRequest: the folder does not exist, or the suffix is not an image format.
    """
    formats = new_figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise InvalidRequest(
            f"the suffix of {path} is not an image format", remedy=f"use one of {', '.join(sorted(formats))}"
        )
    check_folder(path, of="plot")


def check_folder(path: Path, *, of: str) -> None:
    """Raise InvalidRequest unless the folder of a file to be written exists."""
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent} for the {of}", remedy="create it")


def new_figure(*, height: float = 5.0) -> Any:
    """Return an empty figure of matplotlib; raises MissingDependency if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("a plot needs matplotlib", remedy="pip install 'genserve[plot]'") from error
    return Figure(figsize=(12, height), layout="constrained", dpi=120)


def _finish(axis: Any, *, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if axis.get_yscale() != "log":
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartedLoad:
    """One load of a benchmark."""

    label: str
    result: LoadResult
    summary: Summary


def draw_loads(loads: Sequence[ChartedLoad], *, title: str, path: Path) -> None:
    """Draw the distributions of latencies, and the output tokens per second over time, with a line per load.

    If there are several loads, also draw the output tokens per second and the percentiles of each. The suffix
    of `path` determines the format.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    compares = len(loads) > 1
    figure = new_figure(height=12.0 if compares else 8.0)
    figure.suptitle(title)
    axes = figure.subplots(3 if compares else 2, 2).flatten().tolist()
    if compares:
        _draw_rates(axes.pop(0), loads)
        _draw_percentiles(axes.pop(0), loads)
    for name, axis in zip(_BENCH_TIMES, axes, strict=False):
        _draw_distribution(axis, loads, name)
    _draw_timeline(axes[-1], loads)
    figure.savefig(path)


def _draw_rates(axis: Any, loads: Sequence[ChartedLoad]) -> None:
    places = range(len(loads))
    bars = axis.bar(places, [load.summary.output_rate for load in loads], width=0.6)
    axis.bar_label(bars, fmt="%.0f")
    axis.set_xticks(places, labels=[load.label for load in loads])
    _finish(axis, x="load", y="output tokens per second")


def _draw_percentiles(axis: Any, loads: Sequence[ChartedLoad]) -> None:
    """Draw the median of each latency over the loads as a line, and a band up to its largest percentile."""
    places = range(len(loads))
    for name in _BENCH_TIMES:
        times: list[Distribution | None] = [getattr(load.summary, name) for load in loads]
        medians = [time.median if time else np.nan for time in times]
        highest = [max((*time.percentiles.values(), time.median)) if time else np.nan for time in times]
        [line] = axis.plot(places, medians, marker="o", label=f"{TIME_LABELS[name]}, median")
        axis.fill_between(places, medians, highest, color=line.get_color(), alpha=0.2)
    axis.set_yscale("log")
    axis.set_xticks(places, labels=[load.label for load in loads])
    _finish(axis, x="load; the bands end at the largest percentile", y="ms")


def _draw_distribution(axis: Any, loads: Sequence[ChartedLoad], name: str) -> None:
    """Draw the share of requests, or of chunks, that took at most a time."""
    for load in loads:
        times_ms = np.sort(_times_s(load.result, name)) * 1e3
        if len(times_ms):
            axis.ecdf(times_ms, label=load.label)
    if name == "itl":       # a few long latencies would hide all others
        axis.set_xscale("symlog", linthresh=1)
    _finish(axis, x=f"{TIME_LABELS[name]}, ms", y="share")


def _times_s(result: LoadResult, name: str) -> list[float]:
    complete = result.complete()
    match name:
        case "ttft":
            return [answer.first_text_s for answer in complete if answer.first_text_s is not None]
        case "itl":
            return inter_token_latencies_s(complete)
        case _:
            return [answer.latency_s for answer in complete]


def _draw_timeline(axis: Any, loads: Sequence[ChartedLoad]) -> None:
    """Draw the chunks with text of each second, or of each twentieth of a short load."""
    for load in loads:
        result = load.result
        texts_s = [time_s for answer in result.answers for time_s in answer.text_times_s]
        width_s = min(1.0, max(result.elapsed_s, 1e-3) / 20)
        edges = np.arange(0, result.elapsed_s + width_s, width_s)
        counts, edges = np.histogram(np.array(texts_s) - result.started_s, edges)
        axis.stairs(counts / width_s, edges, label=load.label)
    _finish(axis, x="seconds since the start", y="chunks with text per second")


def draw_fleets(plans: Sequence[KindPlan], targets: Sequence[FleetTarget], *, path: Path) -> None:
    """Draw time to first token, time between tokens, tokens per second and shares, per kind of machine.

    Targets are dashed lines, and the smallest fleets that meet them are stars. The suffix of `path`
    determines the format.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    figure = new_figure(height=8.0)
    figure.suptitle("genserve plan")
    axes = figure.subplots(2, 2)
    [[first, between], [rates, shares]] = axes
    for plan in plans:
        counts = [fleet.num_replicas for fleet in plan.fleets]
        for axis, name in ((first, "ttft_ms"), (between, "itl_ms")):
            axis.set_yscale("log")
            for rank in getattr(plan.fleets[0], name):
                times = [getattr(fleet, name)[rank] for fleet in plan.fleets]
                axis.plot(counts, times, marker="o", label=f"{plan.name}, p{rank:g}")
        rates.plot(counts, [fleet.output_rate for fleet in plan.fleets], marker="o", label=plan.name)
        for figure_name in ("utilisation", "cached", "rejected"):
            values = [getattr(fleet, figure_name) for fleet in plan.fleets]
            shares.plot(counts, values, marker="o", label=f"{plan.name}, {figure_name}")
        if targets and plan.smallest is not None:
            rates.scatter(plan.smallest.num_replicas, plan.smallest.output_rate, **_STAR)
    for target in targets:
        axis = {"ttft": first, "itl": between, "rejected": shares}[target.metric]
        axis.axhline(target.limit, color="gray", linestyle="--", label=f"target, {target.name}")
    quantities = (
        "first token, ms", "between tokens, ms", "tokens per second; stars meet the targets", "share",
    )  # fmt: skip
    for axis, quantity in zip(axes.flatten(), quantities, strict=True):
        axis.xaxis.get_major_locator().set_params(integer=True)
        _finish(axis, x="replicas", y=quantity)
    figure.savefig(path)


def draw_settings(
    measurements: Sequence[Measurement], *, choice: BestSetting, goal: Goal, title: str, path: Path
) -> None:
    """Draw tokens per second and milliseconds between tokens over the batch size, with a line per session.

    The chosen setting is a star, and the bound of the goal a line. The suffix of `path` determines the
    format.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    figure = new_figure()
    figure.suptitle(title)
    rates, times = figure.subplots(1, 2)
    for label, line in _by_session(measurements).items():
        sizes = [m.setting.batch_size for m in line]
        rates.plot(sizes, [m.tokens_per_s for m in line], marker="o", label=label)
        times.plot(sizes, [m.inter_token_s * 1e3 for m in line], marker="o", label=label)
    best = choice.best
    rates.scatter(best.setting.batch_size, best.tokens_per_s, label="chosen", **_STAR)
    times.scatter(best.setting.batch_size, best.inter_token_s * 1e3, label="chosen", **_STAR)
    times.axhline(goal.max_inter_token_s * 1e3, color="gray", linestyle="--", label="bound")
    sizes = sorted({m.setting.batch_size for m in measurements})
    between = f"ms between tokens, at a context of {max(best.step_s)}"
    for axis, quantity in ((rates, "tokens per second"), (times, between)):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, labels=[str(size) for size in sizes])
        _finish(axis, x="batch size", y=quantity)
    figure.savefig(path)


def _by_session(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    lines: dict[str, list[Measurement]] = defaultdict(list)
    for m in sorted(measurements, key=lambda m: m.setting.batch_size):
        lines[f"{m.setting.graph}, threads {m.setting.threads}"].append(m)
    return lines
