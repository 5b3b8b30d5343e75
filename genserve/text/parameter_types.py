"""Parameter types: what a tool's schema says about its parameters, for formats that do not write JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any
from urllib.parse import unquote

_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_MAX_DEPTH = 16             # references may be circular
_MAX_ALTERNATIVES = 64
_JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_OBJECT_KEYWORDS = frozenset({"properties", "additionalProperties", "required"})


def alternatives(schema: Any, root: Mapping[str, Any], *, depth: int = 0) -> list[dict[str, Any]]:
    """Return schemas without `$ref`, `allOf`, `anyOf` and `oneOf` of their own, one of which a value matches.

    Args:
        schema: a JSON schema.
        root: the schema in which references are looked up.
        depth: how many schemas are around this one.
    """
    if schema is False:
        return []
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return [{}]
    found = [{key: value for key, value in schema.items() if key not in _APPLICATORS}]
    together = [[referred(schema["$ref"], root)]] if "$ref" in schema else []
    together += [[part] for part in _listed(schema.get("allOf"))]
    together += [choices for key in ("anyOf", "oneOf") if (choices := _listed(schema.get(key)))]
    for choices in together:
        parts = [part for choice in choices for part in alternatives(choice, root, depth=depth + 1)]
        found = [_merged(one, part) for one, part in product(found, parts)][:_MAX_ALTERNATIVES]
    return found


def parameter_schema(parameters: Mapping[str, Any], name: str) -> Any:
    """Return the schema of one parameter; empty if there is none.

    Args:
        parameters: the schema of a tool's arguments.
        name: the parameter.
    """
    shapes = alternatives(parameters, parameters)
    for shape in shapes:
        properties = shape.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    return next((further for shape in shapes if (further := shape.get("additionalProperties"))), {})


def value_types(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the JSON types that a schema names, in its order; empty: it names none."""
    return tuple({name: None for one in alternatives(schema, root) for name in own_types(one)})


def own_types(alternative: Mapping[str, Any]) -> Sequence[str]:
    """Return the JSON types that one of the `alternatives` names.

    A string comes last among the values of an `enum`, since other values can be told from it.
    """
    named = alternative.get("type")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list) and named:
        return [name for name in named if isinstance(name, str)]
    if values := enumerated(alternative):
        return sorted(dict.fromkeys(json_type(value) for value in values), key="string".__eq__)
    if alternative.keys() & _OBJECT_KEYWORDS:
        return ["object"]
    return ["array"] if alternative.keys() & {"items", "prefixItems"} else []


def members(alternative: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the schemas of an object's properties, and the names of those that it must have."""
    properties, required = alternative.get("properties"), _listed(alternative.get("required"))
    names = [name for name in required if isinstance(name, str)]
    return properties if isinstance(properties, Mapping) else {}, names


def enumerated(alternative: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of `enum` or `const`; empty: the schema has neither."""
    return [alternative["const"]] if "const" in alternative else _listed(alternative.get("enum"))


def json_type(value: Any) -> str:
    """Return the name of the type of a JSON value."""
    return _JSON_TYPES[type(value)]


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that describes what two schemas describe together, as far as both name properties."""
    merged = {**one, **other}
    parts = [part for part in (one, other) if isinstance(part.get("properties"), Mapping)]
    if parts:
        merged["properties"] = properties = {}
        for name, schema in (pair for part in parts for pair in part["properties"].items()):
            if name not in properties or isinstance(schema, Mapping):
                properties[name] = schema
    if required := [*_listed(one.get("required")), *_listed(other.get("required"))]:
        merged["required"] = required
    return merged


def referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema at a reference such as `#/$defs/point`; None: it cannot be followed."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    found: Any = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
