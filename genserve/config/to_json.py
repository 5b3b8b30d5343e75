"""To JSON: a config as Triton shows it to clients (`/config`) and Python models (`model_config`)."""

from __future__ import annotations

import json
import struct
from typing import Any

from genserve.config.from_message import enum_name

__all__ = ["config_json"]

# Numbers of 64 bits that Triton leaves in quotes, as protobuf's JSON has them; it takes them off the others.
_IN_QUOTES = {
    "inference.ModelInstanceGroup.SecondaryDevice.device_id",
    "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
    "inference.ModelSequenceBatching.InitialState.dims",
}


def config_json(message: Any) -> str:
    """Return an `inference.ModelConfig` as JSON, character by character as Triton writes it.

    Names are those of the schema; every scalar is written, messages only if they are set; maps, whose
    order Triton leaves to chance, are sorted.
    """
    return json.dumps(_members(message), separators=(",", ":"), ensure_ascii=False)


def _members(message: Any) -> dict[str, Any]:
    # In the order of the schema, but scalars that exclude each other come last.
    fields = sorted(message.DESCRIPTOR.fields, key=_is_scalar_choice)
    return {field.name: _value(message, field) for field in fields if _is_written(message, field)}


def _is_scalar_choice(field: Any) -> bool:
    return field.containing_oneof is not None and field.message_type is None


def _is_written(message: Any, field: Any) -> bool:
    return not field.has_presence or message.HasField(field.name)


def _value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        return {str(key): _item(item, of_values) for key, item in sorted(value.items())}
    if field.is_repeated:
        return [_item(item, field) for item in value]
    if field.enum_type is not None:
        return enum_name(message, field.name)
    return _item(value, field)


def _item(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _members(value)
    if field.full_name in _IN_QUOTES:
        return str(value)
    return _shortest(value, field) if isinstance(value, float) else value


def _shortest(value: float, field: Any) -> float | int:
    """The fewest digits that mean the same number, without `.0`."""
    if value.is_integer():
        return int(value)
    if field.type != field.TYPE_FLOAT:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(candidate for candidate in candidates if _float32(candidate) == value)


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
