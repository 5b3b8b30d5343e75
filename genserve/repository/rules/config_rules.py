"""Config rules: valid names, backends, schedulers, instance groups and metrics in a config.

Where Triton reports the same error, the message is Triton's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from genserve.config.backends import BUILT_IN
from genserve.config.diagnostics import Diagnostic
from genserve.config.model_config import FIRST_RESPONSE
from genserve.config.schema import enum_name
from genserve.errors import suggestion
from genserve.repository.rules.facts import ConfigFacts

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


def check_name(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject a name other than that of the folder."""
    name = facts.message.name
    if name and name != facts.name:
        yield facts.error(
            "name",
            f"unexpected directory name '{facts.name}' for model '{name}', directory name must equal model "
            "name",
            remedy="give both the same name, or leave `name` out",
        )


def check_backend(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject a backend or platform that is unknown, or a pair of them that does not match."""
    platform, backend = facts.message.platform, facts.message.backend
    if platform == "ensemble":
        if backend:
            yield facts.error(
                "backend",
                f"Ensemble model '{facts.name}' must have platform type 'ensemble' and empty backend type",
                remedy="leave `backend` out",
            )
    elif not backend:
        if platform or facts.message.default_model_filename:  # without any of them, `deduce_backend` failed
            yield facts.error(
                "platform",
                f"unexpected platform type '{platform}' for {facts.name}",
                remedy=_platform_remedy(platform),
            )
    elif backend not in facts.backends:
        diagnostic = facts.error(
            "backend",
            f"unable to find backend library for backend '{backend}', try specifying runtime on the model "
            "configuration.",
            remedy=_backend_remedy(backend, known=facts.backends),
        )
        yield replace(diagnostic, at_load=True)
    elif platform and platform not in _platforms(backend, platform):
        yield facts.error(
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


def check_batch_size(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject a negative `max_batch_size`."""
    if facts.message.max_batch_size < 0:
        yield facts.error(
            "max_batch_size",
            f"'max_batch_size' must be non-negative value for {facts.name}",
            remedy="write 0 for a model that does not batch, or the largest batch size",
        )


def check_ensemble_fields(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject an ensemble without steps, steps of another model, and fields that are not for ensembles."""
    has_steps = facts.message.HasField("ensemble_scheduling")
    if facts.message.platform != "ensemble":
        if has_steps:
            yield facts.error(
                "ensemble_scheduling",
                f"ensemble scheduling cannot be set for model '{facts.name}' whose platform is not ensemble",
                remedy='write `platform: "ensemble"`, and leave `backend` out',
            )
        return
    remedy = "add `ensemble_scheduling { step [ { model_name: ... } ] }`"
    if not has_steps:
        yield facts.error(
            "platform",
            f"ensemble scheduling must be set for ensemble {facts.name} whose platform is ensemble",
            remedy=remedy,
        )
    elif not facts.message.ensemble_scheduling.step:
        message = f"must specify 'step' for ensemble '{facts.name}'"
        yield facts.error("ensemble_scheduling", message, remedy=remedy)
    for field, message in (
        ("instance_group", "instance group should not be specified for ensemble"),
        ("optimization", "optimization should not be specified for ensemble"),
        ("model_warmup", "model_warmup can not be specified for ensemble"),
    ):
        if any(written.name == field for written, _ in facts.message.ListFields()):
            yield facts.error(
                field,
                f"{message} '{facts.name}'",
                remedy="leave it out: the models of the steps have their own",
            )


def check_dynamic_batching(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject sizes, priorities and an ordering that contradict each other."""
    if not facts.message.HasField("dynamic_batching"):
        return
    batching, largest = facts.message.dynamic_batching, facts.message.max_batch_size
    for size in batching.preferred_batch_size:
        if not 0 < size <= largest:
            bound = "positive" if size <= 0 else "<= max batch size"
            yield facts.error(
                "dynamic_batching.preferred_batch_size",
                f"dynamic batching preferred size must be {bound} for {facts.name}",
                remedy=f"write sizes from 1 to max_batch_size, which is {largest}",
            )
    levels = batching.priority_levels
    if levels:
        yield from _priorities(facts, levels=levels)
    if batching.preserve_ordering:
        yield from _ordering(facts, levels=levels)


def _priorities(facts: ConfigFacts, *, levels: int) -> Iterator[Diagnostic]:
    batching = facts.message.dynamic_batching
    path = "dynamic_batching"
    if not 1 <= batching.default_priority_level <= levels:
        yield facts.error(
            f"{path}.default_priority_level",
            f"default priority level must be in range [1, {levels}] for {facts.name}",
            remedy=f"write `default_priority_level: {levels}`, the lowest, for requests without a priority",
        )
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            yield facts.error(
                f"{path}.priority_queue_policy",
                f"priority queue policy must have priority level in range [1, {levels}] for {facts.name}",
                remedy="`priority_levels` is the number of levels; 1 is the highest",
                key=str(level),
            )


def _ordering(facts: ConfigFacts, *, levels: int) -> Iterator[Diagnostic]:
    batching = facts.message.dynamic_batching
    if levels > 1:
        yield facts.error(
            "dynamic_batching.preserve_ordering",
            f"Only one priority level is allowed when 'preserve_ordering' is true for {facts.name}",
            remedy="leave one of `preserve_ordering` and `priority_levels` out",
        )
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(
        policy.default_timeout_microseconds and enum_name(policy, "timeout_action") == "DELAY"
        for policy in policies
    ):
        yield facts.error(
            "dynamic_batching.preserve_ordering",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for "
            f"{facts.name}",
            remedy="leave `preserve_ordering` out, or write `timeout_action: REJECT`",
        )


def check_response_cache(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject a cache for a decoupled model."""
    if facts.message.response_cache.enable and facts.message.model_transaction_policy.decoupled:
        yield facts.error(
            "response_cache",
            f"Response Cache does not currently support model {facts.name} with 'decoupled' transaction "
            "policy. Please disable the response cache.",
            remedy="leave `response_cache` out",
        )


def check_instance_groups(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject groups with GPUs that their kind does not use, and profiles of TensorRT."""
    for index, group in enumerate(facts.message.instance_group):
        path = f"instance_group[{index}]"
        kind = enum_name(group, "kind")
        start = f"instance group {group.name or f'{facts.name}_{index}'} of model {facts.name}"
        if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
            yield facts.error(
                f"{path}.gpus",
                f"{start} has kind {kind} but specifies one or more GPUs",
                remedy="leave `gpus` out, or write `kind: KIND_GPU`",
            )
        if group.profile:
            yield facts.error(
                f"{path}.profile",
                f"{start} and platform {facts.message.platform}specifies profile field which is only "
                "supported for TensorRT models",
                remedy="leave it out",
            )


def check_accelerators(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Warn of each execution accelerator: it may not be installed."""
    accelerators = facts.message.optimization.execution_accelerators
    for field in ("gpu_execution_accelerator", "cpu_execution_accelerator"):
        for index, accelerator in enumerate(getattr(accelerators, field)):
            yield facts.warning(
                f"optimization.execution_accelerators.{field}[{index}]",
                f"execution accelerator {accelerator.name!r} is used only if it is installed",
                remedy="if it is missing, the load logs that and the model runs without it",
            )


def check_metrics(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject the buckets of a histogram that do not ascend; warn of metrics that have none to set."""
    for index, control in enumerate(facts.message.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        family, buckets = control.metric_identifier.family, list(control.histogram_options.buckets)
        if family != FIRST_RESPONSE:
            yield facts.warning(
                f"{path}.metric_identifier.family",
                f"Metric family '{family}' in 'metric_identifier' is not a customizable metric",
                remedy=f"the customizable one: {FIRST_RESPONSE}",
            )
        elif any(not low < high for low, high in pairwise([-math.inf, *buckets, math.inf])):
            yield facts.error(
                f"{path}.histogram_options.buckets",
                f"the buckets of '{family}' are not ascending numbers of milliseconds",
                remedy="write for example `buckets: [ 100, 500, 2000 ]`",
            )
