"""Wiring: whether the steps of an ensemble are the stages of a generation model, and get their tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from genserve.config.fault import Fault, Severity, nearest
from genserve.config.model_config import EnsembleStep, ModelConfig, TensorSpec
from genserve.repository.index import ModelEntry

__all__ = ["STAGE_BACKENDS", "step_models", "wiring_faults"]

# Which backend makes which stage.
STAGE_BACKENDS = {"tokenizer": "tokenizer", "logits": "onnxruntime", "decoder": "python"}


def step_models(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> list[ModelEntry]:
    """Return the models that an ensemble's steps name, as far as there are such."""
    steps = entry.config.ensemble_steps if entry.config else ()
    return [entries[step.model_name] for step in steps if step.model_name in entries]


def wiring_faults(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> Iterator[Fault]:
    """Yield what is wrong between an ensemble and the models of its steps; not what is wrong with those."""
    config = entry.config
    if config is None or not config.ensemble_steps:
        return  # which is a fault of the config
    yield from _chain(entry, entries)
    for index, step in enumerate(config.ensemble_steps):
        yield from _step(entry, entries, step=step, path=f"ensemble_scheduling.step[{index}]")
    yield from _makers(entry, config)
    yield from _cycle(entry, config)


def _error(entry: ModelEntry, path: str, message: str, *, remedy: str, key: str | None = None) -> Fault:
    """Make an error at a field, or at the entry of a map that has this key."""
    places = entry.parsed.places
    return Fault(
        severity=Severity.ERROR,
        path=entry.path / "config.pbtxt",
        place=places.of(path) if key is None else places.of_key(path, key),
        message=message,
        remedy=remedy,
    )


def _chain(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> Iterator[Fault]:
    steps = entry.config.ensemble_steps if entry.config else ()
    models = step_models(entry, entries)
    backends = sorted(model.config.backend for model in models if model.config)
    # A step whose model is missing, broken, or of no known backend is told where that is wrong.
    is_known = len(backends) == len(steps) and not any(model.error for model in models)
    if is_known and backends != sorted(STAGE_BACKENDS.values()):
        found = ", ".join(step.model_name for step in steps)
        yield _error(
            entry,
            "ensemble_scheduling",
            f"the ensemble is not a chain of a tokenizer, a logits and a decoder stage: {found}",
            remedy="give it three steps whose backends are 'tokenizer', 'onnxruntime' and 'python'",
        )


def _step(
    entry: ModelEntry, entries: Mapping[str, ModelEntry], *, step: EnsembleStep, path: str
) -> Iterator[Fault]:
    model = entries.get(step.model_name)
    if model is None:
        yield _error(
            entry,
            f"{path}.model_name",
            f"a step names the model {step.model_name!r}, and the repository has none of this name",
            remedy=nearest(step.model_name, known=(name for name in entries if name != entry.name)),
        )
        return
    if step.model_version > 0 and model.versions and step.model_version != model.versions[-1]:
        yield _error(
            entry,
            f"{path}.model_version",
            f"model_version {step.model_version} of {step.model_name!r} is not honoured: "
            f"{model.versions[-1]}, the highest, would be served",
            remedy="write -1, and move the folders of higher versions away",
        )
    if model.config is not None:
        yield from _input_map(entry, model.config, step=step, path=path)
        yield from _unknown_names(
            entry, step.output_map, tensors=model.config.outputs, model=model.name, path=f"{path}.output_map"
        )


def _input_map(entry: ModelEntry, model: ModelConfig, *, step: EnsembleStep, path: str) -> Iterator[Fault]:
    for tensor in model.inputs:
        if not tensor.optional and tensor.name not in step.input_map:
            yield _error(
                entry,
                path,
                f"the step {model.name!r} does not map the input {tensor.name!r}, which is not optional",
                remedy=f'add `input_map {{ key: "{tensor.name}" value: ... }}`',
            )
    yield from _unknown_names(
        entry, step.input_map, tensors=model.inputs, model=model.name, path=f"{path}.input_map"
    )


def _unknown_names(
    entry: ModelEntry, mapped: Iterable[str], *, tensors: tuple[TensorSpec, ...], model: str, path: str
) -> Iterator[Fault]:
    names = [tensor.name for tensor in tensors]
    kind = path.rpartition(".")[2].removesuffix("_map")
    for name in mapped:
        if names and name not in names:  # without any the model's config leaves them to its file
            yield _error(
                entry,
                path,
                f"the model {model!r} has no {kind} {name!r}",
                remedy=nearest(name, known=names),
                key=name,
            )


def _makers(entry: ModelEntry, config: ModelConfig) -> Iterator[Fault]:
    """Yield the tensors that nobody makes, and those that two make."""
    made = Counter(tensor.name for tensor in config.inputs)
    for index, step in enumerate(config.ensemble_steps):
        for key, tensor in step.output_map.items():
            made[tensor] += 1
            if made[tensor] > 1:
                yield _error(
                    entry,
                    f"ensemble_scheduling.step[{index}].output_map",
                    f"the tensor {tensor!r} is made more than once",
                    remedy="give each output of a step a name of its own",
                    key=key,
                )
    for index, step in enumerate(config.ensemble_steps):
        for key, tensor in step.input_map.items():
            if tensor not in made:
                yield _error(
                    entry,
                    f"ensemble_scheduling.step[{index}].input_map",
                    f"nobody makes the tensor {tensor!r} that the step {step.model_name!r} takes",
                    remedy=nearest(tensor, known=made),
                    key=key,
                )
    for index, output in enumerate(config.outputs):
        if output.name not in made:
            yield _error(
                entry,
                f"output[{index}].name",
                f"no step makes the output {output.name!r}",
                remedy=nearest(output.name, known=made),
            )


def _cycle(entry: ModelEntry, config: ModelConfig) -> Iterator[Fault]:
    """Yield one fault if steps wait for each other, or for one that does."""
    waiting = list(config.ensemble_steps)
    while True:
        to_come = {tensor for step in waiting for tensor in step.output_map.values()}
        still = [step for step in waiting if to_come & set(step.input_map.values())]
        if not still:
            return
        if still == waiting:
            names = ", ".join(repr(step.model_name) for step in waiting)
            index = config.ensemble_steps.index(waiting[0])
            yield _error(
                entry,
                f"ensemble_scheduling.step[{index}]",
                f"these steps wait for each other's tensors: {names}",
                remedy="break the circle: a step takes what the ensemble or an earlier step makes",
            )
            return
        waiting = still
