"""Grammars of gpt-oss' answers, over a tokenizer with the marks of messages."""

from __future__ import annotations

import json

import numpy as np
import pytest

from genserve.engine.generation_request import GenerationRequest
from genserve.prompt import Chat, Message
from genserve.sampling.grammar_bitmask import is_allowed
from genserve.sampling.sampling_params import sampling_params
from tests.support.model_families import FAMILIES, TOOLS, VOCAB_SIZE, FamilyModel

THOUGHT = "<|channel|>analysis<|message|>so"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.say <|constrain|>json<|message|>{"text": "a"}'


@pytest.fixture(scope="module")
def model():
    [family] = (family for family in FAMILIES if family.name == "gpt_oss")
    model = FamilyModel(family, None, special=True)
    yield model
    model.tokenizer.close()


def accepted(model: FamilyModel, text: str, **params) -> tuple[bool, bool]:
    """Whether the text begins an answer, and whether the answer may end with it."""
    chat = {key: params.pop(key) for key in ("tools", "tool_choice") if key in params}
    request = GenerationRequest(
        prompt=Chat(messages=(Message(role="user", content="?"),), **chat),
        prompt_token_ids=(1,),
        params=sampling_params(params),
        seeds=(0,),
    )
    [sequence] = model.builder.sequences(request)
    grammar = sequence.sampling.grammar
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    for token_id in model.tokenizer.encode(text, add_special_tokens=False):
        grammar.fill(mask)
        if not is_allowed(mask, token_id):
            return False, False
        grammar.accept(token_id)
    grammar.fill(mask)
    ends = any(is_allowed(mask, token_id) for token_id in model.tokenizer.eos_token_ids)
    return True, grammar.complete or ends


@pytest.mark.parametrize(
    ("text", "auto", "required", "form"),
    [
        (FINAL + "Paris", (True, True), (False, False), (False, False)),
        (FINAL + '{"a": 1}', (True, True), (False, False), (True, True)),
        (THOUGHT, (True, True), (True, False), (True, False)),
        (THOUGHT + NEXT + THOUGHT + NEXT + CALL, (True, True), (True, True), (True, True)),
        (THOUGHT + NEXT + FINAL + '{"a": 1}', (True, True), (False, False), (True, True)),
        ("<|channel|>commentary<|message|>I do." + NEXT + CALL, (True, True), (True, True), (True, True)),
        (CALL.replace("say", "sing"), (False, False), (False, False), (False, False)),
        (CALL.replace('"text"', '"word"'), (False, False), (False, False), (False, False)),
        ("Paris", (False, False), (False, False), (False, False)),
    ],
)
def test_an_answer_consists_of_messages(model, text, auto, required, form):
    schema = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    assert accepted(model, text, tools=TOOLS) == auto
    assert accepted(model, text, tools=TOOLS, tool_choice="required") == required
    assert accepted(model, text, tools=TOOLS, structured_outputs=schema) == form


def test_a_form_without_tools_is_the_last_message(model):
    schema = {"json": {"type": "array", "items": {"type": "integer"}}}
    assert accepted(model, FINAL + "[1, 2]", structured_outputs=schema) == (True, True)
    assert accepted(model, THOUGHT + NEXT + FINAL + "[", structured_outputs=schema) == (True, False)
    assert accepted(model, "[1, 2]", structured_outputs=schema) == (False, False)
    assert accepted(model, CALL, structured_outputs=schema) == (False, False)


def test_a_call_is_brought_to_its_end_before_the_tokens_run_out(model):
    text = CALL.removesuffix('a"}') + "a" * 40
    length = len(model.tokenizer.encode(text, add_special_tokens=False))
    options = {"tools": TOOLS, "tool_choice": "required", "max_tokens": length}
    assert accepted(model, text, **options) == (False, False)
    assert accepted(model, text[:-20], **options)[0]
    closed = json.loads(text[text.index("{") : -20] + '"}')
    assert closed["text"] == "a" * 20
