"""Schema: Triton's official protobuf schema of config.pbtxt, and its messages as frozen values.

The schema comes from the `tritonclient` package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

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

_T = TypeVar("_T")


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
    """Return an empty `inference.ModelConfig` message."""
    return _PB2.ModelConfig()


def enum_name(message: Any, field: str) -> str:
    """Return the name of an enum field's value; the number, if the schema lacks the value."""
    value = getattr(message, field)
    known = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(value)
    return known.name if known else str(value)


def model_config(message: Any, *, name: str) -> ModelConfig:
    """Return the values of an `inference.ModelConfig`.

    Args:
        message: kept by the result, and not to be changed. Before `normalise`, it lacks the defaults that
            depend on other fields.
        name: the name of the model's folder.
    """
    return _read(
        ModelConfig,
        message,
        name=name,
        version_policy=_version_policy(message),
        decoupled=message.model_transaction_policy.decoupled,
        ensemble_steps=tuple(_read(EnsembleStep, step) for step in message.ensemble_scheduling.step),
        max_inflight_requests=message.ensemble_scheduling.max_inflight_requests,
        response_cache=message.response_cache.enable,
        first_response_buckets_ms=_first_response_buckets(message),
        parameters=MappingProxyType({key: value.string_value for key, value in message.parameters.items()}),
        message=message,
    )


# The schema's names of the fields of our dataclasses, where they differ.
_SCHEMA_NAMES = {
    "inputs": "input",
    "outputs": "output",
    "batch_inputs": "batch_input",
    "batch_outputs": "batch_output",
    "instance_groups": "instance_group",
    "warmups": "model_warmup",
    "target_names": "target_name",
    "source_inputs": "source_input",
    "preferred_batch_sizes": "preferred_batch_size",
    "max_queue_delay_us": "max_queue_delay_microseconds",
    "default_timeout_us": "default_timeout_microseconds",
    "max_sequence_idle_us": "max_sequence_idle_microseconds",
    "is_global": "global",
    "states": "state",
    "iterative": "iterative_sequence",
    "same_buffer": "use_same_buffer_for_input_output",
}


def _read(kind: type[_T], message: Any, /, **computed: Any) -> _T:
    """Return a dataclass with the values of a message; a field that is not set has the dataclass's default.

    Args:
        kind: the dataclass. Each of its fields is read from the schema's field of that name, if there is one.
        message: a message of the schema.
        computed: the fields that are not copied.
    """
    known = message.DESCRIPTOR.fields_by_name
    for field in fields(kind):  # type: ignore[arg-type]
        schema = known.get(_SCHEMA_NAMES.get(field.name, field.name))
        if field.name in computed or schema is None:
            continue
        if not schema.has_presence or message.HasField(schema.name):
            computed[field.name] = _value(message, schema)
    return kind(**computed)


def _value(message: Any, field: Any) -> Any:
    value, kind = getattr(message, field.name), field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        kind = kind.fields_by_name["value"].message_type
        entries = value.items() if kind is None else ((key, _READERS[kind.name](value[key])) for key in value)
        return MappingProxyType(dict(entries))
    if field.is_repeated:
        return tuple(value if kind is None else map(_READERS[kind.name], value))
    if kind is not None:
        return _READERS[kind.name](value)
    return value if field.enum_type is None else enum_name(message, field.name)


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


def _first_response_buckets(message: Any) -> tuple[float, ...]:
    buckets = FIRST_RESPONSE_BUCKETS_MS
    for control in message.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE:
            buckets = tuple(control.histogram_options.buckets)
    return buckets


def _sequence_batching(message: Any) -> SequenceBatching:
    strategy = _read(OldestStrategy, message.oldest) if message.HasField("oldest") else None
    return _read(
        SequenceBatching,
        message,
        strategy=strategy or _read(DirectStrategy, message.direct),
        max_sequence_idle_us=message.max_sequence_idle_microseconds or 1_000_000,
        controls=tuple(_controls(message)),
    )


def _controls(message: Any) -> Iterator[Control]:
    for tensor in message.control_input:
        for control in tensor.control:
            yield _read(Control, control, name=tensor.name, **_control_values(control))


def _control_values(message: Any) -> Mapping[str, Any]:
    """Return the data type and values of a control, by the field of its data type; a CORRID has no values."""
    for data_type in ("int32", "fp32", "bool"):
        values = getattr(message, f"{data_type}_false_true")
        if len(values) == 2:
            return {"data_type": f"TYPE_{data_type.upper()}", "false_true": tuple(values)}
    return {}


def _state(message: Any) -> StateSpec:
    initial = [_read(InitialState, each) for each in message.initial_state[:1]]
    return _read(StateSpec, message, initial_state=initial[0] if initial else None)


def _warmup(message: Any) -> WarmupSample:
    inputs = (
        _read(
            WarmupInput,
            value,
            name=name,
            source=value.WhichOneof("input_data_type") or "",
            data_file=value.input_data_file,
        )
        for name, value in message.inputs.items()
    )
    return _read(WarmupSample, message, count=max(1, message.count), inputs=tuple(inputs))


# How each message of the schema is read, by its name there.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "ModelInput": partial(_read, TensorSpec),
    "ModelOutput": partial(_read, TensorSpec),
    "ModelTensorReshape": lambda message: tuple(message.shape),
    "BatchInput": partial(_read, BatchInput),
    "BatchOutput": partial(_read, BatchOutput),
    "ModelInstanceGroup": lambda message: _read(InstanceGroup, message, count=max(1, message.count)),
    "ModelRateLimiter": lambda message: _read(ResourceClaim, message, priority=max(1, message.priority)),
    "Resource": partial(_read, Resource),
    "ModelDynamicBatching": partial(_read, DynamicBatching),
    "ModelQueuePolicy": lambda message: _read(
        QueuePolicy, message, delays=enum_name(message, "timeout_action") == "DELAY"
    ),
    "ModelSequenceBatching": _sequence_batching,
    "State": _state,
    "ModelWarmup": _warmup,
}
