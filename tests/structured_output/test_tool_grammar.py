"""Grammars of answers with tool calls, over a tokenizer of 320 tokens."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken

from genserve.completion import joined_calls
from genserve.errors import InvalidRequest
from genserve.prompt import TextFormat, Tool, may_be_object
from genserve.sampling.structured_outputs import structured_outputs
from genserve.structured_output.closing_grammar import CallEnds, ClosingGrammar
from genserve.structured_output.grammar_compiler import GrammarCompiler
from genserve.structured_output.tool_grammar import ToolGrammar
from genserve.text.reasoning import ReasoningGrammar
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import TOOL_FORMATS
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_tokenizer
from tests.support.tool_forms import FORMS
from tests.text.vocabularies import tokenizer_of

VOCAB_SIZE = 333  # padded, as in models
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
TOOLS = (
    Tool(
        name="find",
        parameters={
            "type": "object",
            "properties": {
                "text": {"type": "string", "maxLength": 5},
                "kind": {"enum": ["a", "b"]},
                "at": {"$ref": "#/$defs/point"},
                "numbers": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 3, "maximum": 7},
                    "maxItems": 2,
                },
            },
            "required": ["kind", "at"],
            "$defs": {"point": POINT},
        },
    ),
    Tool(name="now"),
)


@pytest.fixture(scope="module")
def tokenizer(tiny_repository) -> Tokenizer:
    return Tokenizer.from_folder(tiny_repository / "tiny_tokenizer" / "1")


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)


def tool_grammar(form: str = "hermes", **changes) -> ToolGrammar:
    grammar = ToolGrammar(
        tool_format=TOOL_FORMATS[form],
        tools=dict(enumerate(TOOLS)),
        must_call=True,
        parallel=True,
        after_reasoning=False,
    )
    return replace(grammar, **changes)


def allowed(grammar) -> np.ndarray:
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE])


def accepts(grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text is a beginning of an answer."""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in allowed(grammar):
            return False
        grammar.accept(token_id)
    return True


def may_end(grammar, tokenizer: Tokenizer) -> bool:
    return grammar.complete or not tokenizer.eos_token_ids.isdisjoint(allowed(grammar).tolist())


@pytest.mark.parametrize("form", FORMS)
def test_random_answers_are_calls_that_validate(grammars, tokenizer, form):
    draw = random.Random(7)
    for _ in range(4):
        inner, ids = grammars.compile_tools(tool_grammar(form), text=None), []
        ends = CallEnds.of(tokenizer, TOOL_FORMATS[form])  # random text need not end by itself
        grammar = ClosingGrammar(inner, grammars.json_tokens, room=3000, ends=ends)
        while not grammar.complete and not (ids and ids[-1] in tokenizer.eos_token_ids):
            ids.append(draw.choice(allowed(grammar).tolist()))
            assert grammar.accept(ids[-1])
            assert len(ids) <= 3000
        parser = ToolCallParser(TOOL_FORMATS[form], tools={tool.name: tool for tool in TOOLS})
        read = parser.push(tokenizer.decode(ids), last=True)
        calls = joined_calls(read.tool_calls)
        assert calls
        assert read.content == ""
        for call in calls:
            [tool] = [tool for tool in TOOLS if tool.name == call.name]
            schema = {"type": "object", "additionalProperties": False, **tool.parameters}
            arguments = json.loads(call.arguments)
            if TOOL_FORMATS[form].arguments.text_end and "text" in arguments:
                arguments["text"] = arguments["text"][:5]  # the length of free text is not held
            Draft202012Validator(schema).validate(arguments)


INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
LETTERS = r'[a-c\n"\\é]{1,9}[^a-z\n]'
# Some texts, by their grammars: without recursion, and with it.
LINES = 'start: line+\nline: "+" /[ab"\\\\]{0,3}/ LF\n%import common.LF'
NESTED = 'start: "(" start ")" | "[\\n" start? "]" | "\\"\\\\"'
HELD = {
    "letters": (TextFormat(syntax="regex", definition=LETTERS), re.compile(LETTERS)),
    "lines": (TextFormat(syntax="lark", definition=LINES), re.compile(r'(\+[ab"\\]{0,3}\n)+')),
    "nested": (TextFormat(syntax="lark", definition=NESTED), re.compile(r'[(\[\n]*("\\)?[\])]*')),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", with_extended(HELD, always=list(HELD)[:2]))
def test_the_text_of_a_custom_tool_follows_its_grammar(grammars, tokenizer, form, name):
    draw = random.Random(3)
    held, pattern = HELD[name]
    tools = {0: TOOLS[1], 1: Tool(name=name, parameters=INPUT, input_format=held)}
    wanted = tool_grammar(form, tools=tools, parallel=False)
    read = set()
    for _ in range(12):
        grammar, ids = grammars.compile_tools(wanted, text=None), []
        while not grammar.complete and not (ids and ids[-1] in tokenizer.eos_token_ids):
            ids.append(draw.choice(allowed(grammar).tolist()))
            assert grammar.accept(ids[-1])
            assert len(ids) < 2000
        parser = ToolCallParser(TOOL_FORMATS[form], tools={tool.name: tool for tool in tools.values()})
        [call] = joined_calls(parser.push(tokenizer.decode(ids), last=True).tool_calls)
        if call.name == name:
            [text] = json.loads(call.arguments).values()
            assert pattern.fullmatch(text), text
            read.add(text)
    assert read


def test_the_text_of_a_custom_tool_may_have_any_escapes(grammars, tokenizer):
    tool = Tool(name="paste", parameters=INPUT, input_format=HELD["letters"][0])
    wanted = tool_grammar(tools={0: tool})
    for written, fits in ((r"a\u0062\nb\/", True), (r"\u000a\u00e9\"A", True), (r"\u0064", False)):
        answer = TOOL_FORMATS["hermes"].written([("paste", f'{{"input": "{written}"}}')])
        assert accepts(grammars.compile_tools(wanted, text=None), tokenizer, answer) is fits


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (TextFormat(syntax="lark", definition="start: other"), "other"),
        (TextFormat(syntax="lark", definition='start: %json {"type": "object"}'), "%json"),
        (TextFormat(syntax="regex", definition="(a"), "unclosed"),
        (TextFormat(syntax="regex", definition="[" * 2000 + "]" * 2000), "nested too deeply"),
        (TextFormat(syntax="lark", definition="start: " + "~(" * 2000 + ")" * 2000), "nested too deeply"),
        (TextFormat(syntax="regex", definition=r"a\b"), "b"),
    ],
)
def test_a_form_that_does_not_compile_is_blamed_on_its_tool(grammars, form, reason):
    bad = Tool(name="bad", parameters=INPUT, input_format=form)
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        grammars.compile_tools(tool_grammar(tools={0: TOOLS[0], 3: bad}), text=None)
    assert caught.value.field == "tools[3].custom.format.grammar.definition"


@pytest.mark.parametrize("form", FORMS)
def test_text_is_free_until_a_call_begins(grammars, tokenizer, form):
    shape = TOOL_FORMATS[form]
    auto = tool_grammar(form, must_call=False)
    calls = [("now", "{}")]
    for text in ("", 'Two\n\nlines, {"name": "x"} <tool', '{"name": "', "Hi. " + shape.written(calls)):
        grammar = grammars.compile_tools(auto, text=None)
        assert accepts(grammar, tokenizer, text)
        assert may_end(grammar, tokenizer)
    for begun in (shape.written([("later", "{}")]), shape.written([("now", '{"x": 1}')])):
        assert not accepts(grammars.compile_tools(auto, text=None), tokenizer, begun)


@pytest.mark.parametrize("must_call", [False, True])
def test_a_mark_may_be_a_token_that_is_not_special_as_qwens(must_call):
    backend = tiny_tokenizer(vocab_size=320)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer = tokenizer_of(backend)
    tokenizer.eos_token_ids = frozenset({2})
    grammars = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)
    wanted = tool_grammar(must_call=must_call)
    calls = TOOL_FORMATS["hermes"].written([("now", "{}"), ("now", "{}")])
    assert [i for i in tokenizer.encode(calls) if i >= 320] == [320, 321, 320, 321]
    assert accepts(grammars.compile_tools(wanted, text=None), tokenizer, calls)
    wrong = TOOL_FORMATS["hermes"].written([("now", '{"x": 1}')])
    assert not accepts(grammars.compile_tools(wanted, text=None), tokenizer, wrong)
    spelled = grammars.compile_tools(wanted, text=None)
    assert accepts(spelled, tokenizer, "<tool_") is not must_call
    assert not accepts(spelled, tokenizer, "call>")


@pytest.mark.parametrize(
    "form", [form for form in FORMS if TOOL_FORMATS[str(form.values[0])].separator is not None]
)
def test_several_calls_need_parallel_tool_calls(grammars, tokenizer, form):
    text = TOOL_FORMATS[form].written([("now", "{}"), ("now", "{}")])
    assert accepts(grammars.compile_tools(tool_grammar(form), text=None), tokenizer, text)
    single = grammars.compile_tools(tool_grammar(form, parallel=False), text=None)
    assert not accepts(single, tokenizer, text)


def test_text_without_callable_tools_has_no_call(grammars, tokenizer):
    silent = tool_grammar(tools={}, must_call=False)
    assert accepts(grammars.compile_tools(silent, text=None), tokenizer, "Use a <tool>.")
    assert not accepts(grammars.compile_tools(silent, text=None), tokenizer, "Use a <tool_call>")


def test_an_answer_has_the_required_form_or_calls(grammars, tokenizer):
    form = structured_outputs({"json": {"type": "array", "items": {"type": "integer"}}})
    auto = tool_grammar(must_call=False)
    for text in ("[1, 2]", TOOL_FORMATS["hermes"].written([("now", "{}")])):
        grammar = grammars.compile_tools(auto, text=form)
        assert accepts(grammar, tokenizer, text)
        assert may_end(grammar, tokenizer)
    assert not accepts(grammars.compile_tools(auto, text=form), tokenizer, "Hi")


def test_reasoning_precedes_calls(grammars, tokenizer):
    call = TOOL_FORMATS["hermes"].written([("now", "{}")])
    after = grammars.compile_tools(tool_grammar(after_reasoning=True), text=None)
    start_id, end_id = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("(", ")"))
    grammar = ReasoningGrammar(
        after, start_id=start_id, end_id=end_id, ending_ids=tokenizer.eos_token_ids, begun=False
    )
    assert start_id in allowed(grammar)
    assert accepts(grammar, tokenizer, "(Do I call <tool_call>?")
    assert not may_end(grammar, tokenizer)
    assert accepts(grammar, tokenizer, ")\n\n")
    assert not may_end(grammar, tokenizer)
    assert accepts(grammar, tokenizer, call)
    assert may_end(grammar, tokenizer)


@pytest.mark.parametrize(("must_call", "expected"), [(False, True), (True, False)])
def test_reasoning_may_end_the_answer_unless_a_call_must_follow(grammars, tokenizer, must_call, expected):
    after = grammars.compile_tools(tool_grammar(must_call=must_call, after_reasoning=True), text=None)
    start_id, end_id = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("(", ")"))
    grammar = ReasoningGrammar(
        after, start_id=start_id, end_id=end_id, ending_ids=tokenizer.eos_token_ids, begun=False
    )
    accepts(grammar, tokenizer, "(hmm")
    assert may_end(grammar, tokenizer) == expected
    if expected:
        assert grammar.accept(min(tokenizer.eos_token_ids))


def test_the_tool_whose_schema_is_not_supported_is_named(grammars):
    bad = Tool(name="bad", parameters={"properties": {"x": {"type": "text"}}})
    grammar = tool_grammar(tools={0: TOOLS[0], 2: TOOLS[1], 5: bad, 6: TOOLS[1]})
    with pytest.raises(InvalidRequest, match="text") as raised:
        grammars.compile_tools(grammar, text=None)
    assert raised.value.field == "tools[5].function.parameters"
    place = "tools[5].function.parameters cannot be used: properties.x.type: Invalid type: text"
    assert raised.value.message == place


NULLS = {
    "type": ["object", "null"],
    "properties": {
        "a": {"type": "string", "const": None, **dict.fromkeys(("enum", "pattern", "minLength", "format"))},
        "b": {"type": "array", "items": None, "maxItems": 2},
        "c": {"const": None},
        "required": {"anyOf": None, "$ref": None, "type": "integer"},
        "d": None,
    },
    "required": None,
    "additionalProperties": None,
    "$defs": None,
}


def test_a_keyword_of_a_tool_that_is_null_is_none(grammars, tokenizer):
    for parameters in (NULLS, {"type": ["object"]}, {"type": None, "properties": None}):
        tool = Tool(name="f", parameters=parameters)
        assert may_be_object(tool.parameters)
        grammar = grammars.compile_tools(tool_grammar(tools={0: tool}), text=None)
        arguments = "{}"
        if parameters is NULLS:
            arguments = '{"a": "x", "b": [1, 2], "c": null, "required": 1, "d": 1}'
        assert accepts(grammar, tokenizer, TOOL_FORMATS["hermes"].written([("f", arguments)]))
    grammar = grammars.compile_tools(tool_grammar(tools={0: Tool(name="f", parameters=NULLS)}), text=None)
    assert not accepts(grammar, tokenizer, TOOL_FORMATS["hermes"].written([("f", "null")])), "no object"


def test_unsupported_keywords_of_a_tool_are_ignored(grammars, tokenizer):
    properties = {
        "mail": {"type": "string", "pattern": r"^(?!\.)[a-z]+$", "maxLength": 3},  # as zod 4 writes them
        "counts": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "names": {"type": "array", "items": {"type": "string", "format": "name"}, "uniqueItems": True},
    }
    tools = {0: Tool(name="f", parameters={"type": "object", "properties": properties, "required": ["mail"]})}
    grammar = grammars.compile_tools(tool_grammar(tools=tools), text=None)
    arguments = '{"mail": "a.b", "counts": {"a": 1}, "names": ["a", "a"]}'
    assert accepts(grammar, tokenizer, TOOL_FORMATS["hermes"].written([("f", arguments)]))
    grammar = grammars.compile_tools(tool_grammar(tools=tools), text=None)
    too_long = '{"mail": "a.bc"}'
    assert not accepts(grammar, tokenizer, TOOL_FORMATS["hermes"].written([("f", too_long)]))
