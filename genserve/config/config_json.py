"""Config JSON: a config as Triton shows it in JSON, and as a load request brings it."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

from google.protobuf import json_format

from genserve.config.schema import enum_name, new_model_config
from genserve.errors import RepositoryError

# Triton accepts, and JSON does not: strings in single quotes, names without quotes, trailing commas.
_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*") | '(?P<single>(?:\\.|[^'\\])*)' | (?P<name>[A-Za-z_]\w*)(?=\s*:)
      | (?P<comma>,)(?=\s*[}\]])""",
    re.VERBOSE,
)
_OLD_NAMES = {"generative_sequence": "iterative_sequence", "generativeSequence": "iterative_sequence"}

# 64-bit numbers that Triton leaves in quotes, as protobuf's JSON does; it unquotes all other numbers.
_IN_QUOTES = {
    "inference.ModelInstanceGroup.SecondaryDevice.device_id",
    "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
    "inference.ModelSequenceBatching.InitialState.dims",
}


def read_config_json(text: str, *, name: str) -> Any:
    """Read the JSON form of an `inference.ModelConfig`, as leniently as Triton does.

    Args:
        text: names as in the schema or in camel case; numbers and booleans also in quotes, enums in any case,
            a single value for a list of one.
        name: the model that errors name.

    Raises:
        RepositoryError: the text is not JSON, or does not follow the schema.
    """
    try:
        value = json.loads(_TOKEN.sub(_strict, text))
        if not isinstance(value, dict):
            raise json_format.ParseError("a config must be an object: {...}")
        message = new_model_config()
        return json_format.ParseDict(_by_schema(value, message.DESCRIPTOR), message)
    except (ValueError, json_format.ParseError) as error:
        raise RepositoryError(
            f"Invalid config override: {error}", remedy=f"start from the JSON of `/v2/models/{name}/config`"
        ) from None


def _strict(token: re.Match[str]) -> str:
    if token["comma"]:
        return ""
    if token["name"]:
        return f'"{token["name"]}"'
    if token["string"]:
        return token["string"]
    return '"' + token["single"].replace("\\'", "'").replace('"', '\\"') + '"'


def _by_schema(value: Any, descriptor: Any) -> Any:
    """Convert lenient values to values that protobuf's own reader accepts."""
    if not isinstance(value, dict):
        return value
    fields = dict(descriptor.fields_by_camelcase_name) | dict(descriptor.fields_by_name)
    named = {_OLD_NAMES.get(name, name): item for name, item in value.items()}
    return {
        name: _lenient_field(item, fields[name]) if name in fields else item for name, item in named.items()
    }


def _lenient_field(value: Any, field: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        entries = value.items() if isinstance(value, dict) else ()
        return {key: _lenient_item(item, of_values) for key, item in entries} or value
    if field.is_repeated and value is not None:
        return [_lenient_item(item, field) for item in (value if isinstance(value, list) else [value])]
    return _lenient_item(value, field)


def _lenient_item(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _by_schema(value, field.message_type)
    if not isinstance(value, str):
        return value
    if field.enum_type is not None:
        return value.upper()
    return {"true": True, "false": False}.get(value, value) if field.type == field.TYPE_BOOL else value


def config_json(message: Any) -> str:
    """Return an `inference.ModelConfig` as JSON, character by character as Triton writes it.

    Names are as in the schema; all scalars are written, messages only if they are set; maps, whose order
    is random in Triton, are sorted.
    """
    return json.dumps(_members(message), separators=(",", ":"), ensure_ascii=False)


def _members(message: Any) -> dict[str, Any]:
    # In the order of the schema, but the scalars of a oneof come last.
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
    """Return the shortest number with the same value, without `.0`."""
    if value.is_integer():
        return int(value)
    if field.type != field.TYPE_FLOAT:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(candidate for candidate in candidates if _float32(candidate) == value)


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
