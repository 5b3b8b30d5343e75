from __future__ import annotations

import itertools
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from genserve.text.reasoning import ReasoningParser

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
    [(" so\n</think>\nParis", "so", "Paris"), ("so", "so", ""), ("</think>Paris", "", "Paris")],
)
def test_a_thought_that_the_prompt_began_is_reasoning_up_to_its_end(text, reasoning, content):
    assert read(text, begun=True) == (reasoning, content)


@given(pieces=st.lists(st.sampled_from(PIECES)), cuts=st.lists(st.integers(0, 60)), begun=st.booleans())
def test_the_result_does_not_depend_on_where_the_text_is_cut(pieces, cuts, begun):
    text = "".join(pieces)
    found = re.fullmatch(r"\s*<think>(.*?)(?:</think>(.*))?", ("<think>" * begun) + text, re.DOTALL)
    expected = (found[1].strip(), (found[2] or "").lstrip()) if found else ("", text)
    assert read(text, cuts=tuple(cuts), begun=begun) == expected
