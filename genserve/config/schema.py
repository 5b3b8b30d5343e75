"""Schema: Triton's official protobuf schema of config.pbtxt, and its messages as frozen values.

The schema comes from the `tritonclient` package.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from genserve.config.model_config import (
    FIRST_RESPONSE,
    FIRST_RESPONSE_BUCKETS_MS,
    AllVersions,
    BatchInput,
    BatchOutput,
    Control,
    DirectStrategy,
    DynamicBatching,
    EnsembleStep,
    InitialState,
    InstanceGroup,
    LatestVersions,
    ModelConfig,
    OldestStrategy,
    QueuePolicy,
    Resource,
    ResourceClaim,
    SequenceBatching,
    SpecificVersions,
    StateSpec,
    TensorSpec,
    VersionPolicy,
    WarmupInput,
    WarmupSample,
)
from genserve.errors import MissingDependency

__all__ = ["enum_name", "model_config", "new_model_config"]


def _model_config_pb2() -> ModuleType:
    # The generated file alone: importing the package around it loads gRPC too, 0.2 s and 240 modules more.
    # A later `import tritonclient.grpc` gets the same message classes, because protobuf pools them by name.
    package = find_spec("tritonclient")
    if package is None or package.submodule_search_locations is None:
        raise MissingDependency(
            "reading config.pbtxt needs the package `tritonclient`", remedy="pip install 'tritonclient[grpc]'"
        )
    [folder] = package.submodule_search_locations
    module = ModuleType("tritonclient.grpc.model_config_pb2")
    SourceFileLoader(module.__name__, str(Path(folder) / "grpc" / "model_config_pb2.py")).exec_module(module)
    return module


_PB2 = _model_config_pb2()


def new_model_config() -> Any:
    """An empty `inference.ModelConfig` message."""
    return _PB2.ModelConfig()


def model_config(message: Any, *, name: str) -> ModelConfig:
    """Return what an `inference.ModelConfig` says.

    Args:
        message: kept as it is, and to be left so. Before `normalise`, defaults that depend on other fields
            are not in it.
        name: of the model, which is that of its folder.
    """
    return ModelConfig(
        name=name,
        platform=message.platform,
        backend=message.backend,
        max_batch_size=message.max_batch_size,
        inputs=tuple(map(_input, message.input)),
        outputs=tuple(map(_output, message.output)),
        batch_inputs=tuple(map(_batch_input, message.batch_input)),
        batch_outputs=tuple(map(_batch_output, message.batch_output)),
        version_policy=_version_policy(message),
        default_model_filename=message.default_model_filename,
        instance_groups=tuple(map(_instance_group, message.instance_group)),
        dynamic_batching=_dynamic_batching(message),
        sequence_batching=_sequence_batching(message),
        decoupled=message.model_transaction_policy.decoupled,
        ensemble_steps=tuple(map(_ensemble_step, message.ensemble_scheduling.step)),
        max_inflight_requests=message.ensemble_scheduling.max_inflight_requests,
        warmups=tuple(map(_warmup, message.model_warmup)),
        response_cache=message.response_cache.enable,
        metric_tags=MappingProxyType(dict(message.metric_tags)),
        first_response_buckets_ms=_first_response_buckets(message),
        parameters=MappingProxyType({key: value.string_value for key, value in message.parameters.items()}),
        message=message,
    )


def _first_response_buckets(message: Any) -> tuple[float, ...]:
    buckets = FIRST_RESPONSE_BUCKETS_MS
    for control in message.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE:
            buckets = tuple(control.histogram_options.buckets)
    return buckets


def enum_name(message: Any, field: str) -> str:
    """Return the name of an enum field's value; of a value that the schema lacks, its number."""
    value = getattr(message, field)
    known = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(value)
    return known.name if known else str(value)


def _input(message: Any) -> TensorSpec:
    return TensorSpec(
        name=message.name,
        data_type=enum_name(message, "data_type"),
        dims=tuple(message.dims),
        reshape=_reshape(message),
        optional=message.optional,
        allow_ragged_batch=message.allow_ragged_batch,
    )


def _output(message: Any) -> TensorSpec:
    return TensorSpec(
        name=message.name,
        data_type=enum_name(message, "data_type"),
        dims=tuple(message.dims),
        reshape=_reshape(message),
        label_filename=message.label_filename,
    )


def _reshape(message: Any) -> tuple[int, ...] | None:
    return tuple(message.reshape.shape) if message.HasField("reshape") else None


def _batch_input(message: Any) -> BatchInput:
    return BatchInput(
        kind=enum_name(message, "kind"),
        target_names=tuple(message.target_name),
        source_inputs=tuple(message.source_input),
        data_type=enum_name(message, "data_type"),
    )


def _batch_output(message: Any) -> BatchOutput:
    return BatchOutput(
        kind=enum_name(message, "kind"),
        target_names=tuple(message.target_name),
        source_inputs=tuple(message.source_input),
    )


def _version_policy(message: Any) -> VersionPolicy:
    if not message.HasField("version_policy"):
        return LatestVersions(count=1)
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "latest":
            return LatestVersions(count=policy.latest.num_versions)
        case "specific":
            return SpecificVersions(versions=tuple(policy.specific.versions))
        case _:  # Triton, too, takes a policy without a choice for `all`
            return AllVersions()


def _instance_group(message: Any) -> InstanceGroup:
    return InstanceGroup(
        name=message.name,
        kind=enum_name(message, "kind"),
        count=max(1, message.count),
        gpus=tuple(message.gpus),
        rate_limiter=_rate_limiter(message.rate_limiter),
    )


def _rate_limiter(message: Any) -> ResourceClaim:
    resources = (
        # `global` is a word of Python, so the field cannot be read as an attribute
        Resource(name=resource.name, count=resource.count, is_global=getattr(resource, "global"))
        for resource in message.resources
    )
    return ResourceClaim(resources=tuple(resources), priority=max(1, message.priority))


def _dynamic_batching(message: Any) -> DynamicBatching | None:
    if not message.HasField("dynamic_batching"):
        return None
    batching = message.dynamic_batching
    policies = {level: _queue_policy(policy) for level, policy in batching.priority_queue_policy.items()}
    return DynamicBatching(
        preferred_batch_sizes=tuple(batching.preferred_batch_size),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_queue_policy=MappingProxyType(policies),
    )


def _queue_policy(message: Any) -> QueuePolicy:
    return QueuePolicy(
        delays=enum_name(message, "timeout_action") == "DELAY",
        default_timeout_us=message.default_timeout_microseconds,
        allow_timeout_override=message.allow_timeout_override,
        max_queue_size=message.max_queue_size,
    )


def _sequence_batching(message: Any) -> SequenceBatching | None:
    if not message.HasField("sequence_batching"):
        return None
    batching = message.sequence_batching
    return SequenceBatching(
        strategy=_strategy(batching),
        max_sequence_idle_us=batching.max_sequence_idle_microseconds or 1_000_000,
        controls=tuple(
            _control(control, name=tensor.name)
            for tensor in batching.control_input
            for control in tensor.control
        ),
        states=tuple(map(_state, batching.state)),
        iterative=batching.iterative_sequence,
    )


def _strategy(batching: Any) -> DirectStrategy | OldestStrategy:
    if batching.HasField("oldest"):
        return OldestStrategy(
            max_candidate_sequences=batching.oldest.max_candidate_sequences,
            preferred_batch_sizes=tuple(batching.oldest.preferred_batch_size),
            max_queue_delay_us=batching.oldest.max_queue_delay_microseconds,
            preserve_ordering=batching.oldest.preserve_ordering,
        )
    return DirectStrategy(
        max_queue_delay_us=batching.direct.max_queue_delay_microseconds,
        minimum_slot_utilization=batching.direct.minimum_slot_utilization,
    )


def _control(message: Any, *, name: str) -> Control:
    """A control says its values in the field of its data type; one of a correlation id has no values."""
    for data_type in ("int32", "fp32", "bool"):
        values = getattr(message, f"{data_type}_false_true")
        if len(values) == 2:
            return Control(
                name=name,
                kind=enum_name(message, "kind"),
                data_type=f"TYPE_{data_type.upper()}",
                false_true=(values[0], values[1]),
            )
    return Control(
        name=name, kind=enum_name(message, "kind"), data_type=enum_name(message, "data_type")
    )


def _state(message: Any) -> StateSpec:
    return StateSpec(
        input_name=message.input_name,
        output_name=message.output_name,
        data_type=enum_name(message, "data_type"),
        dims=tuple(message.dims),
        initial_state=_initial_state(message.initial_state[0]) if message.initial_state else None,
        same_buffer=message.use_same_buffer_for_input_output,
    )


def _initial_state(message: Any) -> InitialState:
    return InitialState(
        data_type=enum_name(message, "data_type"),
        dims=tuple(message.dims),
        data_file=message.data_file,
    )


def _ensemble_step(message: Any) -> EnsembleStep:
    return EnsembleStep(
        model_name=message.model_name,
        model_version=message.model_version,
        input_map=MappingProxyType(dict(message.input_map)),
        output_map=MappingProxyType(dict(message.output_map)),
    )


def _warmup(message: Any) -> WarmupSample:
    return WarmupSample(
        name=message.name,
        batch_size=message.batch_size,
        count=max(1, message.count),
        inputs=tuple(_warmup_input(value, name=name) for name, value in message.inputs.items()),
    )


def _warmup_input(message: Any, *, name: str) -> WarmupInput:
    return WarmupInput(
        name=name,
        data_type=enum_name(message, "data_type"),
        dims=tuple(message.dims),
        source=message.WhichOneof("input_data_type") or "",
        data_file=message.input_data_file,
    )
