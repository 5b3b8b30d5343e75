"""Which objects a closed schema allows: `jsonschema` judges."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from genserve.structured_output.json_schema import closed_schema

A, B, C = ({"properties": {name: {"type": "integer"}}, "required": [name]} for name in "abc")
EITHER = {"anyOf": [A, B]}
REFERRED = {"$ref": "#/$defs/a"}
CHAIN = {"properties": {"a": {}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "allowed", "rejected"),
    [
        (A, {"a": 1}, {"a": 1, "x": 1}),
        ({"properties": {}}, {}, {"x": 1}),
        ({"type": "array", "items": A}, [{"a": 1}], [{"a": 1, "x": 1}]),
        ({"prefixItems": [A, B], "items": C}, [{"a": 1}, {"b": 1}, {"c": 1}], [{"a": 1}, {"b": 1, "x": 1}]),
        ({"additionalProperties": A}, {"x": {"a": 1}}, {"x": {"a": 1, "x": 1}}),
        ({"patternProperties": {"^p": A}}, {"p1": {"a": 1}}, {"q": 1}),
        (A | {"patternProperties": {"^p": {}}}, {"a": 1, "p1": 1}, {"a": 1, "x": 1}),
        ({"properties": {"properties": A}}, {"properties": {"a": 1}}, {"properties": {"a": 1, "x": 1}}),
        ({"properties": {"a": {}}, "required": ["b"]}, {"a": 1, "b": 1}, {"b": 1, "x": 1}),
        ({"allOf": [A]}, {"a": 1}, {"a": 1, "x": 1}),
        ({"allOf": [A, B]}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "x": 1}),
        (C | {"allOf": [A, EITHER]}, {"a": 1, "c": 1, "b": 1}, {"a": 1, "c": 1, "x": 1}),
        (EITHER, {"b": 1}, {"b": 1, "x": 1}),
        (EITHER, {"a": 1}, {"a": 1, "b": 1}),
        ({"anyOf": [A, {"type": "null"}]}, None, {"a": 1, "x": 1}),
        (C | EITHER, {"c": 1, "b": 1}, {"c": 1, "b": 1, "a": 1}),
        (C | EITHER | {"oneOf": [A, {"type": "null"}]}, {"c": 1, "a": 1}, {"c": 1, "a": 1, "x": 1}),
        (
            {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            {"a": 1, "b": 1},
            {"a": 1, "x": 1},
        ),
        (C | {"anyOf": [True, {"type": "null"}]}, {"c": 1}, {"c": 1, "x": 1}),
        (REFERRED | {"$defs": {"a": A}}, {"a": 1}, {"a": 1, "x": 1}),
        (B | REFERRED | {"$defs": {"a": A}}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "x": 1}),
        ({"allOf": [REFERRED, B], "$defs": {"a": A}}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "x": 1}),
        (
            {"allOf": [REFERRED, B], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/c"}, A]}, "c": C}},
            {"a": 1, "b": 1, "c": 1},
            {"a": 1, "b": 1, "c": 1, "x": 1},
        ),
        (
            {"properties": {"p": REFERRED, "q": B | REFERRED}, "$defs": {"a": A}},
            {"p": {"a": 1}, "q": {"a": 1, "b": 1}},
            {"p": {"a": 1, "b": 1}},
        ),
        (B | {"$ref": "#/$defs/a~1%25", "$defs": {"a/%": A}}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "x": 1}),
        (CHAIN, {"a": 1, "next": {"a": 1, "next": None}}, {"a": 1, "next": {"x": 1}}),
    ],
)
def test_an_object_has_only_the_properties_that_its_schema_names(schema, allowed, rejected):
    before = json.dumps(schema)
    closed = closed_schema(schema)
    assert json.dumps(schema) == before
    jsonschema.Draft202012Validator.check_schema(closed)
    assert is_valid(schema, allowed)
    assert is_valid(closed, allowed)
    assert is_valid(schema, rejected) or EITHER["anyOf"] == schema.get("anyOf")
    assert not is_valid(closed, rejected)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        {"type": "string"},
        A | {"additionalProperties": True},
        A | {"additionalProperties": False},
        A | {"additionalProperties": {"type": "string"}},
        {"allOf": [A, B | {"additionalProperties": True}]},
        C | {"anyOf": [A, B], "additionalProperties": True},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}}, "enum": [{"a": 1}, {"x": 1}]},
        {"properties": {"a": {}}, "const": {"x": {"properties": {}}}},
        {"default": {"properties": {}}, "examples": [{"properties": {}}]},
        {"allOf": [{"$ref": "#/$defs/missing"}, A]},
        {"allOf": [{"$ref": "https://localhost/schema"}, A]},
        {"allOf": [{"$ref": "#anchor"}, A]},
        {"properties": [], "allOf": 3, "anyOf": {}, "required": 4, "items": None, "$ref": 5},
    ],
)
def test_any_other_schema_is_left_as_it_is(schema):
    assert closed_schema(schema) == schema


def test_properties_keep_their_order():
    schema = {"required": ["c", "b", "x"], "properties": {"a": {}, "b": {}, "c": {}}}
    assert list(closed_schema(schema)["properties"]) == ["a", "b", "c", "x"]
