"""Grammars of answers with tool calls, over a tokenizer of 320 tokens."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken

from genserve.completion import joined_calls
from genserve.errors import InvalidRequest
from genserve.prompt import Tool
from genserve.sampling.structured_outputs import structured_outputs
from genserve.text.grammar_compiler import GrammarCompiler
from genserve.text.reasoning import ReasoningGrammar
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import TOOL_FORMATS
from genserve.text.tool_grammar import ToolGrammar
from tests.support.tiny_llama import tiny_tokenizer
from tests.text.vocabularies import tokenizer_of

VOCAB_SIZE = 333     # padded, as in models
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


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_random_answers_are_calls_that_validate(grammars, tokenizer, form):
    draw = random.Random(7)
    for _ in range(4):
        grammar, ids = grammars.compile_tools(tool_grammar(form), text=None), []
        while not grammar.complete and not (ids and ids[-1] in tokenizer.eos_token_ids):
            ids.append(draw.choice(allowed(grammar).tolist()))
            assert grammar.accept(ids[-1])
            assert len(ids) < 3000
        parser = ToolCallParser(TOOL_FORMATS[form], names={"find", "now"})
        read = parser.push(tokenizer.decode(ids), last=True)
        calls = joined_calls(read.tool_calls)
        assert calls
        assert read.content == ""
        for call in calls:
            [tool] = [tool for tool in TOOLS if tool.name == call.name]
            schema = {"type": "object", "additionalProperties": False, **tool.parameters}
            Draft202012Validator(schema).validate(json.loads(call.arguments))


@pytest.mark.parametrize("form", TOOL_FORMATS)
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


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral_args", "smollm2"])
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


def test_the_tool_whose_schema_is_not_supported_is_named(grammars):
    bad = Tool(name="bad", parameters={"properties": {"x": {"type": "text"}}})
    grammar = tool_grammar(tools={0: TOOLS[0], 2: TOOLS[1], 5: bad, 6: TOOLS[1]})
    with pytest.raises(InvalidRequest, match="text") as raised:
        grammars.compile_tools(grammar, text=None)
    assert raised.value.field == "tools[5].function.parameters"


def test_unsupported_keywords_of_a_tool_are_ignored(grammars, tokenizer):
    properties = {
        "mail": {"type": "string", "pattern": r"^(?!\.)[a-z]+$", "maxLength": 3},      # as zod 4 writes them
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
