"""Answers in Harmony's messages, with the heads that gpt-oss writes; whole and in pieces."""

from __future__ import annotations

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from genserve.completion import Delta, FinishReason, joined_calls
from genserve.text.harmony import HarmonyParser, HarmonyTokens

TOKENS = HarmonyTokens(thought_start=(1, 90, 2), message=2, end=3, ids=frozenset(range(7)))
THOUGHT = "<|channel|>analysis<|message|>so<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|message|>{"path": "<|call|>"}'
PIECES = [
    THOUGHT, NEXT, CALL, "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.read <|constrain|>json",
    "<|channel|>", "<|message|>", "<|end|>", "<|", "to=", "assistant", "a", " ", "{", "}", '"',
]  # fmt: skip


def read(
    text: str, *, cuts: tuple[int, ...] = (), separates: bool = True
) -> tuple[str, str, list[tuple[str, str]]]:
    parser = HarmonyParser(TOKENS, tools={"read"}, separates=separates)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [parser.read(Delta(text=text[a:b], token_ids=())) for a, b in itertools.pairwise(ends)]
    parts.append(parser.read(Delta(text="", token_ids=(), finish_reason=FinishReason.STOP)))
    calls = joined_calls([call for part in parts for call in part.tool_calls])
    assert parser.has_calls == bool(calls)
    return (
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [(call.name, call.arguments) for call in calls],
    )


@pytest.mark.parametrize(
    "head",
    [
        " to=functions.read<|channel|>commentary json",
        "<|channel|>commentary to=functions.read <|constrain|>json",
        "<|channel|>commentary to=functions.read<|constrain|>json",
        "<|channel|>commentary to=functions.read json",
        "<|channel|>commentary to=read",
        "<|channel|>analysis to=functions.read code",
    ],
)
def test_a_message_to_a_function_is_a_call(head):
    expected = ("so", "", [("read", '{"path": "<|call|>"}')])
    assert read(THOUGHT + NEXT + head + CALL) == expected
    assert read(THOUGHT + NEXT + head + CALL + "<|call|>") == expected


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("<|channel|>final<|message|> Paris.\n", "", " Paris.\n", 0),
        (THOUGHT + NEXT + "<|channel|>final<|message|>Paris<|return|>", "so", "Paris", 0),
        (THOUGHT * 2, "so\n\nso", "", 0),
        (THOUGHT + NEXT + "<|channel|>commentary<|message|>I look.<|end|>" + NEXT
         + "<|channel|>commentary to=functions.read" + CALL, "so", "I look.", 1),
        ("<|channel|>commentary<|message|>I look.<|end|>" + NEXT + "<|channel|>final<|message|>Found.",
         "", "I look.\n\nFound.", 0),
        ("<|channel|>analysis<|message|>a thought", "a thought", "", 0),
        ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", "", "{}", 0),
        ("<|channel|>analysis to=python code<|message|>print()<|call|>", "print()", "", 0),
        ("<|channel|>commentary to=functions.read<|message|><|call|>", "", "", 1),
        ("<|channel|>final", "", "", 0),
        ("Paris", "", "Paris", 0),
        ("to=", "", "to=", 0),
        ("", "", "", 0),
    ],
)  # fmt: skip
def test_the_channel_decides_what_a_message_is(text, reasoning, content, num_calls):
    for cuts in ((), tuple(range(len(text)))):
        found = read(text, cuts=cuts)
        assert (*found[:2], len(found[2])) == (reasoning, content, num_calls)
        assert all(json.loads(arguments) is not None for _, arguments in found[2])


def test_an_answer_ends_within_a_call_until_its_arguments_are_complete():
    parser = HarmonyParser(TOKENS, tools={"read"})
    parser.read(Delta(text='<|channel|>commentary to=functions.read<|message|>{"a', token_ids=()))
    assert parser.within_call
    parser.read(Delta(text='": 1}', token_ids=(), finish_reason=FinishReason.STOP))
    assert parser.ends_with_calls(FinishReason.STOP)


@given(pieces=st.lists(st.sampled_from(PIECES)), cuts=st.lists(st.integers(0, 300)))
def test_the_result_does_not_depend_on_where_the_text_is_cut(pieces, cuts):
    text = "".join(pieces)
    assert read(text, cuts=tuple(cuts)) == read(text)


def test_the_tokens_of_thoughts_are_counted():
    parser = HarmonyParser(TOKENS, tools=())
    thought, answer = (1, 90, 2, 50, 51, 52, 3), (0, 91, 1, 92, 2, 50, 51)
    token_ids = (*thought, 0, 91, *thought, *answer)
    parser.read(Delta(text="", token_ids=token_ids, finish_reason=FinishReason.STOP))
    assert parser.num_reasoning_tokens == 6


def test_thoughts_may_stay_in_the_content():
    parser = HarmonyParser(TOKENS, tools={"read"}).without_reasoning()
    text = THOUGHT + NEXT + "<|channel|>final<|message|>Paris"
    delta = Delta(text=text, token_ids=(), finish_reason=FinishReason.STOP)
    assert parser.read(delta).content == "so\n\nParis"
    assert read(text, separates=False) == ("", "so\n\nParis", [])
