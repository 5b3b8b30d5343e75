"""A replica whose step times are known, in files and in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from genserve.engine.admission_control import QueueLimits
from genserve.planner.simulated_replica import ReplicaKind
from genserve.planner.step_model import StepModel
from genserve.tuning.measured_steps import EngineLimits, MeasuredEngine, MeasuredStep, ServingCost, StepSize

LIMITS = EngineLimits(
    max_num_seqs=4, max_num_batched_tokens=64, max_length=512, num_blocks=128, block_size=16
)


def seconds(size: StepSize) -> float:
    """The time of a step on the imaginary machine."""
    tokens = size.decodes + size.prompt_tokens
    return 0.01 + 0.0005 * tokens + 2e-6 * size.context_tokens + 3e-7 * size.prompt_pairs + 2e-4 * size.rows


def measured_steps() -> list[MeasuredStep]:
    sizes = [
        StepSize(
            decodes=decodes,
            context_tokens=decodes * context,
            prompt_tokens=prompt,
            prompt_pairs=prompt * (context + (prompt + 1) // 2),
            rows=decodes + (prompt > 0),
        )
        for context in (32, 256)
        for decodes in (0, 1, 2, 4)
        for prompt in (0, 8, 24, 60)
        if decodes or prompt
    ]
    return [MeasuredStep(size=size, seconds=seconds(size)) for size in sizes]


@pytest.fixture(scope="session")
def engine() -> MeasuredEngine:
    return MeasuredEngine(
        model="tiny", machine="imaginary", limits=LIMITS, serving=ServingCost(), steps=measured_steps()
    )


@pytest.fixture
def step_times(engine: MeasuredEngine, tmp_path: Path) -> Path:
    engine.write(tmp_path / "steps.json")
    return tmp_path / "steps.json"


@pytest.fixture(scope="session")
def kind(engine: MeasuredEngine) -> ReplicaKind:
    return ReplicaKind(
        limits=LIMITS,
        step_model=StepModel(engine.steps, max_tokens=LIMITS.max_num_batched_tokens),
        serving=ServingCost(),
        queue_limits=QueueLimits(max_requests=64, max_wait_s=5.0),
    )
