"""Best setting: the best of the measured settings, for a goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from genserve.tuning.measurement import Measurement
from genserve.tuning.search_space import Setting

_NOISE = 0.03   # relative; medians within one run scatter by this much


class Objective(StrEnum):
    """The quantity to optimise."""

    THROUGHPUT = "throughput"   # tokens per second of all sequences together
    LATENCY = "latency"         # the time between tokens of a single sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The objective and its bound."""

    objective: Objective
    max_inter_token_s: float    # upper bound of the time between two tokens of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSetting:
    """The chosen setting."""

    best: Measurement
    meets_bound: bool           # whether it is within `max_inter_token_s`; False: no setting is


def choose(measurements: Sequence[Measurement], *, goal: Goal, current: Setting) -> BestSetting:
    """Return the best setting for a goal.

    For throughput, this is the setting with the most tokens per second within the bound. For latency, graph
    and threads are those of the fastest step of the smallest batch, and among these the throughput decides.
    Among settings that differ only by noise, the current one wins, or else the one with the shortest step.

    Args:
        measurements: at least one.
        goal: if no setting is within its bound, the one with the shortest step is chosen.
        current: the setting in the config.
    """
    within = [m for m in measurements if m.inter_token_s <= goal.max_inter_token_s]
    if not within:
        return BestSetting(best=min(measurements, key=lambda m: m.inter_token_s), meets_bound=False)
    if goal.objective is Objective.LATENCY:
        within = _fastest_alone(within, current=current)
    most = max(m.tokens_per_s for m in within)
    nearly = [m for m in within if m.tokens_per_s >= most * (1 - _NOISE)]
    unchanged = [m for m in nearly if m.setting == current]
    return BestSetting(best=min(unchanged or nearly, key=lambda m: m.inter_token_s), meets_bound=True)


def eligible(
    measurements: Sequence[Measurement], *, agreements: Mapping[str, float], least: float, current: Setting
) -> list[Measurement]:
    """Return the measurements of graphs that agree well enough with their source.

    `agreements` are the known top-1 agreements of graphs with their source, 0 to 1, and `least` is the
    required one. The current graph, and those of unknown agreement, are always eligible.
    """
    return [
        m
        for m in measurements
        if m.setting.graph == current.graph or agreements.get(m.setting.graph, 1.0) >= least
    ]


def _fastest_alone(measurements: Sequence[Measurement], *, current: Setting) -> list[Measurement]:
    """Return the measurements with the graph and the threads of the fastest step of the smallest batch."""
    smallest = min(m.setting.batch_size for m in measurements)
    alone = [m for m in measurements if m.setting.batch_size == smallest]
    least_s = min(m.inter_token_s for m in alone)
    nearly = [m for m in alone if m.inter_token_s <= least_s * (1 + _NOISE)]
    unchanged = [m for m in nearly if _session(m.setting) == _session(current)]
    fastest = min(unchanged or nearly, key=lambda m: m.inter_token_s)
    return [m for m in measurements if _session(m.setting) == _session(fastest.setting)]


def _session(setting: Setting) -> tuple[str, int]:
    return setting.graph, setting.threads
