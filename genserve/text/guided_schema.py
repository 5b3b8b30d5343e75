"""Guided schema: a JSON schema as llguidance gets it, with the form of JSON that a request asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from genserve.sampling.structured_outputs import COMPACT, JsonForm
from genserve.text.closed_schema import closed_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Even where whitespace is free it is bounded, because small models tend to repeat it forever.
_LOOSE_WHITESPACE = r"[ \t\n\r]{1,32}"
# Look-around and back references, which no automaton can follow.
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")


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
