"""From JSON: a config that comes with a request to load a model, in place of its config.pbtxt."""

from __future__ import annotations

import json
import re
from typing import Any

from google.protobuf import json_format

from genserve.config.schema import new_model_config
from genserve.errors import RepositoryError

__all__ = ["read_config_json"]

# What Triton takes, and JSON does not: strings in single quotes, names without any, commas at the end.
_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*") | '(?P<single>(?:\\.|[^'\\])*)' | (?P<name>[A-Za-z_]\w*)(?=\s*:)
      | (?P<comma>,)(?=\s*[}\]])""",
    re.VERBOSE,
)
_OLD_NAMES = {"generative_sequence": "iterative_sequence", "generativeSequence": "iterative_sequence"}


def read_config_json(text: str, *, name: str) -> Any:
    """Read the JSON form of an `inference.ModelConfig`, as leniently as Triton does.

    Args:
        text: names as in the schema or in camel case, numbers and truth values also in quotes, enums in
            any case, one value where a list of one is meant.
        name: of the model, for the error.

    Raises:
        RepositoryError: it is not JSON, or not of the schema.
    """
    try:
        value = json.loads(_TOKEN.sub(_strict, text))
        if not isinstance(value, dict):
            raise json_format.ParseError("a config is an object: {...}")
        message = new_model_config()
        return json_format.ParseDict(_by_schema(value, message.DESCRIPTOR), message)
    except (ValueError, json_format.ParseError) as error:
        raise RepositoryError(
            f"Invalid config override: {error}",
            remedy=f"load {name!r} with what `/v2/models/{name}/config` shows, changed, as one JSON string",
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
    """Bring what is lenient in the values to what protobuf's own reader takes."""
    if not isinstance(value, dict):
        return value
    fields = dict(descriptor.fields_by_camelcase_name) | dict(descriptor.fields_by_name)
    named = {_OLD_NAMES.get(name, name): item for name, item in value.items()}
    return {name: _field(item, fields[name]) if name in fields else item for name, item in named.items()}


def _field(value: Any, field: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        entries = value.items() if isinstance(value, dict) else ()
        return {key: _item(item, of_values) for key, item in entries} or value
    if field.is_repeated and value is not None:
        return [_item(item, field) for item in (value if isinstance(value, list) else [value])]
    return _item(value, field)


def _item(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _by_schema(value, field.message_type)
    if not isinstance(value, str):
        return value
    if field.enum_type is not None:
        return value.upper()
    return {"true": True, "false": False}.get(value, value) if field.type == field.TYPE_BOOL else value
