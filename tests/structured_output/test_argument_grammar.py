"""Grammars of arguments that are not JSON: what they allow is what the parser reads as valid."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken

from genserve.completion import joined_calls
from genserve.prompt import Tool
from genserve.structured_output.closing_grammar import CallEnds, ClosingGrammar
from genserve.structured_output.grammar_compiler import GrammarCompiler
from genserve.structured_output.tool_grammar import ToolGrammar
from genserve.text.argument_syntax import TaggedArguments
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import TOOL_FORMATS
from tests.structured_output.test_tool_grammar import VOCAB_SIZE, accepts, allowed, may_end
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_tokenizer
from tests.text.vocabularies import tokenizer_of

TAGGED = [name for name, each in TOOL_FORMATS.items() if isinstance(each.arguments, TaggedArguments)]
QWEN = "qwen3_coder"
ROOM = 600
BAR = "\uff5c"
# The marks that are tokens in the vocabularies of these models.
MARKS = {
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseek_v32": (f"{BAR}DSML{BAR}",),
}
TOOL = Tool(
    name="edit",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": "^[a-z]{1,6}/$"},
            "text": {"type": "string"},
            "mode": {"enum": ["r", "w"]},
            "short": {"type": "string", "enum": ["abc", "ab"]},
            "has": {"type": "string", "pattern": "a|b"},
            "at": {"$ref": "#/$defs/at"},
            "level": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, {"enum": ["low", "high"]}]},
            "maybe": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
            "force": {"type": "boolean"},
        },
        "required": ["path", "mode", "level", "at"],
        "$defs": {
            "at": {"type": "object", "properties": {"line": {"type": "integer", "maximum": 9}}},
            "tag": {"enum": ["x", "y"]},
        },
    },
)
CHOICES = Tool(
    name="choose",
    parameters={
        "oneOf": [
            {"properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]},
            {"properties": {"b": {"const": "yes"}}, "required": ["b"]},
        ],
    },
)
FURTHER = Tool(
    name="record",
    parameters={"properties": {"id": {"type": "boolean"}}, "additionalProperties": {"type": "integer"}},
)
TOOLS = (TOOL, CHOICES, FURTHER)


def vocabulary(form: str, *, with_tokens: bool) -> Tokenizer:
    backend = tiny_tokenizer(vocab_size=320)
    if with_tokens:
        backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS[form]])
    tokenizer = tokenizer_of(backend)
    tokenizer.eos_token_ids = frozenset({2})
    return tokenizer


def tool_grammar(form: str, *tools: Tool) -> ToolGrammar:
    return ToolGrammar(
        tool_format=TOOL_FORMATS[form],
        tools=dict(enumerate(tools)),
        must_call=True,
        parallel=True,
        after_reasoning=False,
    )


def read(form: str, text: str) -> list[tuple[str, str]]:
    parser = ToolCallParser(TOOL_FORMATS[form], tools={tool.name: tool for tool in TOOLS})
    delta = parser.push(text, last=True)
    assert delta.content == ""
    return [(call.name, call.arguments) for call in joined_calls(delta.tool_calls)]


@pytest.mark.parametrize("with_tokens", [pytest.param(False, marks=pytest.mark.extended), True])
@pytest.mark.parametrize("form", with_extended(TAGGED, always=("qwen3_coder", "deepseek_v32")))
def test_random_arguments_validate(form, with_tokens):
    tokenizer = vocabulary(form, with_tokens=with_tokens)
    grammars = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)
    ends = CallEnds.of(tokenizer, TOOL_FORMATS[form])
    validators = {tool.name: Draft202012Validator(tool.parameters) for tool in TOOLS}
    compiled = tool_grammar(form, *TOOLS)
    for seed in range(4):
        draw, ids = random.Random(seed), list[int]()
        inner = grammars.compile_tools(compiled, text=None)
        grammar = ClosingGrammar(inner, grammars.json_tokens, room=ROOM, ends=ends)
        while not grammar.complete and not (ids and ids[-1] in tokenizer.eos_token_ids):
            ids.append(draw.choice(allowed(grammar).tolist()))
            assert grammar.accept(ids[-1])
            assert len(ids) <= ROOM
        calls = read(form, tokenizer.decode(ids))
        assert calls
        for name, arguments in calls:
            validators[name].validate(json.loads(arguments))


EDIT = {"path": "ab/", "mode": "r", "level": 4, "at": {}}
# Arguments of `edit` beyond these that the grammar must allow, or must not.
GOOD = (
    {"text": "</parameter", "short": "abc"},
    {"text": 'a\n"b" {c}\n\n', "has": "xxb"},
    {"level": "high", "maybe": None},
    {"maybe": "null!", "tags": ["x", "y"], "force": True},
    {"at": {"line": 7}},
)
BAD = (
    {"path": "ab"},
    {"path": "AB/"},
    {"mode": "x"},
    {"short": "a"},
    {"short": "abcde"},
    {"has": "xyz"},
    {"level": 7},
    {"level": "middle"},
    {"tags": ["z"]},
    {"force": "yes"},
    {"at": {"line": 70}},
    {"other": 1},
)


@pytest.mark.parametrize("form", with_extended(TAGGED, always=("qwen3_coder", "deepseek_v32")))
def test_arguments_are_held_by_the_schema(form):
    tokenizer = vocabulary(form, with_tokens=True)
    grammars = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)
    wanted = tool_grammar(form, TOOL)

    def allows(arguments: dict) -> bool:
        grammar = grammars.compile_tools(wanted, text=None)
        names = (*TOOL.parameters["properties"], "other")
        ordered = {name: arguments[name] for name in names if name in arguments}
        text = TOOL_FORMATS[form].written([("edit", json.dumps(ordered))])
        return accepts(grammar, tokenizer, text) and may_end(grammar, tokenizer)

    assert allows(EDIT)
    for changes in GOOD:
        assert allows({**EDIT, **changes}), changes
    for changes in BAD:
        assert not allows({**EDIT, **changes}), changes
    for missing in EDIT:
        assert not allows({key: value for key, value in EDIT.items() if key != missing})


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("form", TAGGED)
def test_a_string_cannot_contain_the_mark_that_ends_it(form, with_tokens):
    tokenizer = vocabulary(form, with_tokens=with_tokens)
    grammars = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)
    wanted = tool_grammar(form, Tool(name="f", parameters={"properties": {"x": {"type": "string"}}}))
    end = TOOL_FORMATS[form].arguments.text_end.strip()
    text = TOOL_FORMATS[form].written([("f", json.dumps({"x": f"a{end}b"}))])
    grammar = grammars.compile_tools(wanted, text=None)
    assert not accepts(grammar, tokenizer, text)


@pytest.mark.parametrize("form", ["qwen3_coder", "gemma4"])
@pytest.mark.parametrize("malformed", [{"required": [["a"], 1, "a"]}, {"properties": [], "required": ["a"]}])
def test_malformed_members_are_left_out(form, malformed):
    tokenizer = vocabulary(form, with_tokens=False)
    compiled = tool_grammar(form, Tool(name="f", parameters=malformed))
    grammar = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE).compile_tools(compiled, text=None)
    assert accepts(grammar, tokenizer, TOOL_FORMATS[form].written([("f", '{"a": "x"}')]))


def test_a_choice_of_shapes_and_further_parameters():
    tokenizer = vocabulary(QWEN, with_tokens=True)
    grammars = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)
    wanted = tool_grammar(QWEN, *TOOLS)
    for name, arguments, is_allowed in (
        ("choose", {"a": 1}, True),
        ("choose", {"b": "yes"}, True),
        ("choose", {}, False),
        ("choose", {"b": "no"}, False),
        ("record", {}, True),
        ("record", {"id": True, "x": 1, "y_2": 22}, True),
        ("record", {"x": 1, "id": True}, False),
        ("record", {"x": "a"}, False),
    ):
        grammar = grammars.compile_tools(wanted, text=None)
        text = TOOL_FORMATS[QWEN].written([(name, json.dumps(arguments))])
        assert accepts(grammar, tokenizer, text) is is_allowed, (name, arguments)


@pytest.mark.parametrize("most", [50, 5_000, 10_000_000])
def test_a_great_length_of_a_string_is_not_held(most):
    tokenizer = vocabulary(QWEN, with_tokens=True)
    grammars = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)
    tool = Tool(name="f", parameters={"properties": {"x": {"type": "string", "maxLength": most}}})
    text = TOOL_FORMATS[QWEN].written([("f", json.dumps({"x": "a" * 60}))])
    assert accepts(grammars.compile_tools(tool_grammar(QWEN, tool), text=None), tokenizer, text)
