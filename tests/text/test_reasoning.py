from __future__ import annotations

import itertools
import re
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from genserve.completion import Delta, FinishReason, joined_calls
from genserve.prompt import Tool
from genserve.text.message_parser import MessageParser
from genserve.text.reasoning import ReasoningParser
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import TOOL_FORMATS

PIECES = ["<think>", "</think>", "<", "</", "think>", "a", "b c", "\n", " "]


def read(text: str, *, cuts: tuple[int, ...] = (), begun: bool = False) -> tuple[str, str]:
    reader = ReasoningParser(begun=begun)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [reader.push(text[start:end]) for start, end in itertools.pairwise(ends)]
    parts.append(reader.push("", last=True))
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nlet me see\n</think>\n\nParis.\n", "let me see", "Paris.\n"),
        ("\n<think>\n\n</think>\n\nParis", "", "Paris"),
        ("<think>a\nb", "a\nb", ""),
        ("<think>a </thi", "a </thi", ""),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        (" Paris <think>a</think>", "", " Paris <think>a</think>"),
        ("<think>\n<think>a <think></think>b", "a <think>", "b"),
        ("<think><thin", "<thin", ""),
        ("<thin air>", "", "<thin air>"),
        ("<thi", "", "<thi"),
        ("", "", ""),
        (" \n", "", " \n"),
    ],
)
def test_a_thought_at_the_beginning_is_reasoning_and_the_rest_is_content(text, reasoning, content):
    assert read(text) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (" so\n</think>\nParis", "so", "Paris"),
        ("so", "so", ""),
        ("</think>Paris", "", "Paris"),
        ("\n<think>\nso\n</think>\nParis", "so", "Paris"),
        ("so <think></think>Paris", "so <think>", "Paris"),
    ],
)
def test_a_thought_that_the_prompt_began_is_reasoning_up_to_its_end(text, reasoning, content):
    assert read(text, begun=True) == (reasoning, content)


@given(pieces=st.lists(st.sampled_from(PIECES)), cuts=st.lists(st.integers(0, 60)), begun=st.booleans())
def test_the_result_does_not_depend_on_where_the_text_is_cut(pieces, cuts, begun):
    text = "".join(pieces)
    tagged = ("<think>" * begun) + text
    found = re.fullmatch(r"\s*<think>(?:\s*<think>)*(.*?)(?:</think>(.*))?", tagged, re.DOTALL)
    expected = (found[1].strip(), (found[2] or "").lstrip()) if found else ("", text)
    assert read(text, cuts=tuple(cuts), begun=begun) == expected


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


def calls_in(text: str, *, cuts: tuple[int, ...] = ()) -> tuple[str, str, list[str]]:
    """The reasoning, the content and the arguments of the calls in an answer, with the tool `read`."""
    new_calls = partial(ToolCallParser, TOOL_FORMATS["hermes"], tools={"read": Tool(name="read")})
    parser = MessageParser(reasoning=ReasoningParser(new_calls=new_calls), tools=new_calls())
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    parts = [parser.read(Delta(text=piece, token_ids=())) for piece in pieces]
    parts.append(parser.read(Delta(text="", token_ids=(), finish_reason=FinishReason.STOP)))
    calls = joined_calls(call for part in parts for call in part.tool_calls)
    reasoning, content = (
        "".join(getattr(part, name) for part in parts) for name in ("reasoning", "content")
    )
    return reasoning, content, [call.arguments for call in calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "num_calls"),
    [
        (f"<think>hmm\n{CALL}", "hmm", 1),
        (f"<think>{CALL}", "", 1),
        (f"<think>hmm {CALL}\n{CALL}", "hmm", 2),
        (f"<think>hmm {CALL.removesuffix('</tool_call>')}", "hmm", 1),
        (f"<think>a {CALL} or <tool_call> b\n{CALL}", f"a {CALL} or <tool_call> b", 1),
        (f"<think>hmm</think>{CALL}", "hmm", 1),
        # Only mentioned.
        (f"<think>hmm {CALL}</think>", f"hmm {CALL}", 0),
        (f"<think>hmm {CALL} or not", f"hmm {CALL} or not", 0),
        (f"<think>hmm {CALL[:-30]}", f"hmm {CALL[:-30]}", 0),
        (f"<think>{f'{CALL} or ' * 15}{CALL}", f"{f'{CALL} or ' * 15}".rstrip(), 1),
        # After so many, none is looked for any more.
        (f"<think>{f'{CALL} or ' * 16}{CALL}", f"{f'{CALL} or ' * 16}{CALL}", 0),
        ("<think>" + CALL.replace("read", "other"), CALL.replace("read", "other"), 0),
        ("<think>" + CALL.replace('"a"', "..."), CALL.replace('"a"', "..."), 0),
    ],
)
def test_calls_with_which_an_unclosed_thought_ends_are_calls(text, reasoning, num_calls):
    for cuts in ((), tuple(range(len(text)))):
        assert calls_in(text, cuts=cuts) == (reasoning, "", ['{"path": "a"}'] * num_calls)


@given(
    pieces=st.lists(st.sampled_from([*PIECES, CALL, CALL[:20], CALL[20:], "<tool_call>"])),
    cuts=st.lists(st.integers(0, 200)),
)
def test_calls_in_a_thought_do_not_depend_on_where_the_text_is_cut(pieces, cuts):
    text = "<think>" + "".join(pieces)
    assert calls_in(text, cuts=tuple(cuts)) == calls_in(text)
