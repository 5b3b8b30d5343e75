"""Guided schema: a JSON schema as llguidance gets it, with the form of JSON that a request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from genserve.sampling.structured_outputs import COMPACT, JsonForm
from genserve.text.closed_schema import closed_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Even where whitespace is free it is bounded, because small models tend to repeat it forever.
_LOOSE_WHITESPACE = r"[ \t\n\r]{1,32}"


def guided_schema(schema: Mapping[str, Any], form: JsonForm = COMPACT) -> dict[str, Any]:
    """Return a schema for `LLMatcher.grammar_from_json_schema`, `StructTag` or `%json` in a Lark grammar.

    Raises:
        RecursionError: it is nested too deeply.
    """
    closed = closed_schema(schema) if form.disable_additional_properties else schema
    return {**closed, "x-guidance": _options(form)}


def _options(form: JsonForm) -> JsonCompileOptions:
    # Unsupported parts of a schema are rejected, even if it asks for leniency.
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
