"""Grammars that would block or crash a server."""

from __future__ import annotations

import json

import numpy as np
import pytest

from genserve.errors import InvalidRequest
from genserve.sampling.structured_outputs import StructuredOutputs, structured_outputs
from genserve.structured_output.grammar_compiler import GrammarCompiler
from genserve.structured_output.grammar_trial import compile_rejection
from genserve.structured_output.json_schema import guided_schema
from genserve.text.tokenizer import Tokenizer

ENDLESS = {"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}b"} for n in range(30)]}
DEEP_RULES = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(4000)) + '\nr4000: "c"'
DEEP_REFERENCES = {
    "$ref": "#/$defs/0",
    "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}, "type": "array"} for n in range(1000)},
}


def of_schema(schema) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def of_lark(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.fixture(scope="module")
def grammars(tiny_repository) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.from_folder(tiny_repository / "tiny_tokenizer" / "1"), vocab_size=320)


def test_a_grammar_that_compiles_is_not_rejected():
    assert compile_rejection(of_schema(nested(30))) == ""
    assert compile_rejection(of_lark('start: "a"')) == ""
    assert compile_rejection(of_lark('start: <[128010]> "a" <[128000-128009,3]>')) == ""


def test_the_reason_comes_from_the_compiler():
    assert "nobody" in compile_rejection(of_lark("start: nobody"))
    assert "recursion limit" in compile_rejection(of_schema(nested(200)))


OPTIONAL = {"type": "integer", "minimum": 3, "maximum": 1}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "type: Invalid type: objekt"),
        ({"properties": {"a": {"items": {"type": "text"}}}}, "properties.a.items.type: Invalid type: text"),
        ({"properties": {"a b": {"anyOf": [{}, {"not": {}}]}}}, 'properties["a b"].anyOf[1].not: Unimple'),
        ({"items": {"$ref": "#/$defs/b"}, "$defs": {"b": {"type": "text"}}}, "$defs.b.type: Invalid type"),
        ({"properties": {"a": {"$ref": "#/a"}}}, "properties.a.$ref: Pointer '/a' does not exist"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength: Unsatisfiable schema: minLength ("),
        (
            {"properties": {"a": OPTIONAL, "b": {"minLength": "1"}}, "required": ["b"]},
            "properties.b.minLength: Expected positive integer",
        ),
        (
            {"type": "object", "properties": {"a": {"enum": []}, "b": OPTIONAL}, "required": ["b"]},
            "properties.b.minimum: Unsatisfiable schema: minimum (3) is greater than maximum (1)",
        ),
    ],
)
def test_the_reason_names_the_place_in_the_schema(schema, reason):
    assert compile_rejection(of_schema(guided_schema(schema))).startswith(reason)


@pytest.mark.parametrize(
    "schema",
    [ENDLESS, pytest.param({"type": "integer", "multipleOf": 99999989}, marks=pytest.mark.extended)],
)
def test_a_schema_that_never_compiles_is_rejected_in_bounded_time(schema):
    assert "more than 1 s" in compile_rejection(of_schema(schema), max_cpu_s=1)


@pytest.mark.parametrize(
    "grammar",
    [of_lark(DEEP_RULES), of_schema(DEEP_REFERENCES | {"$defs": DEEP_REFERENCES["$defs"] | {"1000": {}}})],
    ids=["rules", "references"],
)
def test_a_grammar_that_exhausts_the_stack_ends_only_the_trial(grammar):
    assert "nests too deeply" in compile_rejection(grammar)


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "(" * 20000 + "a" + ")" * 20000},
        {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
        {"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000},
    ],
    ids=["regex", "lark", "gbnf"],
)
def test_a_grammar_that_is_too_large_for_the_parser_is_rejected(grammars, options):
    form = structured_outputs(options)
    assert form is not None
    with pytest.raises(InvalidRequest, match="cannot be used"):
        grammars.compile(form)


def test_a_regex_with_too_many_states_fails_when_it_exceeds_the_limit(grammars):
    grammar = grammars.compile(StructuredOutputs(kind="regex", text="(a?){1000}{1000}"))
    mask = np.empty(10, dtype=np.int32)
    for _ in range(2000):
        grammar.fill(mask)
        if not mask.any():
            break
        assert grammar.accept(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1]))
    assert "too many" in grammar.failure
