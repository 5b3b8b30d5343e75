"""Decoding fields: the sampling parameters in the bodies of all dialects, by vLLM's names.

The fields are derived from the table of sampling parameters. A dialect only declares fields with another
name, type or default, by `parameter`. The table validates the values; the OpenAPI document has the same
texts, defaults and ranges, for the pages of the server and for clients. A field there has the keywords of
JSON schemas, and

- `default`: the value for a request without the field, unless the model has a default of its own,
- `x-section`: the heading of the parameter in docs/sampling.md,
- `x-common`: true if many requests have the field; pages show it first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model
from pydantic.json_schema import SkipJsonSchema

from genserve.errors import InvalidRequest
from genserve.sampling.param_table import SECTIONS, Param, Range
from genserve.sampling.plugin_call import PluginCall
from genserve.sampling.repetition_detection import RepetitionDetection
from genserve.sampling.sampling_params import PARAMETERS, REJECTED, SAMPLERS
from genserve.sampling.structured_outputs import StructuredOutputs, structured_outputs_of_format
from genserve.server.http.request_body import Body, Items


class PluginFields(Body):
    """A call of one of the model's plug-ins."""

    name: str = Field(description="Its name; `/v1/models` lists the plug-ins of each model.")
    args: dict[str, Any] = Field(default={}, description="Its arguments.")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _form(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, **schema}


# `sampling/structured_outputs.py` reads and validates it; the OpenAPI document has its fields.
FormFields: TypeAlias = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "description": "The form of the text: exactly one of the first six, and options of its JSON.",
            "properties": {
                "json": _form("A JSON schema, or its text.", type=["object", "string"]),
                "json_object": _form("Any JSON object.", type="boolean"),
                "regex": _form("The whole text matches.", type="string"),
                "choice": _form("The text is one of these.", type="array", items={"type": "string"}),
                "grammar": _form("In Lark's notation, or llama.cpp's GBNF.", type="string"),
                "structural_tag": _form("Between some tags, JSON.", type=["object", "string"]),
                "disable_any_whitespace": _form(
                    "A space after each colon and comma, no other whitespace.", type="boolean", default=True
                ),
                "disable_additional_properties": _form(
                    "No properties that a schema does not name, unless it has `additionalProperties`.",
                    type="boolean", default=True,
                ),
                "whitespace_pattern": _form("A regex of the whitespace that is allowed.", type="string"),
            },
            "additionalProperties": False,
        }
    ),
]
# One text stands for a list of it.
Texts: TypeAlias = Annotated[
    Items[str] | None, BeforeValidator(_listed, json_schema_input_type=str | list[str] | None)
]
# The keyword of a field that many requests have.
COMMON: dict[str, Any] = {"x-common": True}

_COUNT = {"type": "integer", "minimum": 1}
# `sampling/repetition_detection.py` reads and validates it.
_DetectionFields: TypeAlias = Annotated[
    dict[str, int],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "max_pattern_size": _form("Length of the longest pattern, in tokens.", **_COUNT),
                "min_pattern_size": _form("Length of the shortest pattern, in tokens.", **_COUNT, default=1),
                "min_count": _form("How often the pattern is there, in a row.", **_COUNT | {"minimum": 2}),
            },
            "required": ["max_pattern_size", "min_count"],
            "additionalProperties": False,
        }
    ),
]
_Bias: TypeAlias = Annotated[float, WithJsonSchema({"type": "number", "minimum": -100, "maximum": 100})]
_Sampler: TypeAlias = Annotated[str, WithJsonSchema({"type": "string", "enum": [*SAMPLERS]})]

# How JSON writes the types of parameters that have a reader of their own.
_OBJECTS: Mapping[Any, Any] = {
    StructuredOutputs: FormFields,
    RepetitionDetection: _DetectionFields,
    PluginCall: PluginFields,
}
# A link to another page.
_LINK = re.compile(r" \(\[[^]]+\]\([^)]+\)\)")
_OF_ROW: Any = object()     # means: the default of the parameter
_BOUNDS = ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"})


def _json_type(row: Param) -> Any:
    """Return the type of a field: that of the parameter as JSON has it, or None if it is not given."""
    if row.one_text:
        return Texts
    if row.name == "samplers":
        return Items[_Sampler] | None
    if row.item is not None:
        return Items[_OBJECTS.get(row.item, row.item)] | None  # type: ignore[misc]
    if get_origin(row.hint) is Mapping:
        return dict[str, _Bias] | None
    kinds = [kind for kind in get_args(row.hint) or (row.hint,) if kind is not NoneType]
    if get_origin(row.hint) is Literal:
        return row.hint | None
    if bool in kinds and len(kinds) > 1:
        return Literal[(True, False, *get_args(kinds[1]))] | None
    return _OBJECTS.get(kinds[0], kinds[0]) | None


def parameter(name: str, *, default: Any = _OF_ROW, bounds: Range | None = None, **options: Any) -> Any:
    """Return the field of a body for a sampling parameter, described by its row of the table.

    Args:
        name: the name of the parameter in `SamplingParams`; the field may have another one.
        default: the value for a request without the field, if it is not the parameter's default.
            It is only described: the field is then None.
        bounds: the numbers that the dialect takes, if they are others than the parameter's.
        options: arguments of pydantic's `Field`; a `description` replaces the row's.
    """
    row = PARAMETERS[name]
    default = row.default if default is _OF_ROW else default
    describe = partial(_describe, row=row, default=default, bounds=bounds or row.range)
    return Field(default=None, json_schema_extra=describe, **options)


def _describe(schema: dict[str, Any], *, row: Param, default: Any, bounds: Range | None) -> None:
    """Add the keywords of the table's row to the schema of a field."""
    schema.setdefault("description", _description(row))
    # An empty list would be rejected as a value of some parameters.
    schema["default"] = None if default in ((), {}) else [*default] if isinstance(default, tuple) else default
    schema["x-section"] = SECTIONS[row.section]
    if row.common:
        schema["x-common"] = True
    for case in schema.get("anyOf", [schema]):
        match case.get("type"):
            case "integer" | "number" if bounds is not None:
                # The bounds that pydantic checks by itself are there already.
                given = {name for pair in _BOUNDS if pair & case.keys() for name in pair}
                keywords = bounds.as_json_schema().items()
                case.update({name: value for name, value in keywords if name not in given})
            case "string" if row.max_chars and row.item is None:
                case.update(minLength=row.min_chars, maxLength=row.max_chars)
            case "array":
                _describe_list(case, row)
    if bounds is not None and bounds.extra is not None:
        schema["anyOf"].insert(0, {"const": bounds.extra})


def _describe_list(schema: dict[str, Any], row: Param) -> None:
    if row.max_items is not None:
        schema["maxItems"] = row.max_items
    if row.max_chars:
        schema["items"].update(minLength=1, maxLength=row.max_chars)
    if row.item is int:
        schema["items"]["minimum"] = 0


def _description(row: Param) -> str:
    """Return the effect of a parameter in sentences, with the numbers that have a meaning of their own."""
    effect = _LINK.sub("", row.doc)
    sentences = [effect[0].upper() + effect[1:]]
    if row.range is not None and row.range.low_means:
        sentences.append(f"{row.range.low}: {row.range.low_means}")
    if row.range is not None and row.range.extra is not None:
        sentences.append(f"{row.range.extra}: {row.range.extra_means}")
    if row.requires is not None:
        sentences.append(f"Needs `{row.requires}`")
    if row.unused_without:
        sentences.append(f"Has an effect only with {' or '.join(f'`{name}`' for name in row.unused_without)}")
    if row.generation_config is not None:
        sentences.append("A model may have another default, which `/v1/models` shows")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


if TYPE_CHECKING:

    class _TableFields(Body):
        """The fields that code reads by name."""

        skip_special_tokens: bool | None = None
        spaces_between_special_tokens: bool | None = None
        structured_outputs: dict[str, Any] | None = None
        truncate_prompt_tokens: int | None = None
        use_beam_search: bool | None = None

else:
    _TableFields = create_model(
        "_TableFields",
        __base__=Body,
        **{name: (_json_type(row), parameter(name)) for name, row in PARAMETERS.items() if not row.own_field},
        # Their rejection says why they are not supported.
        **dict.fromkeys(REJECTED, (SkipJsonSchema[Any], None)),
    )


class DecodingFields(_TableFields):
    """The fields with the names and meanings of `SamplingParams`, and one of llama.cpp; None: not given."""

    return_progress: bool | None = Field(
        default=None,
        description="In a stream, report how much of the prompt has been read, as `prompt_progress`.",
        json_schema_extra={"default": False},
    )

    def given(self) -> dict[str, Any]:
        """Return the parameters that the body has by their own names, for `sampling_params`."""
        names, defaults = _parameter_fields(type(self))
        values = self.model_dump(include={*(names & self.model_fields_set), *defaults})
        return {name: value for name, value in values.items() if value is not None}

    def form_or(self, own: Any, *, field: str) -> Any:
        """Return the form of the answer: that of the dialect's own field, if any, or `structured_outputs`.

        Raises:
            InvalidRequest: both are given; `field` is the dialect's name.
        """
        if own is not None and self.structured_outputs is not None:
            message = f"{field} and structured_outputs are both given"
            raise InvalidRequest(message, field=field, remedy="leave one out")
        return self.structured_outputs if own is None else own

    def format_or(self, own: Any, *, field: str) -> Any:
        """Return the form as `form_or` does, from a field like OpenAI's `response_format`.

        Raises:
            InvalidRequest: as `form_or`, or the field is malformed.
        """
        return self.form_or(structured_outputs_of_format(own, field=field), field=field)


@cache
def _parameter_fields(body: type[DecodingFields]) -> tuple[Set[str], Set[str]]:
    """Return the names of the fields that are parameters, and of those among them that have a default."""
    names = body.model_fields.keys() & {*PARAMETERS, *REJECTED}
    return names, {name for name in names if body.model_fields[name].get_default() is not None}
