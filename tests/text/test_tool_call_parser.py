"""Tool calls in the text of answers, in every format and cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.completion import Delta, FinishReason, joined_calls
from genserve.prompt import Tool
from genserve.text.message_parser import MessageParser
from genserve.text.reasoning import ReasoningParser
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import TOOL_FORMATS

TOOLS = {name: Tool(name=name) for name in ("f", "get_weather", "a.b-c")}
# Arguments whose strings contain what ends calls, and escapes.
TRICKY = '{"a": "}\\"]}\\\\", "b": [{"c": "</tool_call>"}, [1]], "d": "[TOOL_CALLS]"}'


def read(form: str, pieces: list[str], *, tools=TOOLS) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(TOOL_FORMATS[form], tools=tools)
    deltas = [parser.push(piece, last=False) for piece in pieces] + [parser.push("", last=True)]
    calls = joined_calls(delta for one in deltas for delta in one.tool_calls)
    content = "".join(delta.content for delta in deltas)
    return content, [(call.name, call.arguments) for call in calls]


ANSWERS = {
    "hermes": (
        'I look.\n\n<tool_call>\n{"name": "f", "arguments": ' + TRICKY + "}\n</tool_call>\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": ' + TRICKY + "}",
    "mistral": (
        'I look.[TOOL_CALLS] [{"name": "f", "arguments": ' + TRICKY + '}, {"name": "get_weather", '
        '"arguments": {}}]'
    ),
    "mistral_args": "I look.[TOOL_CALLS]f[ARGS]" + TRICKY + "[TOOL_CALLS]get_weather[ARGS]{}",
    "smollm2": (
        'I look. <tool_call>[{"name": "f", "arguments": ' + TRICKY + '}, {"name": "get_weather", '
        '"arguments": {}}]</tool_call>'
    ),
}
# Texts in which calls are malformed, unknown or cut, and what they are read as.
ODD = {
    "no call": ("hermes", "Use <tool_call> for it.", ("Use <tool_call> for it.", [])),
    "another tool": ("llama3_json", '{"name": "g", "parameters": {}}', None),
    "a bare call": ("llama3_json", ' {"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    "JSON that is no call": ("llama3_json", '{"name": "f"}', None),
    "a call after text": ("llama3_json", 'It is {"name": "f", "parameters": {}}', None),
    "no object": ("hermes", '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>', None),
    "a later mark": (
        "hermes",
        'a <tool_call> b\n<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>',
        ("a <tool_call> b", [("f", '{"x":1}')]),
    ),
    "text after calls": (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]\n And \n',
        ("And \n", [("f", "{}")]),
    ),
    "cut in the mark": ("hermes", "well <tool_", None),
    "cut in the head": ("hermes", 'well\n<tool_call>\n{"name": "get_w', None),
    "cut in the arguments": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "b',
        ("", [("f", '{"a": "b')]),
    ),
    "cut after the arguments": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool',
        ("", [("f", "{}")]),
    ),
    "cut before another call": (
        "smollm2",
        '<tool_call>[{"name": "f", "arguments": {}}, ',
        ("", [("f", "{}")]),
    ),
    "only whitespace": ("hermes", " \n ", None),
}


@pytest.mark.parametrize("form", ANSWERS)
def test_calls_and_content_are_read(form):
    content, calls = read(form, [ANSWERS[form]])
    assert content == ("" if form == "llama3_json" else "I look.")
    assert calls == [("f", TRICKY), ("get_weather", "{}")][: 1 if form == "llama3_json" else 2]


@pytest.mark.parametrize("case", ODD)
def test_what_does_not_follow_the_format_is_content(case):
    form, text, expected = ODD[case]
    assert read(form, [text]) == (expected or (text, []))


@given(
    case=st.sampled_from([*ANSWERS.items(), *((form, text) for form, text, _ in ODD.values())]),
    data=st.data(),
)
def test_the_result_does_not_depend_on_the_cuts(case, data):
    form, text = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, [text]) == read(form, [*text])


@given(st.text(alphabet='<tol_ca>[]{}"\\ :,fnmergus/T\n'))
def test_any_text_is_read_without_an_error(text):
    for form in TOOL_FORMATS:
        assert read(form, [text]) == read(form, [*text])


def test_the_name_comes_before_the_arguments():
    parser = ToolCallParser(TOOL_FORMATS["hermes"], tools=TOOLS)
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'
    deltas = [delta for sign in text for delta in parser.push(sign, last=False).tool_calls]
    assert (deltas[0].name, deltas[0].arguments) == ("f", "")
    assert deltas[0].id.startswith("call_")
    assert len(deltas[0].id) == len("call_") + 24
    assert [delta.arguments for delta in deltas[1:]] == [*'{"city": "Paris"}']
    assert {(delta.id, delta.name) for delta in deltas[1:]} == {("", "")}


def test_ids_of_mistral_are_nine_letters_and_digits():
    parser = ToolCallParser(TOOL_FORMATS["mistral"], tools=TOOLS)
    first, *_ = parser.push(ANSWERS["mistral"], last=True).tool_calls
    assert len(first.id) == 9
    assert first.id.isalnum()


def test_calls_follow_reasoning():
    parser = MessageParser(
        reasoning=ReasoningParser(begun=True), tools=ToolCallParser(TOOL_FORMATS["hermes"], tools=TOOLS)
    )
    text = "I write <tool_call>.\n</think>\n\n" + ANSWERS["hermes"]
    delta = parser.read(Delta(text=text, token_ids=(), finish_reason=FinishReason.STOP))
    assert (delta.reasoning, delta.content) == ("I write <tool_call>.", "I look.")
    assert [call.name for call in joined_calls(delta.tool_calls)] == ["f", "get_weather"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[TOOL_CALLS]a[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]b[CALL_ID]x1[ARGS]{}", ["abcDEF123", "x1"]),
        ("[TOOL_CALLS]a[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]a[CALL_ID]abcDEF123[ARGS]{}", ["abcDEF123", ""]),
        ("[TOOL_CALLS]a[ARGS]{}", [""]),
    ],
)
def test_a_call_has_the_id_that_the_model_writes_unless_another_call_has_it(text, expected):
    for pieces in ([text], [*text]):
        parser = ToolCallParser(TOOL_FORMATS["mistral_ids"], tools={name: Tool(name=name) for name in "ab"})
        read = [parser.push(piece, last=False) for piece in pieces] + [parser.push("", last=True)]
        ids = [call.id for delta in read for call in delta.tool_calls if call.id]
        assert [found if wanted else "" for found, wanted in zip(ids, expected, strict=True)] == expected
        assert len(set(ids)) == len(ids)
