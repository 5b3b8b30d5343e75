from __future__ import annotations

from dataclasses import replace

import pytest

from genserve.bench.answers import Answer, LoadResult
from genserve.planner import serving_cost
from genserve.planner.serving_cost import measure_serving_cost
from genserve.tuning.measured_steps import MeasuredEngine, ServingCost, StepSize
from tests.planner.conftest import seconds

COST = ServingCost(request_s=0.02, busy_s=0.02, step_s=0.003, token_s=0.0005)


class ImaginaryLoads:
    """Answers as a server with these costs would, whose prompts are computed in one step."""

    def __init__(self, engine: MeasuredEngine, *, url: str) -> None:
        self.num_requests = 0

    def run(self, count: int) -> list[Answer]:
        self.num_requests += count
        step = {"decodes": 0, "context_tokens": 0, "prompt_tokens": 40, "prompt_pairs": 820, "rows": 1}
        now_s = 5.0 + COST.request_s + seconds(StepSize(**step)) + COST.step_s + COST.token_s
        result = LoadResult(answers=[Answer(sent_s=5.0, prompt_tokens=40) for _ in range(count)])
        for index in range(30):
            for answer in result.answers:
                answer.text_times_s.append(now_s)
            step = {"decodes": count, "context_tokens": count * (41 + index), "rows": count}
            now_s += seconds(StepSize(**step, prompt_tokens=0, prompt_pairs=0))
            now_s += COST.step_s + COST.token_s * count
        return result.answers


def test_the_costs_of_a_server_are_found(engine: MeasuredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_cost, "_Loads", ImaginaryLoads)
    found = measure_serving_cost(engine, url="")
    assert found.request_s == found.busy_s == pytest.approx(COST.request_s)
    assert found.step_s == pytest.approx(COST.step_s)
    assert found.token_s == pytest.approx(COST.token_s)


def test_of_one_sequence_at_a_time_all_is_the_steps(
    engine: MeasuredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_cost, "_Loads", ImaginaryLoads)
    single = replace(engine, limits=replace(engine.limits, max_num_seqs=1))
    found = measure_serving_cost(single, url="")
    assert found.step_s == pytest.approx(COST.step_s + COST.token_s)
    assert found.token_s == 0
