"""Ensemble rules: whether the steps of an ensemble fit together.

Where Triton reports the same error, the message is Triton's.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from genserve.config.diagnostics import Diagnostic
from genserve.config.model_config import EnsembleStep, ModelConfig, TensorSpec
from genserve.errors import RepositoryError, suggestion
from genserve.repository.index import ModelEntry, all_step_models, is_decoupled, served_versions, step_models
from genserve.repository.rules.facts import ConfigFacts, ModelFacts
from genserve.tensor import compatible, shape_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSignature:
    """The data type and the shape of a tensor by the config of one model."""

    model: str
    data_type: str
    dims: tuple[int, ...]
    full_dims: tuple[int, ...]      # with the batch dimension

    @classmethod
    def of(cls, spec: TensorSpec, *, config: ModelConfig, dims: tuple[int, ...]) -> TensorSignature:
        """Return the signature of an input or output of a config whose shape is `dims`."""
        full_dims = config.with_batch(dims)
        return cls(model=config.name, data_type=spec.data_type, dims=dims, full_dims=full_dims)

    def conflict(self, other: TensorSignature) -> str:
        """Return the contradiction between both, in Triton's words; empty: there is none."""
        if "TYPE_INVALID" in (self.data_type, other.data_type) or not (self.dims and other.dims):
            return ""  # left to the model's file
        if self.data_type != other.data_type:
            return (
                f"inconsistent data type: {self.data_type} is inferred from model {self.model} while "
                f"{other.data_type} is inferred from model {other.model}"
            )
        if not compatible(self.dims, other.dims) and not compatible(self.full_dims, other.full_dims):
            return (
                f"inconsistent shape: {shape_text(self.full_dims)} is inferred from model {self.model} while "
                f"{shape_text(other.full_dims)} is inferred from model {other.model}"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleGraph:
    """The tensors of one ensemble, by the maps of its steps.

    Attributes:
        steps: the steps, in the order of the config, which has no meaning.
        inputs: the tensors of the request.
        outputs: the tensors of the response.
        made: the tensors that the request or a step provides.
        used: the tensors that a step takes.
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
        """Return the tensors that depend on this one."""
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
        """Return the steps of a cycle, and the steps that depend on them; empty: there is no cycle."""
        waiting = list(self.steps)
        while True:
            to_come = {tensor for step in waiting for tensor in step.output_map.values()} - self.inputs
            still = [step for step in waiting if to_come & set(step.input_map.values())]
            if len(still) == len(waiting):
                return still
            waiting = still

    def mixing_steps(self, decoupled: Container[str]) -> Iterator[EnsembleStep | None]:
        """Yield the steps whose inputs depend on different decoupled steps; None: the outputs do.

        Args:
            decoupled: names of the decoupled models.
        """
        # The decoupled step on which each tensor depends; 0: none.
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


def _steps(facts: ConfigFacts) -> Iterator[tuple[str, int, EnsembleStep]]:
    """Yield each step with its path and its index."""
    for index, step in enumerate(facts.config.ensemble_steps):
        yield f"ensemble_scheduling.step[{index}]", index, step


def check_steps(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject the steps that lack a field."""
    for path, index, step in _steps(facts):
        for field, value in (
            ("model_name", step.model_name),
            ("input_map", step.input_map),
            ("output_map", step.output_map),
        ):
            if not value:
                yield facts.error(
                    path,
                    f"must specify '{field}' in step {index} of ensemble '{facts.name}'",
                    remedy='add `model_name: "..."`'
                    if field == "model_name"
                    else f'add `{field} {{ key: "..." value: "..." }}`: the name of the tensor at the model, '
                    "and in the ensemble",
                )


def check_graph(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject tensors that are made twice, not made or not used, and steps that wait for each other."""
    if not facts.config.ensemble_steps:
        return      # `check_ensemble_fields` rejects the ensemble
    graph = EnsembleGraph.of(facts.config)
    yield from _made_twice(facts)
    yield from _not_made(facts, graph)
    yield from _not_used(facts, graph)
    yield from _waiting(facts, graph)


def _made_twice(facts: ConfigFacts) -> Iterator[Diagnostic]:
    made = {spec.name for spec in facts.config.inputs}
    for path, index, step in _steps(facts):
        for key, tensor in step.output_map.items():
            if tensor in made:
                yield facts.error(
                    f"{path}.output_map",
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble "
                    f"'{facts.name}' step {index}",
                    remedy="give each output of a step a unique name, which no input has",
                    key=key,
                )
            made.add(tensor)


def _not_made(facts: ConfigFacts, graph: EnsembleGraph) -> Iterator[Diagnostic]:
    for path, _, step in _steps(facts):
        for key, tensor in step.input_map.items():
            if tensor in graph.made:
                continue
            missed = graph.outputs & graph.after(tensor)
            message = (
                f"ensemble tensor '{tensor}' is unused in ensemble '{facts.name}'"
                if not missed
                else f"output '{min(missed)}' for ensemble '{facts.name}' is not written: at least one of "
                f"its depending tensors, '{tensor}', is not connected"
            )
            remedy = f"no input or step provides '{tensor}'; {suggestion(tensor, known=sorted(graph.made))}"
            yield facts.error(f"{path}.input_map", message, remedy=remedy, key=key)


def _not_used(facts: ConfigFacts, graph: EnsembleGraph) -> Iterator[Diagnostic]:
    config, end = facts.config, f"for ensemble {facts.name}' is not used"
    for index, spec in enumerate(config.inputs):
        if spec.name not in graph.used:
            yield facts.error(
                f"input[{index}].name",
                f"ensemble input '{spec.name}' {end}",
                remedy="leave it out, or map it to an input of a step",
            )
    for index, spec in enumerate(config.outputs):
        if spec.name not in graph.made | graph.used:
            yield facts.error(
                f"output[{index}].name",
                f"ensemble output '{spec.name}' {end}",
                remedy=suggestion(spec.name, known=sorted(graph.made)),
            )
    for path, _, step in _steps(facts):
        for key, tensor in step.output_map.items():
            if tensor not in graph.used | graph.outputs:
                yield facts.error(
                    f"{path}.output_map",
                    f"ensemble tensor '{tensor}' is unused in ensemble '{facts.name}'",
                    remedy="remove it from the `output_map`, or add it to the ensemble's `output`",
                    key=key,
                )


def _waiting(facts: ConfigFacts, graph: EnsembleGraph) -> Iterator[Diagnostic]:
    """Yield one error if steps depend on each other."""
    waiting = graph.waiting_steps()
    if not waiting:
        return
    tensors = {tensor for step in waiting for tensor in step.output_map.values()}
    names = ", ".join(repr(step.model_name) for step in waiting)
    yield facts.error(
        f"ensemble_scheduling.step[{graph.steps.index(waiting[0])}]",
        f"output '{min(tensors & graph.outputs or tensors)}' for ensemble '{facts.name}' is not written",
        remedy=f"these steps depend on each other: {names}; the inputs of a step must come from "
        "the ensemble or an earlier step",
    )


def check_step_models(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject the steps whose model, version or tensors do not exist."""
    for path, _, step in _steps(facts):
        model = facts.entries.get(step.model_name)
        if model is None:
            if step.model_name:
                yield facts.error(
                    f"{path}.model_name",
                    f"ensemble {facts.name} contains models that are not available or ambiguous: "
                    f"{step.model_name}",
                    remedy=suggestion(step.model_name, known=_other_models(facts)),
                )
        elif model.config is not None:
            yield from _version(facts, step, model, path=path)
            yield from _batch_size(facts, step, model.config, path=path)
            yield from _inputs(facts, step, model.config, path=path)
            yield from _outputs(facts, step, model.config, path=path)


def _other_models(facts: ModelFacts) -> list[str]:
    return [name for name in facts.entries if name != facts.name]


def _version(
    facts: ModelFacts, step: EnsembleStep, model: ModelEntry, *, path: str
) -> Iterator[Diagnostic]:
    if step.model_version == -1 or model.config is None:
        return
    try:
        served = served_versions(model.config, model.versions)
    except RepositoryError:
        return  # the rules of the model report it
    if step.model_version not in served:
        yield facts.error(
            f"{path}.model_version",
            f"ensemble '{facts.name}' depends on '{step.model_name}' whose required version "
            f"{step.model_version} is not loaded.",
            remedy="write `model_version: -1` for the latest; served versions: "
            f"{', '.join(map(str, served))}",
        )


def _batch_size(
    facts: ConfigFacts, step: EnsembleStep, model: ModelConfig, *, path: str
) -> Iterator[Diagnostic]:
    if 0 < model.max_batch_size < facts.config.max_batch_size:
        yield facts.error(
            f"{path}.model_name",
            f"ensemble {facts.name} allows maximum batch size {facts.config.max_batch_size}, but it "
            f"contains model {step.model_name} which only allows maximum batch size to be "
            f"{model.max_batch_size}",
            remedy=f"write `max_batch_size: {model.max_batch_size}` in the ensemble, or more in the model",
        )


def _inputs(
    facts: ConfigFacts, step: EnsembleStep, model: ModelConfig, *, path: str
) -> Iterator[Diagnostic]:
    start, end = f"in ensemble {facts.name}, ", f"in model {step.model_name}"
    for name in _unknown(step.input_map, tensors=model.inputs):
        yield facts.error(
            f"{path}.input_map",
            f"{start}ensemble tensor {step.input_map[name]} is mapping to non-existing input {name} {end}",
            remedy=suggestion(name, known=[spec.name for spec in model.inputs]),
            key=name,
        )
    for spec in model.inputs:
        if not spec.optional and spec.name not in step.input_map:
            yield facts.error(
                path,
                f"{start}input {spec.name} {end} is not mapped to any ensemble tensors",
                remedy=f'add `input_map {{ key: "{spec.name}" value: ... }}`',
            )


def _outputs(
    facts: ConfigFacts, step: EnsembleStep, model: ModelConfig, *, path: str
) -> Iterator[Diagnostic]:
    for name in _unknown(step.output_map, tensors=model.outputs):
        yield facts.error(
            f"{path}.output_map",
            f"in ensemble {facts.name}, ensemble tensor {step.output_map[name]} is mapped from "
            f"non-existing output {name} in model {step.model_name}",
            remedy=suggestion(name, known=[spec.name for spec in model.outputs]),
            key=name,
        )


def _unknown(mapped: Iterable[str], *, tensors: tuple[TensorSpec, ...]) -> list[str]:
    """Return the names without a tensor; a config without tensors is completed from the model's file."""
    names = [spec.name for spec in tensors]
    return [name for name in mapped if names and name not in names]


def check_circle(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject an ensemble that is a step of itself, by way of other ensembles."""
    for model in [facts.entry, *all_step_models(facts.entry, facts.entries)]:
        steps = model.config.ensemble_steps if model.config else ()
        if any(step.model_name == facts.name for step in steps):
            yield facts.error(
                "ensemble_scheduling",
                f"circular dependency between ensembles: {facts.name} -> ... -> {model.name} -> "
                f"{facts.name}",
                remedy="remove one of them from the steps of the other",
            )
            return


def _known_steps(facts: ModelFacts) -> Iterator[tuple[str, EnsembleStep, ModelConfig]]:
    """Yield each step whose model has a readable config, with its path and that config."""
    for path, _, step in _steps(facts):
        model = facts.entries.get(step.model_name)
        if model is not None and model.config is not None:
            yield path, step, model.config


def check_consistency(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject the tensors that two configs describe differently."""
    config = facts.config
    signatures = {
        spec.name: TensorSignature.of(spec, config=config, dims=spec.model_dims)
        for spec in (*config.inputs, *config.outputs)
    }
    for path, step, model in _known_steps(facts):
        for field, mapped, specs in (
            ("input_map", step.input_map, model.inputs),
            ("output_map", step.output_map, model.outputs),
        ):
            for spec in specs:
                if spec.name not in mapped:
                    continue
                tensor = mapped[spec.name]
                new = TensorSignature.of(spec, config=model, dims=spec.dims)
                conflict = signatures.setdefault(tensor, new).conflict(new)
                if conflict:
                    yield facts.error(
                        f"{path}.{field}",
                        f"in ensemble {facts.name}, ensemble tensor {tensor}: {conflict}",
                        remedy="both configs must agree; -1 fits any size",
                        key=spec.name,
                    )


def check_decoupling(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject the steps that combine the responses of different decoupled steps."""
    decoupled = {
        model.name
        for model in step_models(facts.entry, facts.entries)
        if is_decoupled(model, facts.entries)
    }
    graph = EnsembleGraph.of(facts.config)
    for step in graph.mixing_steps(decoupled):
        outputs = step.output_map.values() if step else ()
        is_last = step is None or any(facts.config.output(name) for name in outputs)
        index = facts.config.ensemble_steps.index(step) if step else 0
        yield facts.error(
            f"ensemble_scheduling.step[{index}]" if step else "output",
            f"in ensemble {facts.name}, step of model "
            f"'{facts.name if step is None or is_last else step.model_name}' receives inputs originated "
            "from different decoupled models",
            remedy="give it inputs from one decoupled step only: it runs once for each response of that step",
        )
