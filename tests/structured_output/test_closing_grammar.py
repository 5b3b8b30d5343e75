"""Answers that come to their end before their room is used up, over a tokenizer of 320 tokens."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from genserve.completion import joined_calls
from genserve.prompt import Tool
from genserve.structured_output.closing_grammar import LAST_SPARE, CallEnds, ClosingGrammar, JsonTokens
from genserve.structured_output.grammar_compiler import GrammarCompiler
from genserve.text.reasoning import ReasoningGrammar
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import TOOL_FORMATS
from tests.structured_output.test_tool_grammar import VOCAB_SIZE, allowed, tool_grammar

# Random answers to it never end by themselves.
ENDLESS = Tool(
    name="write",
    parameters={
        "properties": {
            "title": {"type": "string", "minLength": 3},
            "parts": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"text": {"type": "string"}, "size": {"type": "integer", "minimum": 10}},
                    "required": ["text", "size"],
                },
                "minItems": 1,
            },
        },
        "required": ["parts", "title"],
    },
)


@pytest.fixture(scope="module")
def tokenizer(tiny_repository) -> Tokenizer:
    return Tokenizer.from_folder(tiny_repository / "tiny_tokenizer" / "1")


@pytest.fixture(scope="module")
def grammars(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE)


def written(grammar, tokenizer, *, room: int, seed: int) -> list[int]:
    """A random answer of `room` tokens at most."""
    draw, ids = random.Random(seed), list[int]()
    while len(ids) < room and not grammar.complete and not (ids and ids[-1] in tokenizer.eos_token_ids):
        ids.append(draw.choice(allowed(grammar).tolist()))
        assert grammar.accept(ids[-1])
    return ids


@pytest.mark.parametrize(
    ("room", "form"),
    [
        (150, "hermes"),
        (150, "qwen3_coder"),
        pytest.param(150, "mistral_args", marks=pytest.mark.extended),
        pytest.param(400, "hermes", marks=pytest.mark.extended),
        (400, "mistral_args"),
        pytest.param(400, "qwen3_coder", marks=pytest.mark.extended),
    ],
)
def test_endless_calls_are_complete_within_their_room(grammars, tokenizer, form, room):
    num_cut = 0
    for seed in range(6):
        inner = grammars.compile_tools(tool_grammar(form, tools={0: ENDLESS}), text=None)
        ends = CallEnds.of(tokenizer, TOOL_FORMATS[form])
        grammar = ClosingGrammar(inner, grammars.json_tokens, room=room, ends=ends)
        ids = written(grammar, tokenizer, room=room, seed=seed)
        num_cut += grammar.cut
        assert not grammar.cut or room - len(ids) <= 2 * LAST_SPARE
        parser = ToolCallParser(TOOL_FORMATS[form], tools={"write": ENDLESS})
        for call in joined_calls(parser.push(tokenizer.decode(ids), last=True).tool_calls):
            arguments = json.loads(call.arguments)
            assert len(arguments["title"]) >= 3
            assert all(part["size"] >= 10 for part in arguments["parts"])
    assert num_cut >= 3


def test_an_answer_with_room_is_not_changed(grammars, tokenizer):
    short = tool_grammar(tools={0: Tool(name="now")})
    plain = grammars.compile_tools(short, text=None)
    held = ClosingGrammar(grammars.compile_tools(short, text=None), grammars.json_tokens, room=10_000)
    for _ in range(20):
        assert np.array_equal(allowed(plain), allowed(held))
        token_id = int(allowed(plain)[0])
        assert plain.accept(token_id) == held.accept(token_id) is True
    assert not held.cut


def test_room_for_no_call_at_all_changes_nothing(grammars, tokenizer):
    inner = grammars.compile_tools(tool_grammar(tools={0: ENDLESS}), text=None)
    grammar = ClosingGrammar(inner, grammars.json_tokens, room=20)
    assert len(written(grammar, tokenizer, room=20, seed=1)) == 20
    assert not grammar.complete
    assert not grammar.cut


def test_reasoning_is_not_closed_but_the_call_after_it(grammars, tokenizer):
    start_id, end_id = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "()")
    inner = ReasoningGrammar(
        grammars.compile_tools(tool_grammar(tools={0: ENDLESS}, after_reasoning=True), text=None),
        start_id=start_id,
        end_id=end_id,
        ending_ids=tokenizer.eos_token_ids,
        begun=True,
    )
    grammar = ClosingGrammar(inner, grammars.json_tokens, room=300)
    thought = tokenizer.encode("a" * 100 + ")", add_special_tokens=False)
    for token_id in thought:
        assert token_id in allowed(grammar)
        assert grammar.accept(token_id)
    ids = written(grammar, tokenizer, room=300 - len(thought), seed=5)
    assert grammar.complete
    assert grammar.cut
    assert len(ids) + len(thought) <= 300


def test_free_text_is_left_alone(grammars, tokenizer):
    inner = grammars.compile_tools(tool_grammar(must_call=False), text=None)
    grammar = ClosingGrammar(inner, grammars.json_tokens, room=40)
    text = tokenizer.encode("It is fine, and goes on.", add_special_tokens=False)[:40]
    for token_id in text:
        assert token_id in allowed(grammar)
        grammar.accept(token_id)
    assert not grammar.cut


def test_a_vocabulary_without_the_signs_of_json_has_no_such_tokens(tokenizer):
    assert JsonTokens.of(tokenizer, vocab_size=20) is None
    assert JsonTokens.of(tokenizer, vocab_size=VOCAB_SIZE) is not None
