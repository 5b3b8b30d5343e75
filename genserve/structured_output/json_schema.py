"""JSON schema: prepares the schema of a request for llguidance: closes it, and sets the layout of the JSON.

An object without `additionalProperties` may have any further properties, and a small model invents them
without end. A closed schema forbids them, as vLLM's `disable_additional_properties` does. The parts of a
schema that describe one object together (`allOf`, `$ref`, `anyOf` and its neighbours) are closed together: a
part that forbade the properties of another part would allow no object at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from genserve.sampling.structured_outputs import COMPACT, JsonOptions
from genserve.text.parameter_types import referred

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Without this option `\u` begins control characters only, so a model that means `\u00e9` writes one of them.
_ALL_ESCAPES: Final = "json_allow_general_unicode_escapes"
_JSON_RULE = re.compile(r"%json\s*\{")
# Even where whitespace is free it is bounded, because small models tend to repeat it forever.
_LOOSE_WHITESPACE = r"[ \t\n\r]{1,32}"
# Look-around and back references, which no automaton can follow.
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
# Keywords whose subschemas describe other values than the schema itself describes.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = ("items", "prefixItems", "additionalItems", "additionalProperties")
_CHOICES = ("anyOf", "oneOf")
# The keywords that constrain an object. Other keywords are annotations, or constrain other types.
_CONSTRAINTS = frozenset(
    {"type", "const", "enum", "allOf", "anyOf", "oneOf", "$ref", "properties", "patternProperties"}
    | {"additionalProperties", "unevaluatedProperties", "required", "minProperties", "maxProperties"}
)


def guided_schema(schema: Mapping[str, Any], options: JsonOptions = COMPACT) -> dict[str, Any]:
    """Return a schema for `LLMatcher.grammar_from_json_schema`, `StructTag` or `%json` in a Lark grammar.

    Unsupported keywords are rejected, even if the schema asks for leniency.

    Raises:
        RecursionError: it is nested too deeply.
    """
    closed = closed_schema(schema) if options.disable_additional_properties else schema
    return {**closed, "x-guidance": _options(options)}


def lenient_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as `guided_schema` does, without the unsupported keywords; all other keywords apply.

    A keyword that is null counts as absent: clients in Go write it so.

    Raises:
        RecursionError: it is nested too deeply.
    """
    guided = guided_schema(_supported(schema))
    return {**guided, "x-guidance": {**guided["x-guidance"], "lenient": True, "coerce_one_of": True}}


def _supported(schema: Any) -> Any:
    """Return a schema without what llguidance rejects even in lenient mode: some patterns, and null."""
    if not isinstance(schema, Mapping):
        return {} if schema is None else schema
    supported: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None and (key != "const" or "null" not in _listed(schema.get("type", "null"))):
            continue
        if key == "pattern" and isinstance(value, str) and _UNSUPPORTED_PATTERN.search(value):
            continue
        if key in _MAPS and isinstance(value, Mapping):
            supported[key] = {name: _supported(part) for name, part in value.items()}
        elif key in (*_PARTS, *_CHOICES, "allOf"):
            parts = [_supported(part) for part in _listed(value)]
            supported[key] = parts if isinstance(value, list) else parts[0]
        else:
            supported[key] = value
    return supported


def with_all_escapes(grammar: str) -> str:
    r"""Return a Lark grammar whose `%json` rules without options of their own know all `\u` escapes."""
    written, end = "", 0
    for rule in _JSON_RULE.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, rule.end() - 1)
        except (ValueError, RecursionError):    # a text or a comment, or what the compiler will reject
            continue
        if "x-guidance" not in schema:
            options = json.dumps({"x-guidance": {_ALL_ESCAPES: True}})[1:-1]
            written += grammar[end : rule.end()] + options + (", " if schema else "")
            end = rule.end()
    return written + grammar[end:]


def _options(options: JsonOptions) -> JsonCompileOptions:
    strict: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, _ALL_ESCAPES: True}
    if options.whitespace_pattern:
        return {**strict, "whitespace_pattern": options.whitespace_pattern}
    if options.whitespace_pattern == "":
        return {**strict, "whitespace_flexible": False}
    if not options.disable_any_whitespace:
        return {**strict, "whitespace_pattern": _LOOSE_WHITESPACE}
    # This is how JSON on one line is mostly written: 190 of 200 answers of SmolLM2 came to an end, and 184
    # without the spaces (`benchmarks/structured_outputs.py`).
    return {**strict, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(slots=True, kw_only=True)
class _Names:
    """The properties that some parts of a schema name, in order."""

    properties: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    required: dict[str, bool] = field(default_factory=dict)
    min_properties: int = 0
    are_listed: bool = False    # a part has `properties` or `patternProperties`
    are_final: bool = False     # a part says itself which further properties are allowed

    def add(self, other: _Names) -> _Names:
        """Add the names of another part, and return this object."""
        self.properties |= other.properties
        self.patterns |= other.patterns
        self.required |= other.required
        self.min_properties = max(self.min_properties, other.min_properties)
        self.are_listed |= other.are_listed
        self.are_final |= other.are_final
        return self

    @property
    def suffice(self) -> bool:
        """Whether an object with these properties alone may be valid."""
        few = len(self.properties | self.required) < self.min_properties
        return self.are_listed and not self.are_final and (bool(self.patterns) or not few)

    def closing(self) -> dict[str, Any]:
        """Return the schema of objects with these properties alone, whatever their values."""
        patterns = {"patternProperties": self.patterns} if self.patterns else {}
        return {"properties": self.properties | self.required, **patterns, "additionalProperties": False}


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with `additionalProperties: false` for each object that names its properties.

    Objects with `additionalProperties`, objects without `properties` and `patternProperties`, objects that
    must have more properties than the schema names, references that cannot be followed, and malformed parts
    stay as they are.

    Raises:
        RecursionError: it is nested too deeply.
    """
    return _Closing(schema).result()


class _Closing:
    """Closes one schema.

    A definition is closed in place. References to it from a part of an object are redirected to an open copy.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._copies: dict[str, str] = {}       # the names of open copies in $defs, by reference
        self._referred: dict[str, _Names] = {}  # the properties of referenced schemas, by reference

    def result(self) -> dict[str, Any]:
        """Return the closed schema."""
        closed = dict(self._closed(self._root, _Names()))
        copies: dict[str, Any] = {}
        while len(copies) < len(self._copies):      # a copy may refer to another copy
            reference = list(self._copies)[len(copies)]
            copies[self._copies[reference]] = self._open(referred(reference, self._root))
        return closed | {"$defs": {**closed.get("$defs", {}), **copies}} if copies else closed

    def _closed(self, schema: Any, outer: _Names) -> Any:
        """Close a schema; `outer` has the names from the other parts that describe the same value."""
        if schema is True and outer.are_listed:
            schema = {}
        if not _may_be_object(schema):
            return self._open(schema)
        own = self._names(schema)
        if own.are_final:
            return self._open(schema)
        if choices := [key for key in _CHOICES if isinstance(schema.get(key), list)]:
            return self._open(schema, but=choices) | self._closed_choices(schema, choices, own.add(outer))
        constraints = _CONSTRAINTS.intersection(schema)
        if constraints == {"$ref"} and not outer.are_listed:
            return self._open(schema, but=["$ref"])
        if constraints == {"allOf"} and len(parts := _listed(schema["allOf"])) == 1:
            return self._open(schema, but=["allOf"]) | {"allOf": [self._closed(parts[0], outer)]}
        names = own.add(outer)
        opened: dict[str, Any] = self._open(schema)
        if not names.suffice:
            return opened
        closing = names.closing()
        if "allOf" in schema or "$ref" in schema:
            of_type = {"type": schema["type"]} if "type" in schema else {}
            return opened | {"allOf": [*opened.get("allOf", []), of_type | closing]}
        for key in ("properties", "patternProperties"):
            if isinstance(mine := opened.get(key, {}), Mapping) and key in closing:
                opened[key] = {**mine, **closing[key], **mine}
        return opened | {"additionalProperties": False}

    def _closed_choices(
        self, schema: Mapping[str, Any], choices: Collection[str], names: _Names
    ) -> dict[str, Any]:
        """Close each choice; `names` has the names from all parts but the choices."""
        closed = {}
        for key in choices:
            around = _Names().add(names)
            for other in choices:
                for part in schema[other] if other != key else ():
                    around.add(self._names(part, with_choices=True))
            closed[key] = [self._closed(part, around) for part in schema[key]]
        return closed

    def _open(self, schema: Any, but: Collection[str] = ()) -> Any:
        """Close only subschemas that describe other values, except the values of the keywords in `but`."""
        if not isinstance(schema, Mapping):
            return schema
        opened = dict(schema)
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, Mapping):
                opened[key] = {name: self._closed(part, _Names()) for name, part in value.items()}
            elif key in _PARTS:
                parts = [self._closed(part, _Names()) for part in _listed(value)]
                opened[key] = parts if isinstance(value, list) else parts[0]
            elif key in ("allOf", *_CHOICES) and key not in but and isinstance(value, list):
                opened[key] = [self._open(part) for part in value]
            elif key == "$ref" and key not in but and self._names({"$ref": value}).are_listed:
                name = self._copies.setdefault(value, f"genserve:open:{len(self._copies)}")
                opened[key] = f"#/$defs/{name}"
        return opened

    def _names(self, schema: Any, *, with_choices: bool = False) -> _Names:
        """Return the properties that a schema names, with the choices' properties if asked for."""
        names = _Names()
        if not isinstance(schema, Mapping):
            return names
        for key, value in schema.items():
            if key in ("properties", "patternProperties") and isinstance(value, Mapping):
                of_key = names.properties if key == "properties" else names.patterns
                of_key |= dict.fromkeys(value, True)
                names.are_listed = True
            elif key == "required" and isinstance(value, list):
                names.required |= {name: True for name in value if isinstance(name, str)}
            elif key == "minProperties" and isinstance(value, int):
                names.min_properties = value
            elif key in ("additionalProperties", "unevaluatedProperties"):
                names.are_final = True
            elif key in ("const", "enum"):
                names.are_final |= any(isinstance(one, Mapping) for one in _listed(value))
            elif (key == "allOf" or (key in _CHOICES and with_choices)) and isinstance(value, list):
                for part in value:
                    names.add(self._names(part, with_choices=True))
            elif key == "$ref" and isinstance(value, str):
                names.add(self._names_of_target(value))
        return names

    def _names_of_target(self, reference: str) -> _Names:
        if reference not in self._referred:
            self._referred[reference] = _Names()    # for a definition that refers to itself
            target = referred(reference, self._root)
            names = self._names(target, with_choices=True)
            names.are_final |= target is None
            self._referred[reference] = names
        return self._referred[reference]


def _may_be_object(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "object" in _listed(schema.get("type", "object"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

