"""Models of tensors in a simulation: their configs, their backend, and the answers that are right."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from genserve.config.model_config import (
    Control,
    DirectStrategy,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    OldestStrategy,
    QueuePolicy,
    Resource,
    ResourceClaim,
    SequenceBatching,
    TensorSpec,
)
from genserve.inference import Inference, InferenceResponse, RequestFlags
from genserve.tensor import Tensor

if TYPE_CHECKING:
    from tests.simulation.tensor_simulation import TensorSimulation

MAX_BATCH_SIZE = 4
RESOURCE = "memory"
CAPACITY = 3
_X = TensorSpec(name="X", data_type="TYPE_FP32", dims=(1,))
_Y = TensorSpec(name="Y", data_type="TYPE_FP32", dims=(1,))
_START = Control(name="START", kind="CONTROL_SEQUENCE_START", data_type="TYPE_FP32")


class Fault(Exception):
    """A failure of a model that was injected."""


class InstanceDeath(BaseException):
    """A failure that ends the thread of an instance."""


def draw_config(rng: Random, name: str) -> ModelConfig:
    """Return a model without batching, with dynamic batching, or for sequences."""
    kind = rng.choice(["direct", "dynamic", "dynamic", "sequence"])
    needs = Resource(name=RESOURCE, count=rng.randint(1, CAPACITY), is_global=True)
    group = InstanceGroup(
        name=name,
        kind="KIND_CPU",
        count=rng.randint(1, 3),
        rate_limiter=ResourceClaim(resources=(needs,), priority=rng.choice([1, 2])),
    )
    options: dict[str, Any] = {}
    if kind == "dynamic":
        options["dynamic_batching"] = _dynamic_batching(rng)
    elif kind == "sequence":
        options["sequence_batching"] = _sequence_batching(rng)
    return tensor_config(
        name,
        group,
        max_batch_size=0 if kind == "direct" else MAX_BATCH_SIZE,
        decoupled=kind != "sequence" and rng.random() < 0.3,
        **options,
    )


def tensor_config(name: str, group: InstanceGroup, **options: Any) -> ModelConfig:
    """Return a model with one number as its input and as its output."""
    return ModelConfig(
        name=name, backend="simulated", inputs=(_X,), outputs=(_Y,), instance_groups=(group,), **options
    )


def _dynamic_batching(rng: Random) -> DynamicBatching:
    num_levels = rng.choice([0, 0, 2])
    return DynamicBatching(
        preferred_batch_sizes=rng.choice([(), (2,), (2, 4)]),
        max_queue_delay_us=rng.choice([0, 0, 1000, 50_000]),
        preserve_ordering=rng.random() < 0.3,
        priority_levels=num_levels,
        default_priority_level=num_levels,
        default_queue_policy=QueuePolicy(
            delays=rng.random() < 0.5,
            default_timeout_us=rng.choice([0, 0, 5000, 100_000]),
            allow_timeout_override=rng.random() < 0.5,
            max_queue_size=rng.choice([0, 0, 2]),
        ),
    )


def _sequence_batching(rng: Random) -> SequenceBatching:
    strategy: DirectStrategy | OldestStrategy = DirectStrategy(
        max_queue_delay_us=rng.choice([0, 1000]), minimum_slot_utilization=rng.choice([0.0, 0.5])
    )
    if rng.random() < 0.5:
        strategy = OldestStrategy(max_candidate_sequences=2, max_queue_delay_us=rng.choice([0, 1000]))
    return SequenceBatching(
        strategy=strategy, max_sequence_idle_us=rng.choice([20_000, 10_000_000]), controls=(_START,)
    )


def right_answer(value: float) -> float:
    """Return the answer of a model without sequences."""
    return 2 * value + 1


def num_responses(value: float) -> int:
    """Return how many responses a decoupled model sends."""
    return int(value) % 3


class SimulatedBackend:
    """Implements `Backend`: answers by `right_answer`, or with the sum of the values of a sequence so far.

    The sum of a sequence is kept in its slot, or under its id, as a model.py would do it; so a request that
    runs in another slot, or on another instance, gets another answer.
    """

    def __init__(self, simulation: TensorSimulation, source: Any, placement: Any) -> None:
        self._simulation = simulation
        self._config: ModelConfig = source.config
        self._name = placement.name
        self._rng = simulation.random()
        self._sums: dict[object, float] = {}
        self._is_executing = False
        self._is_closed = False
        simulation.threads.sleep(self._rng.choice([0.0, 0.001, 0.05]))
        if self._rng.random() < simulation.load_failure_rate:
            simulation.fault("load failure")
            raise Fault("injected")

    def execute(self, batch: Sequence[Inference]) -> None:
        """See `Backend.execute`."""
        simulation, rng = self._simulation, self._rng
        self._check(batch)
        simulation.check_execution(batch)
        claims = self._config.instance_groups[0].rate_limiter
        num_needed = sum(claim.count for claim in claims.resources) if claims else 0
        self._is_executing = True
        simulation.use(num_needed)
        try:
            simulation.threads.sleep(rng.choice([0.0, 0.0001, 0.01, 0.05]))
            kind = rng.random()
            if kind < simulation.failure_rate:
                simulation.fault("failed execution")
                raise Fault("injected")
            if kind < simulation.failure_rate + simulation.death_rate:
                simulation.fault("dead instance")
                simulation.disturbed = True
                raise InstanceDeath("injected")
            for slot, inference in enumerate(batch):
                self._answer(inference, slot)
        finally:
            simulation.use(-num_needed)
            self._is_executing = False

    def close(self) -> None:
        """See `Backend.close`."""
        if self._is_executing or self._is_closed:
            self._simulation.report(f"instance {self._name} is closed while it executes, or twice")
        self._is_closed = True

    def _check(self, batch: Sequence[Inference]) -> None:
        report = self._simulation.report
        if self._is_executing or self._is_closed:
            report(f"instance {self._name} executes two batches at once, or after its end")
        rows = sum(inference.batch_size for inference in batch)
        if not batch or rows > max(1, self._config.max_batch_size):
            report(f"a batch has {rows} rows")

    def _answer(self, inference: Inference, slot: int) -> None:
        value = float(inference.inputs["X"].array.sum())
        sequences = self._config.sequence_batching
        if sequences is not None:
            is_direct = isinstance(sequences.strategy, DirectStrategy)
            key = slot if is_direct else inference.request.correlation_id
            starts = inference.inputs["START"].array.sum() > 0
            value += 0.0 if starts else self._sums.get(key, 0.0)
            if inference.request.correlation_id:  # not of a null request, in an empty slot
                self._sums[key] = value
            inference.send(response_of(value), final=True)
        elif self._config.decoupled:
            for _ in range(num_responses(value)):
                inference.send(response_of(right_answer(value)), final=False)
                self._simulation.threads.point()
            inference.send(None, final=True)
        else:
            inference.send(response_of(right_answer(value)), final=True)


def response_of(value: float) -> InferenceResponse:
    """Return a response with one number."""
    return InferenceResponse(outputs=(Tensor("Y", np.array([[value]], dtype=np.float32)),))


def input_of(value: float, *, is_batched: bool) -> dict[str, Tensor]:
    """Return the input of a request with one row."""
    shape = (1, 1) if is_batched else (1,)
    return {"X": Tensor("X", np.full(shape, value, dtype=np.float32))}


def position(index: int, length: int) -> RequestFlags:
    """Return the flags of a request of a sequence."""
    flags = RequestFlags.SEQUENCE_START if index == 0 else RequestFlags.NONE
    return flags | (RequestFlags.SEQUENCE_END if index == length - 1 else RequestFlags.NONE)
