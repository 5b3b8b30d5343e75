"""Best setting: the best of the measured settings, for a goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from genserve.tuning.measurement import Measurement
from genserve.tuning.search_space import Setting

__all__ = ["BestSetting", "Goal", "Objective", "choose", "usable"]


_SAME = 0.03    # two rates that differ by less are the same: medians of one run scatter so much


class Objective(StrEnum):
    """What is to be best."""

    THROUGHPUT = "throughput"   # tokens per second of all sequences together
    LATENCY = "latency"         # the time between tokens of a sequence that is alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked for."""

    objective: Objective
    max_inter_token_s: float    # no sequence shall wait longer for its next token


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSetting:
    """What was chosen."""

    best: Measurement
    meets_bound: bool           # whether it is within `max_inter_token_s`; if not, no setting is


def choose(measurements: Sequence[Measurement], *, goal: Goal, now: Setting) -> BestSetting:
    """Return the best setting for a goal.

    By throughput: the one with the most tokens per second among those within the bound. By latency: graph
    and threads of the fastest step of the smallest batch, then likewise among theirs. Among settings that
    are the same but for noise the present one wins, else the one with the shorter step.

    Args:
        measurements: at least one.
        goal: see there. If nothing is within the bound, the setting with the shortest step is chosen.
        now: the present setting.
    """
    within = [m for m in measurements if m.inter_token_s <= goal.max_inter_token_s]
    if not within:
        return BestSetting(best=min(measurements, key=lambda m: m.inter_token_s), meets_bound=False)
    if goal.objective is Objective.LATENCY:
        within = _fastest_alone(within, now=now)
    most = max(m.tokens_per_s for m in within)
    nearly = [m for m in within if m.tokens_per_s >= most * (1 - _SAME)]
    present = [m for m in nearly if m.setting == now]
    return BestSetting(best=min(present or nearly, key=lambda m: m.inter_token_s), meets_bound=True)


def usable(
    measurements: Sequence[Measurement], *, agreements: Mapping[str, float], least: float, now: Setting
) -> list[Measurement]:
    """Leave out the graphs that are too far from their source to be chosen; the present one never is.

    Args:
        measurements: of any graphs.
        agreements: of each graph with its source, from 0 to 1, as far as that is known.
        least: a graph that is known to agree less often is left out.
        now: the present setting.
    """
    return [
        m
        for m in measurements
        if m.setting.graph == now.graph or agreements.get(m.setting.graph, 1.0) >= least
    ]


def _fastest_alone(measurements: Sequence[Measurement], *, now: Setting) -> list[Measurement]:
    """Those that share graph and threads with the fastest step of the smallest batch."""
    smallest = min(m.setting.batch_size for m in measurements)
    alone = [m for m in measurements if m.setting.batch_size == smallest]
    least_s = min(m.inter_token_s for m in alone)
    nearly = [m for m in alone if m.inter_token_s <= least_s * (1 + _SAME)]
    present = [m for m in nearly if _session(m.setting) == _session(now)]
    fastest = min(present or nearly, key=lambda m: m.inter_token_s)
    return [m for m in measurements if _session(m.setting) == _session(fastest.setting)]


def _session(setting: Setting) -> tuple[str, int]:
    return setting.graph, setting.threads
