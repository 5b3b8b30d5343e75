"""JSON schema: the schema of a request as llguidance gets it, closed, and with the form of JSON to write.

An object without `additionalProperties` may have any others, and a small model invents them without end. In a
closed schema they are forbidden, as by `disable_additional_properties` of vLLM. The parts that describe one
object together (`allOf`, `$ref`, `anyOf` and its neighbours) are closed together: a part that forbids the
properties of the others would allow no object at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from genserve.sampling.structured_outputs import COMPACT, JsonForm

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Even where whitespace is free it is bounded, because small models tend to repeat it forever.
_LOOSE_WHITESPACE = r"[ \t\n\r]{1,32}"
# Look-around and back references, which no automaton can follow.
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
# Keywords whose schemas describe other values than the schema that has them.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = ("items", "prefixItems", "additionalItems", "additionalProperties")
_CHOICES = ("anyOf", "oneOf")
# The keywords of an object or of any value; others are annotations, or belong to other types.
_CONSTRAINTS = frozenset(
    {"type", "const", "enum", "allOf", "anyOf", "oneOf", "$ref", "properties", "patternProperties"}
    | {"additionalProperties", "unevaluatedProperties", "required", "minProperties", "maxProperties"}
)


def guided_schema(schema: Mapping[str, Any], form: JsonForm = COMPACT) -> dict[str, Any]:
    """Return a schema for `LLMatcher.grammar_from_json_schema`, `StructTag` or `%json` in a Lark grammar.

    Its unsupported keywords are rejected, even if it asks for leniency.

    Raises:
        RecursionError: it is nested too deeply.
    """
    closed = closed_schema(schema) if form.disable_additional_properties else schema
    return {**closed, "x-guidance": _options(form)}


def lenient_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as `guided_schema` does, without the unsupported keywords; the others apply.

    Raises:
        RecursionError: it is nested too deeply.
    """
    guided = guided_schema(_with_supported_patterns(schema))
    return {**guided, "x-guidance": {**guided["x-guidance"], "lenient": True, "coerce_one_of": True}}


def _with_supported_patterns(part: Any) -> Any:
    """Return a part of a schema without the patterns that llguidance rejects even if it is lenient."""
    if isinstance(part, list):
        return [_with_supported_patterns(item) for item in part]
    if not isinstance(part, Mapping):
        return part
    return {
        key: _with_supported_patterns(value)
        for key, value in part.items()
        if not (key == "pattern" and isinstance(value, str) and _UNSUPPORTED_PATTERN.search(value))
    }


def _options(form: JsonForm) -> JsonCompileOptions:
    strict: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
    if form.whitespace_pattern:
        return {**strict, "whitespace_pattern": form.whitespace_pattern}
    if form.whitespace_pattern == "":
        return {**strict, "whitespace_flexible": False}
    if not form.disable_any_whitespace:
        return {**strict, "whitespace_pattern": _LOOSE_WHITESPACE}
    # As JSON of one line is mostly written. Of 200 answers of SmolLM2, 190 came to an end; without spaces 184
    # (`benchmarks/structured_outputs.py`).
    return {**strict, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(slots=True, kw_only=True)
class _Names:
    """The properties that some parts of a schema name, in their order."""

    properties: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    required: dict[str, bool] = field(default_factory=dict)
    min_properties: int = 0
    are_listed: bool = False    # there is `properties` or `patternProperties`
    are_final: bool = False     # the schema itself says what else is allowed

    def add(self, other: _Names) -> _Names:
        """Add those of another part, and return this."""
        self.properties |= other.properties
        self.patterns |= other.patterns
        self.required |= other.required
        self.min_properties = max(self.min_properties, other.min_properties)
        self.are_listed |= other.are_listed
        self.are_final |= other.are_final
        return self

    @property
    def suffice(self) -> bool:
        """Whether an object may have these properties alone."""
        few = len(self.properties | self.required) < self.min_properties
        return self.are_listed and not self.are_final and (bool(self.patterns) or not few)

    def closing(self) -> dict[str, Any]:
        """Return the schema of objects with these properties alone, whatever their values."""
        patterns = {"patternProperties": self.patterns} if self.patterns else {}
        return {"properties": self.properties | self.required, **patterns, "additionalProperties": False}


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with `additionalProperties: false` for each object that names its properties.

    Left as they are: objects with `additionalProperties`, objects without `properties` and
    `patternProperties`, objects that must have more properties than are named, references that cannot be
    followed, and malformed parts.

    Raises:
        RecursionError: it is nested too deeply.
    """
    return _Closing(schema).result()


class _Closing:
    """Closes one schema.

    A definition is closed where it stands. References to it from a part of an object are turned to an open
    copy of it.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._copies: dict[str, str] = {}       # the names of open copies in $defs, by the reference
        self._referred: dict[str, _Names] = {}  # by reference

    def result(self) -> dict[str, Any]:
        """Return the closed schema."""
        closed = dict(self._closed(self._root, _Names()))
        copies: dict[str, Any] = {}
        while len(copies) < len(self._copies):      # a copy may refer to another one
            reference = list(self._copies)[len(copies)]
            copies[self._copies[reference]] = self._open(self._target(reference))
        return closed | {"$defs": {**closed.get("$defs", {}), **copies}} if copies else closed

    def _closed(self, schema: Any, outer: _Names) -> Any:
        """Close a schema; `outer` are the names of the other parts that describe the same value."""
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
        """Close each choice; `names` are those of all parts but the choices."""
        closed = {}
        for key in choices:
            around = _Names().add(names)
            for other in choices:
                for part in schema[other] if other != key else ():
                    around.add(self._names(part, with_choices=True))
            closed[key] = [self._closed(part, around) for part in schema[key]]
        return closed

    def _open(self, schema: Any, but: Collection[str] = ()) -> Any:
        """Close only what describes other values, and leave the values of the keywords `but`."""
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
        """Return the properties that a schema names, with those of `anyOf` and `oneOf` if asked for."""
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
            self._referred[reference] = _Names()    # if it refers to itself
            target = self._target(reference)
            names = self._names(target, with_choices=True)
            names.are_final |= target is None
            self._referred[reference] = names
        return self._referred[reference]

    def _target(self, reference: str) -> Any:
        """Return the target of a JSON pointer within the schema; None: there is none."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        found: Any = self._root
        for part in unquote(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(key)
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found


def _may_be_object(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "object" in _listed(schema.get("type", "object"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

