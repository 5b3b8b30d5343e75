"""Charts: the figures of the loads of one benchmark as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from genserve.bench.answers import LoadResult
from genserve.bench.summary import TIME_LABELS, Distribution, Summary, inter_token_latencies_s
from genserve.figure_file import new_figure

_TIMES = ("ttft", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartedLoad:
    """One load of a benchmark."""

    label: str
    result: LoadResult
    summary: Summary


def draw(loads: Sequence[ChartedLoad], *, title: str, path: Path) -> None:
    """Draw the distributions of the latencies, and the output tokens per second over time: a line per load.

    With several loads, also output tokens per second and percentiles of each. The suffix of `path` determines
    the format.

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
    for name, axis in zip(_TIMES, axes, strict=False):
        _draw_distribution(axis, loads, name)
    _draw_timeline(axes[-1], loads)
    figure.savefig(path)


def _draw_rates(axis: Any, loads: Sequence[ChartedLoad]) -> None:
    places = range(len(loads))
    bars = axis.bar(places, [load.summary.output_rate for load in loads], width=0.6)
    axis.bar_label(bars, fmt="%.0f")
    axis.set_xticks(places, labels=[load.label for load in loads])
    _finish(axis, x="load", y="output tokens per second", has_legend=False)


def _draw_percentiles(axis: Any, loads: Sequence[ChartedLoad]) -> None:
    """Draw, for each time, a line for its median over the loads, and a band up to its largest percentile."""
    places = range(len(loads))
    for name in _TIMES:
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
    if name == "itl":       # a few long ones would hide the others
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


def _finish(axis: Any, *, x: str, y: str, has_legend: bool = True) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if axis.get_yscale() != "log":
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if has_legend and axis.get_legend_handles_labels()[0]:
        axis.legend()
