"""JSON schemas at random, of all that structured outputs know."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["random_schema"]

PATTERNS = ["^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{1,4}$", "^(red|blue)$", "^\\d{4}-\\d\\d$", "^#[0-9a-f]{6}$"]
FORMATS = ["date", "email", "ipv4", "ipv6", "uuid"]
WORDS = ["alpha", "beta", "gamma", 'de"lta', "\u00e9psilon", "", "zeta\n", "\N{GRINNING FACE}"]
CONSTANTS: list[Any] = [*WORDS, 0, -3, 1.5, True, False, None, [1, "a"], {"k": [None]}]
NAMES = ["id", "name", "size", "na me", "gr\u00f6\u00dfe", 'q"uote']


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of three levels at the most; some of its parts are references."""
    rng = random.Random(seed)
    schema = rng.choice([_object, _array, _any_of])(rng, 2)
    return schema | {"$defs": {"leaf": _leaf(rng), "list": _chain(rng)}}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return rng.choice([_leaf, _leaf, _leaf, _reference])(rng)
    return rng.choice([_object, _array, _any_of, _leaf_at])(rng, depth - 1)


def _leaf_at(rng: random.Random, _: int) -> dict[str, Any]:
    return _leaf(rng)


def _leaf(rng: random.Random) -> dict[str, Any]:
    return rng.choice([_string, _integer, _number, _enum, _constant, _simple, _together])(rng)


def _string(rng: random.Random) -> dict[str, Any]:
    shortest = rng.randint(0, 4)
    return {"type": "string"} | rng.choice(
        [
            {"maxLength": rng.randint(1, 12)},
            {"minLength": shortest, "maxLength": shortest + rng.randint(0, 8)},
            {"pattern": rng.choice(PATTERNS)},
            {"format": rng.choice(FORMATS)},
        ]
    )


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    bounds = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    schema = {"type": "integer", bounds[0]: low, bounds[1]: low + rng.randint(10, 500)}
    return schema | rng.choice([{}, {"multipleOf": rng.choice([2, 5, 7])}])


def _number(rng: random.Random) -> dict[str, Any]:
    low = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + rng.uniform(0.5, 50), 2)}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(CONSTANTS, rng.randint(1, 4))}


def _constant(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(CONSTANTS)}


def _simple(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _together(rng: random.Random) -> dict[str, Any]:
    return {"type": "integer", "allOf": [{"minimum": rng.randint(0, 5)}, {"maximum": rng.randint(6, 90)}]}


def _reference(rng: random.Random) -> dict[str, Any]:
    return {"$ref": rng.choice(["#/$defs/leaf", "#/$defs/list"])}


def _chain(rng: random.Random) -> dict[str, Any]:
    """A schema that contains itself."""
    inner = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}
    properties = {"value": _leaf(rng), "next": inner}
    return {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    shortest = rng.randint(0, 2)
    bounds = {"minItems": shortest, "maxItems": shortest + rng.randint(0, 3)}
    if rng.random() < 0.3:
        first = [_schema(rng, 0) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": first, "items": _schema(rng, depth), "maxItems": 4}
    return {"type": "array", "items": _schema(rng, depth)} | bounds


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(2, 3))]}
