"""Decoding fields: the sampling parameters in the bodies of all dialects, by vLLM's names.

The fields are derived from the table of sampling parameters. A dialect only declares those that have another
name, type or default in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model
from pydantic.json_schema import SkipJsonSchema

from genserve.errors import InvalidRequest
from genserve.sampling.param_table import Param
from genserve.sampling.plugin_call import PluginCall
from genserve.sampling.repetition_detection import RepetitionDetection
from genserve.sampling.sampling_params import PARAMETERS, REJECTED
from genserve.sampling.structured_outputs import StructuredOutputs, structured_outputs_of_format
from genserve.server.request_body import Body


class PluginFields(Body):
    """A call of one of the model's plug-ins."""

    name: str
    args: dict[str, Any] = Field(default={})


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
            "description": "The form that the text has: exactly one of these.",
            "properties": {
                "json": _form("A JSON schema, or its text.", type=["object", "string"]),
                "json_object": _form("Any JSON object.", type="boolean"),
                "regex": _form("The whole text matches.", type="string"),
                "choice": _form("The text is one of these.", type="array", items={"type": "string"}),
                "grammar": _form("In Lark's notation, or llama.cpp's GBNF.", type="string"),
                "structural_tag": _form("Between some tags, JSON.", type=["object", "string"]),
            },
            "additionalProperties": False,
        }
    ),
]
# One text stands for a list of it.
Texts: TypeAlias = Annotated[list[str] | None, BeforeValidator(_listed)]

# How JSON writes the types of parameters that have a reader of their own.
_OBJECTS: Mapping[Any, Any] = {
    StructuredOutputs: FormFields,
    RepetitionDetection: dict[str, int],
    PluginCall: PluginFields,
}


def _json_type(row: Param) -> Any:
    """Return the type of a field: that of the parameter as JSON has it, or None if it is not given."""
    if row.one_text:
        return Texts
    if row.item is not None:
        return list[_OBJECTS.get(row.item, row.item)] | None  # type: ignore[misc]
    if get_origin(row.hint) is Mapping:
        return dict[str, float] | None
    kinds = [kind for kind in get_args(row.hint) or (row.hint,) if kind is not NoneType]
    if get_origin(row.hint) is Literal:
        return row.hint | None
    if bool in kinds and len(kinds) > 1:
        return Literal[(True, False, *get_args(kinds[1]))] | None
    return _OBJECTS.get(kinds[0], kinds[0]) | None


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
        **{name: (_json_type(row), None) for name, row in PARAMETERS.items() if not row.own_field},
        # Their rejection says why they are not supported.
        **dict.fromkeys(REJECTED, (SkipJsonSchema[Any], None)),
    )


class DecodingFields(_TableFields):
    """The fields with the names and meanings of `SamplingParams`; None: not given."""

    def given(self) -> dict[str, Any]:
        """Return the parameters that the body has by their own names, for `sampling_params`."""
        values = self.model_dump(include=type(self).model_fields.keys() & {*PARAMETERS, *REJECTED})
        return {name: value for name, value in values.items() if value is not None}

    def form_or(self, own: Any, *, field: str) -> Any:
        """Return the form of the answer: `structured_outputs`, or that of the dialect's own field.

        Raises:
            InvalidRequest: both are given, or the dialect's is malformed; `field` is its name.
        """
        form = structured_outputs_of_format(own, field=field)
        if form is not None and self.structured_outputs is not None:
            message = f"{field} and structured_outputs are both given"
            raise InvalidRequest(message, field=field, remedy="leave one out")
        return self.structured_outputs if form is None else form
