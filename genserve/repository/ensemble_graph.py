"""Ensemble graph: which tensor of an ensemble comes from which, by the maps of its steps alone."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from genserve.config.model_config import EnsembleStep, ModelConfig

__all__ = ["EnsembleGraph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleGraph:
    """The tensors of one ensemble.

    Attributes:
        steps: in the order of the config, which means nothing.
        inputs: what the request brings.
        outputs: what the response takes.
        made: what the request or a step makes.
        used: what a step takes.
    """

    steps: tuple[EnsembleStep, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]
    made: frozenset[str]
    used: frozenset[str]

    @classmethod
    def of(cls, config: ModelConfig) -> EnsembleGraph:
        """Read the graph from the config of an ensemble."""
        inputs = frozenset(spec.name for spec in config.inputs)
        steps = config.ensemble_steps
        return cls(
            steps=steps,
            inputs=inputs,
            outputs=frozenset(spec.name for spec in config.outputs),
            made=inputs.union(*(step.output_map.values() for step in steps)),
            used=frozenset[str]().union(*(step.input_map.values() for step in steps)),
        )

    def after(self, tensor: str) -> frozenset[str]:
        """Return the tensors that cannot be made without this one."""
        found = {tensor}
        while True:
            more = {
                name
                for step in self.steps
                if found & set(step.input_map.values())
                for name in step.output_map.values()
            }
            if more <= found:
                return frozenset(found)
            found |= more

    def waiting_steps(self) -> list[EnsembleStep]:
        """Return the steps that wait for each other, or for one that does; empty: there is no circle."""
        waiting = list(self.steps)
        while True:
            to_come = {tensor for step in waiting for tensor in step.output_map.values()} - self.inputs
            still = [step for step in waiting if to_come & set(step.input_map.values())]
            if len(still) == len(waiting):
                return still
            waiting = still

    def mixing_steps(self, decoupled: Container[str]) -> Iterator[EnsembleStep | None]:
        """Yield the steps whose inputs do not all follow the same responses; None: the outputs do not.

        Args:
            decoupled: the models that give any number of responses.
        """
        # Which decoupled step's responses each tensor follows; 0: it comes once.
        source = dict.fromkeys(self.inputs, 0)
        waiting = list(self.steps)
        while ready := [step for step in waiting if source.keys() >= set(step.input_map.values())]:
            for step in ready:
                waiting.remove(step)
                sources = {source[tensor] for tensor in step.input_map.values()} or {0}
                if len(sources) > 1:
                    yield step
                follows = 1 + self.steps.index(step) if step.model_name in decoupled else max(sources)
                source.update(dict.fromkeys(step.output_map.values(), follows))
        if len({source[tensor] for tensor in self.outputs if tensor in source}) > 1:
            yield None
