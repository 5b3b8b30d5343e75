"""Report: summarises the measurements of several rounds as medians, ratios and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Figures", "markdown", "median", "prefix_figures", "ratio", "serving_figures"]

Figures: TypeAlias = Mapping[str, float]    # the figures of one target in one round, by name


def serving_figures(measured: Mapping[str, Any], *, concurrency: int) -> Figures:
    """Summarise raw measurements (`targets.Measured`): tokens per second, and milliseconds.

    `together_p50_ms` is the time to first token of the requests that were sent simultaneously at the start.
    Every other request was sent at the end of an earlier request.
    """
    speed = {"tokens_per_s": sum(measured["new_tokens"]) / measured["elapsed_s"]}
    first_s, gaps_s = measured["first_text_s"], measured["gaps_s"]
    if not first_s:
        return speed
    return speed | {
        "prompt_tokens": statistics.fmean(measured["prompt_tokens"]),
        "together_p50_ms": float(np.percentile(first_s[:concurrency], 50)) * 1e3,
        "first_p50_ms": float(np.percentile(first_s, 50)) * 1e3,
        "first_p95_ms": float(np.percentile(first_s, 95)) * 1e3,
        "gap_p50_ms": float(np.percentile(gaps_s, 50)) * 1e3,
        "gap_p95_ms": float(np.percentile(gaps_s, 95)) * 1e3,
    }


def prefix_figures(measured: Mapping[str, Any]) -> Figures:
    """Return the times to first token of two consecutive requests, in milliseconds."""
    cold_s, warm_s = measured["first_text_s"]
    return {"cold_ms": cold_s * 1e3, "warm_ms": warm_s * 1e3, "sooner": cold_s / warm_s}


def median(rounds: Sequence[Figures], name: str) -> float | None:
    """Return the median of a figure over the rounds; None if it was not measured."""
    values = [figures[name] for figures in rounds if name in figures]
    return statistics.median(values) if values else None


def ratio(rounds: Sequence[Figures], others: Sequence[Figures], name: str) -> float | None:
    """Return the median of the ratios within each round, whose sides were measured in the same minutes."""
    pairs = zip(rounds, others, strict=True)
    ratios = [mine[name] / other[name] for mine, other in pairs if name in mine and name in other]
    return statistics.median(ratios) if ratios else None


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with its first column aligned left, and all other columns right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(row, widths) for row in (headings, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return f"| {' | '.join([first, *others])} |"
