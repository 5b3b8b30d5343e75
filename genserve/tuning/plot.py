"""Plot: draws the measurements of `genserve tune`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genserve.figure_file import new_figure
from genserve.tuning.best_setting import BestSetting, Goal
from genserve.tuning.measurement import Measurement


def draw(
    measurements: Sequence[Measurement], *, choice: BestSetting, goal: Goal, title: str, path: Path
) -> None:
    """Draw tokens per second, and milliseconds between tokens, over the batch size: a line per session.

    The choice is a star, the bound of the goal a line; the suffix of `path` determines the format.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    figure = new_figure()
    figure.suptitle(title)
    rates, times = figure.subplots(1, 2)
    for label, line in _lines(measurements).items():
        sizes = [m.setting.batch_size for m in line]
        rates.plot(sizes, [m.tokens_per_s for m in line], marker="o", label=label)
        times.plot(sizes, [m.inter_token_s * 1e3 for m in line], marker="o", label=label)
    best = choice.best
    mark = {"marker": "*", "s": 260, "color": "black", "zorder": 3, "label": "chosen"}
    rates.scatter(best.setting.batch_size, best.tokens_per_s, **mark)
    times.scatter(best.setting.batch_size, best.inter_token_s * 1e3, **mark)
    times.axhline(goal.max_inter_token_s * 1e3, color="gray", linestyle="--", label="bound")
    _axis(rates, "tokens per second", sizes=[m.setting.batch_size for m in measurements])
    _axis(
        times,
        f"ms between tokens, at a context of {max(best.step_s)}",
        sizes=[m.setting.batch_size for m in measurements],
    )
    figure.savefig(path)


def _lines(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    lines: dict[str, list[Measurement]] = defaultdict(list)
    for m in sorted(measurements, key=lambda m: m.setting.batch_size):
        lines[f"{m.setting.graph}, threads {m.setting.threads}"].append(m)
    return lines


def _axis(axis: Any, quantity: str, *, sizes: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(sizes)), labels=[str(size) for size in sorted(set(sizes))])
    axis.set_xlabel("batch size")
    axis.set_ylabel(quantity)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
