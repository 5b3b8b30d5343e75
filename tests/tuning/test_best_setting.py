from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.tuning.measurement import Goal, Measurement, Objective, choose, eligible
from genserve.tuning.search_space import Setting

NOW = Setting(graph="model.onnx", threads=2, batch_size=32)


def measured(batch_size: int, ms: float, *, threads: int = 2, graph: str = "model.onnx") -> Measurement:
    setting = Setting(graph=graph, threads=threads, batch_size=batch_size)
    return Measurement(setting=setting, step_s={64: ms / 2e3, 512: ms / 1e3}, token_bytes=1)


def goal(objective: Objective = Objective.THROUGHPUT, *, within_ms: float = 100) -> Goal:
    return Goal(objective=objective, max_inter_token_s=within_ms / 1e3)


ALL = [
    measured(1, 5), measured(8, 15), measured(16, 25), measured(32, 60), measured(64, 130),
    measured(1, 4, threads=1), measured(8, 30, threads=1), measured(16, 50, threads=1),
]


@pytest.mark.parametrize(
    ("within_ms", "objective", "batch_size", "threads"),
    [
        (100, Objective.THROUGHPUT, 16, 2),
        (20, Objective.THROUGHPUT, 8, 2),
        (4, Objective.THROUGHPUT, 1, 1),
        (100, Objective.LATENCY, 16, 1),
        (40, Objective.LATENCY, 8, 1),
    ],
)
def test_the_best_within_the_bound_is_chosen(
    within_ms: float, objective: Objective, batch_size: int, threads: int
) -> None:
    choice = choose(ALL, goal=goal(objective, within_ms=within_ms), current=NOW)
    assert choice.meets_bound
    assert choice.best.setting == Setting(graph="model.onnx", threads=threads, batch_size=batch_size)


def test_if_no_setting_is_within_the_bound_the_nearest_one_is_chosen() -> None:
    choice = choose(ALL, goal=goal(within_ms=3), current=NOW)
    assert not choice.meets_bound
    assert choice.best == measured(1, 4, threads=1)


def test_the_current_setting_stays_unless_another_is_better_by_more_than_noise() -> None:
    present, others = measured(32, 50), [measured(16, 24.6), measured(64, 98)]
    assert choose([*others, present], goal=goal(), current=NOW).best == present
    better = measured(64, 90)
    assert choose([*others, present, better], goal=goal(), current=NOW).best == better


def test_among_equal_settings_the_one_with_the_shortest_step_is_chosen() -> None:
    choice = choose([measured(64, 99), measured(16, 25), measured(8, 12.6)], goal=goal(), current=NOW)
    assert choice.best.setting.batch_size == 8


def test_a_graph_is_chosen_like_threads() -> None:
    smaller = measured(16, 20, graph="int4/model.onnx")
    assert choose([*ALL, smaller], goal=goal(), current=NOW).best == smaller


def test_a_graph_that_disagrees_with_its_source_is_eligible_only_if_it_is_current() -> None:
    rows = [measured(1, 5, graph=graph) for graph in ("model.onnx", "poor", "good", "unknown")]
    left = eligible(rows, agreements={"model.onnx": 0.1, "poor": 0.8, "good": 0.9}, least=0.9, current=NOW)
    assert [m.setting.graph for m in left] == ["model.onnx", "good", "unknown"]


@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.floats(1, 1000), st.integers(1, 3)), min_size=1),
    st.floats(1, 1000),
    st.sampled_from(Objective),
)
def test_the_choice_is_a_measured_setting_and_meets_the_bound_if_it_says_so(
    rows: list[tuple[int, float, int]], within_ms: float, objective: Objective
) -> None:
    measurements = [measured(batch_size, ms, threads=threads) for batch_size, ms, threads in rows]
    choice = choose(measurements, goal=goal(objective, within_ms=within_ms), current=NOW)
    assert choice.best in measurements
    assert choice.meets_bound == any(m.inter_token_s <= within_ms / 1e3 for m in measurements)
    assert choice.meets_bound == (choice.best.inter_token_s <= within_ms / 1e3)
