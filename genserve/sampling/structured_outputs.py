"""Structured outputs: a schema, a regex or a grammar that a request requires of the text of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

from genserve.errors import InvalidRequest, require

Kind: TypeAlias = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The kinds with JSON, to which `JsonOptions` apply.
_WITH_JSON: tuple[Kind, ...] = ("json", "json_object", "structural_tag")
_PATTERN = "structured_outputs.whitespace_pattern"
# A longer text takes a parser minutes, or more stack than it has.
MAX_CHARS = 65536
_FORMATS = (
    'write {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}} or {"type": "json_object"}; '
    "for other forms see structured_outputs"
)
# The types of `response_format`, and the fields that each requires; "value" stands for "json_schema", too.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "text": (), "json_object": (), "structural_tag": (), "json": ("value",), "regex": ("value",),
    "json_schema": ("json_schema",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOptions:
    """How JSON is written, by the names of vLLM's options.

    Attributes:
        disable_any_whitespace: one space after each colon and comma, and no other whitespace.
        disable_additional_properties: an object that names its properties has no other, unless its schema
            has `additionalProperties`.
        whitespace_pattern: a regex of the whitespace between any two parts, which may also be left out;
            empty: none. It takes the place of `disable_any_whitespace`.

    Raises:
        InvalidRequest: an option is of the wrong type.
    """

    disable_any_whitespace: bool = True
    disable_additional_properties: bool = True
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            is_bool = isinstance(getattr(self, name), bool)
            require(is_bool, f"structured_outputs.{name}", "must be true or false")
        pattern = self.whitespace_pattern
        require(pattern is None or isinstance(pattern, str), _PATTERN, "must be text")

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(COMPACT, name)}


COMPACT = JsonOptions()
_OPTIONS = tuple(asdict(COMPACT))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """One constraint as text: equal constraints have equal texts.

    Raises:
        InvalidRequest: the text is empty or too long.
    """

    kind: Kind
    # The schema, the choices or the tags as JSON; the regex; the grammar; for json_object {}.
    text: str
    json_options: JsonOptions = COMPACT

    def __post_init__(self) -> None:
        field = "structured_outputs"
        require(self.text != "", field, f"has an empty {self.kind}")
        require(len(self.text) <= MAX_CHARS, field, f"is longer than {MAX_CHARS} characters")

    def as_options(self) -> dict[str, Any]:
        """Return the JSON object that `structured_outputs` reads."""
        match self.kind:
            case "json_object":
                return {"json_object": True, **self.json_options.changed()}
            case "json" | "choice" | "structural_tag":
                return {self.kind: json.loads(self.text), **self.json_options.changed()}
            case _:
                return {self.kind: self.text}


class StructuredOutputOptions(TypedDict, total=False):
    """What a request requires, by vLLM's names: exactly one kind, and options of its JSON."""

    json: Mapping[str, Any] | str | None    # a JSON schema, or its text
    json_object: bool | None                # any JSON object
    regex: str | None                       # the whole text matches
    choice: Sequence[str] | None            # the text is one of the texts
    grammar: str | None                     # a grammar in Lark's notation, or llama.cpp's GBNF
    structural_tag: Mapping[str, Any] | str | None  # any text, with JSON between some tags; or its text
    disable_any_whitespace: bool | None             # true by default; see `JsonOptions`
    disable_additional_properties: bool | None      # true by default
    whitespace_pattern: str | None


def structured_outputs(value: Any, *, field: str = "structured_outputs") -> StructuredOutputs | None:
    """Read what a request requires; None: any text.

    Raises:
        InvalidRequest: not exactly one kind, or a malformed one; `field` says where.
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    require(isinstance(value, Mapping), field, f"must be an object with one of {', '.join(KINDS)}")
    neutral = {"json_object": False}
    given = {name: part for name, part in value.items() if part is not None and part is not neutral.get(name)}
    json_options = JsonOptions(**{name: given.pop(name) for name in _OPTIONS if name in given})
    for name in given:
        known = ", ".join(KINDS + _OPTIONS)
        require(name in KINDS, f"{field}.{name}", f"is not supported; known are {known}")
    require(len(given) == 1, field, f"must have exactly one of {', '.join(KINDS)}")
    [(kind, part)] = given.items()
    read = _read(kind, part, f"{field}.{kind}")
    if kind in _WITH_JSON:
        return replace(read, json_options=json_options)
    # Clients of vLLM send its other options with any kind.
    require(json_options.whitespace_pattern is None, _PATTERN, f"needs one of {', '.join(_WITH_JSON)}")
    return read


def _read(kind: Kind, value: Any, where: str) -> StructuredOutputs:
    match kind:
        case "json_object":
            require(value is True, where, "must be true or false")
            return StructuredOutputs(kind=kind, text="{}")
        case "json":
            return _json(value, where)
        case "choice":
            return StructuredOutputs(kind=kind, text=_choices(value, where))
        case "structural_tag":
            return _structural_tag(value, where)
        case _:
            require(isinstance(value, str), where, "must be text")
            return StructuredOutputs(kind=kind, text=value)


def structured_outputs_of_format(value: Any, *, field: str) -> StructuredOutputs | None:
    """Read OpenAI's `response_format`, TGI's `grammar`, or a variant of either.

    Args:
        value: `{"type": ...}`: `text`; `json_schema` with `json_schema` or, for TGI, `value`, which has the
            `schema`; `json_object`, with a `schema` or `value` or without; `json` or `regex` with `value`;
            `structural_tag` with `structures` and `triggers`.
            None: any text.
        field: the field's name in the dialect.

    Raises:
        InvalidRequest: the value is malformed; `field` says where.
    """
    if value is None:
        return None
    require(isinstance(value, Mapping), field, "must be an object with a type")
    parts = {name: part for name, part in value.items() if name != "type" and part is not None}
    match value.get("type"), parts:
        case "text", {**rest} if not rest:
            return None
        case "json_object", {**rest} if not rest:
            return structured_outputs({"json_object": True})
        case "json_object", {"schema": schema, **rest} if not rest:
            return _json(schema, f"{field}.schema")
        case ("json_object" | "json"), {"value": schema, **rest} if not rest:
            return _json(schema, f"{field}.value")
        case "structural_tag", _:
            return _structural_tag(parts, field)
        case "regex", {"value": str(regex), **rest} if not rest:
            return StructuredOutputs(kind="regex", text=regex)
        case "json_schema", {"json_schema": {"schema": schema}, **rest} if not rest:
            return _json(schema, f"{field}.json_schema.schema")
        case "json_schema", {"value": {"schema": schema}, **rest} if not rest:
            return _json(schema, f"{field}.value.schema")
    raise InvalidRequest(f"{field} {_problem(value.get('type'), parts)}", field=field, remedy=_FORMATS)


def _problem(kind: Any, parts: Mapping[str, Any]) -> str:
    if kind is None:
        return "lacks the field 'type'"
    if not isinstance(kind, str) or kind not in _REQUIRED:
        return f"has the unknown type {str(kind)[:64]!r}"
    for name in _REQUIRED[kind]:
        if name not in parts and "value" not in parts:
            return f"lacks the field {name!r}"
    if kind == "json_schema":
        name = "json_schema" if "json_schema" in parts else "value"
        if isinstance(parts[name], Mapping) and "schema" not in parts[name]:
            return f"lacks the field '{name}.schema'"
    return f"has a field that is not valid for the type {kind!r}"


def _json(schema: Any, field: str) -> StructuredOutputs:
    return StructuredOutputs(kind="json", text=_written(_schema(schema, field), field))


def _schema(schema: Any, field: str) -> Mapping[str, Any]:
    schema = _loaded(schema, field)
    require(isinstance(schema, Mapping), field, "must be a JSON schema: an object")
    return cast("Mapping[str, Any]", schema)


def _loaded(value: Any, field: str) -> Any:
    """Return the value of a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field=field) from None


def _written(value: Any, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{field} cannot be written as JSON: {error}", field=field) from None


def _structural_tag(value: Any, field: str) -> StructuredOutputs:
    """Read the tags, by the names of vLLM and SGLang: the text that begins one, its schema, and its end."""
    value = _loaded(value, field)
    known = isinstance(value, Mapping) and value.keys() - {"type"} == {"structures", "triggers"}
    require(known, field, "must have structures and triggers")
    structures, triggers = value["structures"], value["triggers"]
    for name, listed in (("structures", structures), ("triggers", triggers)):
        require(isinstance(listed, list) and listed != [], f"{field}.{name}", "must be a non-empty list")
    for index, trigger in enumerate(triggers):
        require(isinstance(trigger, str) and trigger != "", f"{field}.triggers[{index}]", "must be text")
    read = [_structure(one, triggers, f"{field}.structures[{index}]") for index, one in enumerate(structures)]
    text = _written({"structures": read, "triggers": triggers}, field)
    return StructuredOutputs(kind="structural_tag", text=text)


def _structure(value: Any, triggers: Sequence[str], field: str) -> dict[str, Any]:
    known = isinstance(value, Mapping) and value.keys() == {"begin", "schema", "end"}
    require(known, field, "must have begin, schema and end")
    begin, end = value["begin"], value["end"]
    begins = isinstance(begin, str) and begin.startswith(tuple(triggers))
    require(begins, f"{field}.begin", "must be text that starts with one of the triggers")
    require(isinstance(end, str), f"{field}.end", "must be text")
    return {"begin": begin, "schema": _schema(value["schema"], f"{field}.schema"), "end": end}


def _choices(choices: Any, field: str) -> str:
    listed = isinstance(choices, Sequence) and not isinstance(choices, str) and len(choices) > 0
    require(listed and all(isinstance(c, str) and c for c in choices), field, "must be a list of texts")
    return json.dumps(list(choices), ensure_ascii=False)
