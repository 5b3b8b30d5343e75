"""Parse: the text of one config.pbtxt to a ModelConfig."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pool, text_format

from genserve.config.fault import Fault, Severity, first_error, nearest
from genserve.config.model_config import (
    AllVersions,
    EnsembleStep,
    LatestVersions,
    ModelConfig,
    SequenceBatching,
    SpecificVersions,
    StateSpec,
    TensorSpec,
    VersionPolicy,
)
from genserve.config.places import Places
from genserve.config.rules import config_faults
from genserve.config.schema import new_model_config

__all__ = ["ParsedConfig", "inspect_model_config", "parse_model_config", "read_model_config"]

# What protobuf puts in front of its messages: the place, and the line that it is in.
PREFIX = re.compile(r"^\d+:\d+ : ('.*': )?")
UNKNOWN_NAME = re.compile(r'(?P<kind>Message|Enum) type "(?P<type>[\w.]+)" has no \w+ named "?(?P<name>\w+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedConfig:
    """What one config.pbtxt says, and all that is wrong with it."""

    config: ModelConfig | None      # None: it cannot be read; the only fault says why
    places: Places
    faults: tuple[Fault, ...]


def read_model_config(path: Path) -> ModelConfig:
    """Read the config.pbtxt at `path`, which lies in the folder of its model.

    Raises:
        ConfigError: the file cannot be read, or see `parse_model_config`.
    """
    return _config_or_error(inspect_model_config(path))


def parse_model_config(text: str, *, source: Path) -> ModelConfig:
    """Read the text of one config.pbtxt.

    Args:
        text: protobuf text format, by Triton's schema.
        source: the file it is from; its folder has the name of the model.

    Raises:
        ConfigError: not the schema, or not a model: the first error of its faults; the message begins
            with `source:line:column: `.
    """
    return _config_or_error(_parse(text, source=source))


def inspect_model_config(path: Path) -> ParsedConfig:
    """Read the config.pbtxt at `path`, which lies in the folder of its model, with all its faults."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "a model folder holds a config.pbtxt in UTF-8"
        return _unreadable(path, place="1:1", message=f"cannot be read: {error}", remedy=remedy)
    return _parse(text, source=path)


def _config_or_error(parsed: ParsedConfig) -> ModelConfig:
    error = first_error(parsed.faults)
    if error is not None:
        raise error
    assert parsed.config is not None  # or there would be an error
    return parsed.config


def _parse(text: str, *, source: Path) -> ParsedConfig:
    try:
        proto = text_format.Parse(text, new_model_config())
    except text_format.ParseError as error:
        message = PREFIX.sub("", str(error)).rstrip(".")
        unknown = UNKNOWN_NAME.match(message)
        place = f"{error.GetLine()}:{error.GetColumn()}"
        remedy = _nearest_of_schema(unknown) if unknown else ""
        return _unreadable(source, place=place, message=message, remedy=remedy)
    places = Places(text)
    return ParsedConfig(
        config=_from_proto(proto, name=source.parent.name),
        places=places,
        faults=config_faults(proto, places=places, source=source),
    )


def _unreadable(path: Path, *, place: str, message: str, remedy: str) -> ParsedConfig:
    fault = Fault(severity=Severity.ERROR, path=path, place=place, message=message, remedy=remedy)
    return ParsedConfig(config=None, places=Places(""), faults=(fault,))


def _nearest_of_schema(unknown: re.Match[str]) -> str:
    pool = descriptor_pool.Default()
    if unknown["kind"] == "Enum":
        names = list(pool.FindEnumTypeByName(unknown["type"]).values_by_name)
    else:
        names = list(pool.FindMessageTypeByName(unknown["type"]).fields_by_name)
    return nearest(unknown["name"], known=names)


def _from_proto(proto: Any, *, name: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        platform=proto.platform,
        backend=proto.backend,
        max_batch_size=proto.max_batch_size,
        inputs=tuple(_tensor(tensor, optional=tensor.optional) for tensor in proto.input),
        outputs=tuple(_tensor(tensor, optional=False) for tensor in proto.output),
        version_policy=_version_policy(proto.version_policy),
        default_model_filename=proto.default_model_filename,
        decoupled=proto.model_transaction_policy.decoupled,
        sequence_batching=_sequence_batching(proto),
        ensemble_steps=tuple(map(_ensemble_step, proto.ensemble_scheduling.step)),
        parameters=MappingProxyType({key: value.string_value for key, value in proto.parameters.items()}),
        message=proto,
    )


def _tensor(proto: Any, *, optional: bool) -> TensorSpec:
    return TensorSpec(
        name=proto.name, data_type=_data_type(proto), dims=tuple(proto.dims), optional=optional
    )


def _sequence_batching(proto: Any) -> SequenceBatching | None:
    if not proto.HasField("sequence_batching"):
        return None
    batching = proto.sequence_batching
    return SequenceBatching(
        states=tuple(map(_state, batching.state)), iterative=batching.iterative_sequence
    )


def _state(proto: Any) -> StateSpec:
    return StateSpec(
        input_name=proto.input_name,
        output_name=proto.output_name,
        data_type=_data_type(proto),
        dims=tuple(proto.dims),
        same_buffer=proto.use_same_buffer_for_input_output,
    )


def _data_type(proto: Any) -> str:
    values = proto.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return str(values[proto.data_type].name)


def _ensemble_step(proto: Any) -> EnsembleStep:
    return EnsembleStep(
        model_name=proto.model_name,
        model_version=proto.model_version,
        input_map=MappingProxyType(dict(proto.input_map)),
        output_map=MappingProxyType(dict(proto.output_map)),
    )


def _version_policy(proto: Any) -> VersionPolicy:
    match proto.WhichOneof("policy_choice"):
        case "all":
            return AllVersions()
        case "specific":
            return SpecificVersions(versions=tuple(proto.specific.versions))
        case _:
            return LatestVersions(count=max(1, proto.latest.num_versions))
