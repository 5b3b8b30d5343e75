"""Config rules: the requirements of a config, on its own, for its model to be served.

Where Triton reports the same error, the message is Triton's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from genserve.config.backends import BUILT_IN
from genserve.config.diagnostics import Diagnostic, ValidationContext
from genserve.config.model_config import FIRST_RESPONSE
from genserve.config.parameter_rules import validate_parameters
from genserve.config.schema import enum_name
from genserve.config.sequence_rules import validate_sequences
from genserve.config.supported_fields import unsupported_fields
from genserve.config.tensor_rules import validate_batch_tensors, validate_tensors, validate_warmups
from genserve.errors import suggestion

MAX_NAME_BYTES = 255  # of a file, on nearly every file system

_EXPORT = "genserve has its own engine: `genserve export CHECKPOINT` makes a model for it"
# Remedies for values that `backend` does not have.
_BACKEND_REMEDIES = {
    "ensemble": 'leave `backend` out, and write `platform: "ensemble"`',
    "libtorch": 'write `backend: "pytorch"` instead',
    "torch": 'write `backend: "pytorch"` instead',
    "onnx": 'write `backend: "onnxruntime"` instead',
    "tensorrt_llm": _EXPORT,
    "vllm": _EXPORT,
    "tensorrt": "only Triton runs a TensorRT plan; export the model to ONNX for `onnxruntime`",
}


def validate_file_names(config: ValidationContext) -> Iterator[Diagnostic]:
    """Yield the file names that lead out of the model's folder, or are not valid.

    Such files must not be opened: a config can come from a client.
    """
    for path, name, folder in _named(config.message):
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            yield config.error(
                path,
                f"the file {name!r} is not in the folder of model '{config.name}'",
                remedy=f"put the file into {folder}, and write its path from there",
            )
        elif name and not _can_exist(pure):
            yield config.error(
                path,
                f"{name[:64]!r} is not a valid file name",
                remedy=f"write up to {MAX_NAME_BYTES} bytes, none of them zero, and not '.'",
            )


def _can_exist(pure: PurePosixPath) -> bool:
    parts = pure.parts
    return bool(parts) and all("\0" not in part and len(part.encode()) <= MAX_NAME_BYTES for part in parts)


def _named(message: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each field that names a file, the name, and the folder of the file."""
    yield "default_model_filename", message.default_model_filename, "the folder of each version"
    for index, output in enumerate(message.output):
        yield f"output[{index}].label_filename", output.label_filename, "the model's folder"
    for index, sample in enumerate(message.model_warmup):
        for spec in sample.inputs.values():
            yield f"model_warmup[{index}]", spec.input_data_file, "the model's folder `warmup`"
    for index, state in enumerate(message.sequence_batching.state):
        for initial in state.initial_state:
            yield f"sequence_batching.state[{index}]", initial.data_file, "the model's folder `initial_state`"


def config_diagnostics(config: ValidationContext) -> tuple[Diagnostic, ...]:
    """Return all diagnostics of one config whose file names are valid."""
    rules = (
        _name,
        _backend,
        _batch_size,
        _ensemble,
        validate_tensors,
        validate_batch_tensors,
        validate_parameters,
        _dynamic_batching,
        validate_sequences,
        _cache,
        _instance_groups,
        _accelerators,
        validate_warmups,
        _metrics,
        _unsupported,
    )
    return tuple(diagnostic for rule in rules for diagnostic in rule(config))


def _metrics(config: ValidationContext) -> Iterator[Diagnostic]:
    for index, control in enumerate(config.message.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        family, buckets = control.metric_identifier.family, list(control.histogram_options.buckets)
        if family != FIRST_RESPONSE:
            yield config.warning(
                f"{path}.metric_identifier.family",
                f"Metric family '{family}' in 'metric_identifier' is not a customizable metric",
                remedy=f"the customizable one: {FIRST_RESPONSE}",
            )
        elif any(not low < high for low, high in pairwise([-math.inf, *buckets, math.inf])):
            yield config.error(
                f"{path}.histogram_options.buckets",
                f"the buckets of '{family}' are not ascending numbers of milliseconds",
                remedy="write for example `buckets: [ 100, 500, 2000 ]`",
            )


def _name(config: ValidationContext) -> Iterator[Diagnostic]:
    name = config.message.name
    if name and name != config.name:
        yield config.error(
            "name",
            f"unexpected directory name '{config.name}' for model '{name}', directory name must equal model "
            "name",
            remedy="give both the same name, or leave `name` out",
        )


def _backend(config: ValidationContext) -> Iterator[Diagnostic]:
    platform, backend = config.message.platform, config.message.backend
    if platform == "ensemble":
        if backend:
            yield config.error(
                "backend",
                f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type",
                remedy="leave `backend` out",
            )
    elif not backend:
        if platform or config.message.default_model_filename:  # without any of them, `deduce_backend` failed
            yield config.error(
                "platform",
                f"unexpected platform type '{platform}' for {config.name}",
                remedy=_platform_remedy(platform),
            )
    elif backend not in config.backends:
        diagnostic = config.error(
            "backend",
            f"unable to find backend library for backend '{backend}', try specifying runtime on the model "
            "configuration.",
            remedy=_backend_remedy(backend, known=config.backends),
        )
        yield replace(diagnostic, at_load=True)
    elif platform and platform not in _platforms(backend, platform):
        yield config.error(
            "platform",
            f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}",
            remedy="leave `platform` out",
        )


def _platforms(backend: str, platform: str) -> list[str]:
    """Return the valid platforms of a backend: its own, or any if it has none."""
    formats = BUILT_IN[backend].formats if backend in BUILT_IN else ()
    return [form.platform for form in formats if form.platform] or [platform]


def _platform_remedy(platform: str) -> str:
    if platform in BUILT_IN:
        return f'write `backend: "{platform}"` instead'
    if platform.startswith("tensorrt"):
        return _BACKEND_REMEDIES["tensorrt"]
    formats = [form for built_in in BUILT_IN.values() for form in built_in.formats]
    known = ["ensemble", *(form.platform for form in formats if form.platform)]
    return f"{suggestion(platform, known=known)}; or write `backend` instead: {', '.join(BUILT_IN)}"


def _backend_remedy(backend: str, *, known: tuple[str, ...]) -> str:
    for name, built_in in BUILT_IN.items():
        if any(form.platform == backend for form in built_in.formats):
            return f'write `backend: "{name}"`, or `platform: "{backend}"`, instead'
    return _BACKEND_REMEDIES.get(backend) or suggestion(backend, known=known)


def _batch_size(config: ValidationContext) -> Iterator[Diagnostic]:
    if config.message.max_batch_size < 0:
        yield config.error(
            "max_batch_size",
            f"'max_batch_size' must be non-negative value for {config.name}",
            remedy="write 0 for a model that does not batch, or the largest batch size",
        )


def _ensemble(config: ValidationContext) -> Iterator[Diagnostic]:
    has_steps = config.message.HasField("ensemble_scheduling")
    if config.message.platform != "ensemble":
        if has_steps:
            yield config.error(
                "ensemble_scheduling",
                f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble",
                remedy='write `platform: "ensemble"`, and leave `backend` out',
            )
        return
    remedy = "add `ensemble_scheduling { step [ { model_name: ... } ] }`"
    if not has_steps:
        yield config.error(
            "platform",
            f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble",
            remedy=remedy,
        )
    elif not config.message.ensemble_scheduling.step:
        message = f"must specify 'step' for ensemble '{config.name}'"
        yield config.error("ensemble_scheduling", message, remedy=remedy)
    for field, message in (
        ("instance_group", "instance group should not be specified for ensemble"),
        ("optimization", "optimization should not be specified for ensemble"),
        ("model_warmup", "model_warmup can not be specified for ensemble"),
    ):
        if any(written.name == field for written, _ in config.message.ListFields()):
            yield config.error(
                field,
                f"{message} '{config.name}'",
                remedy="leave it out: the models of the steps have their own",
            )


def _dynamic_batching(config: ValidationContext) -> Iterator[Diagnostic]:
    if not config.message.HasField("dynamic_batching"):
        return
    batching, largest = config.message.dynamic_batching, config.message.max_batch_size
    for size in batching.preferred_batch_size:
        if not 0 < size <= largest:
            bound = "positive" if size <= 0 else "<= max batch size"
            yield config.error(
                "dynamic_batching.preferred_batch_size",
                f"dynamic batching preferred size must be {bound} for {config.name}",
                remedy=f"write sizes from 1 to max_batch_size, which is {largest}",
            )
    levels = batching.priority_levels
    if levels:
        yield from _priorities(config, levels=levels)
    if batching.preserve_ordering:
        yield from _ordering(config, levels=levels)


def _priorities(config: ValidationContext, *, levels: int) -> Iterator[Diagnostic]:
    batching = config.message.dynamic_batching
    path = "dynamic_batching"
    if not 1 <= batching.default_priority_level <= levels:
        yield config.error(
            f"{path}.default_priority_level",
            f"default priority level must be in range [1, {levels}] for {config.name}",
            remedy=f"write `default_priority_level: {levels}`, the lowest, for requests without a priority",
        )
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            yield config.error(
                f"{path}.priority_queue_policy",
                f"priority queue policy must have priority level in range [1, {levels}] for {config.name}",
                remedy="`priority_levels` is the number of levels; 1 is the highest",
                key=str(level),
            )


def _ordering(config: ValidationContext, *, levels: int) -> Iterator[Diagnostic]:
    batching = config.message.dynamic_batching
    if levels > 1:
        yield config.error(
            "dynamic_batching.preserve_ordering",
            f"Only one priority level is allowed when 'preserve_ordering' is true for {config.name}",
            remedy="leave one of `preserve_ordering` and `priority_levels` out",
        )
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(
        policy.default_timeout_microseconds and enum_name(policy, "timeout_action") == "DELAY"
        for policy in policies
    ):
        yield config.error(
            "dynamic_batching.preserve_ordering",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for "
            f"{config.name}",
            remedy="leave `preserve_ordering` out, or write `timeout_action: REJECT`",
        )


def _cache(config: ValidationContext) -> Iterator[Diagnostic]:
    if config.message.response_cache.enable and config.message.model_transaction_policy.decoupled:
        yield config.error(
            "response_cache",
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction "
            "policy. Please disable the response cache.",
            remedy="leave `response_cache` out",
        )


def _instance_groups(config: ValidationContext) -> Iterator[Diagnostic]:
    for index, group in enumerate(config.message.instance_group):
        path = f"instance_group[{index}]"
        kind = enum_name(group, "kind")
        start = f"instance group {group.name or f'{config.name}_{index}'} of model {config.name}"
        if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
            yield config.error(
                f"{path}.gpus",
                f"{start} has kind {kind} but specifies one or more GPUs",
                remedy="leave `gpus` out, or write `kind: KIND_GPU`",
            )
        if group.profile:
            yield config.error(
                f"{path}.profile",
                f"{start} and platform {config.message.platform}specifies profile field which is only "
                "supported for TensorRT models",
                remedy="leave it out",
            )


def _accelerators(config: ValidationContext) -> Iterator[Diagnostic]:
    accelerators = config.message.optimization.execution_accelerators
    for field in ("gpu_execution_accelerator", "cpu_execution_accelerator"):
        for index, accelerator in enumerate(getattr(accelerators, field)):
            yield config.warning(
                f"optimization.execution_accelerators.{field}[{index}]",
                f"execution accelerator {accelerator.name!r} is used only if it is installed",
                remedy="if it is missing, the load logs that and the model runs without it",
            )


def _unsupported(config: ValidationContext) -> Iterator[Diagnostic]:
    for field in unsupported_fields(config.message):
        yield config.source.diagnostic(field.severity, field.path, field.message, remedy="leave it out")
