"""Arguments that are not JSON become JSON, piece by piece."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.completion import joined_calls
from genserve.prompt import Tool
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import TOOL_FORMATS, ToolFormat

STRING, INTEGER, NULL = ({"type": name} for name in ("string", "integer", "null"))
TOOL = Tool(
    name="write",
    parameters={
        "type": "object",
        "properties": {
            "text": STRING,
            "count": INTEGER,
            "ratio": {"type": "number"},
            "force": {"type": "boolean"},
            "edits": {"type": "array", "items": {"type": "object"}},
            "options": {"$ref": "#/$defs/options"},
            "maybe": {"anyOf": [STRING, NULL]},
            "size": {"type": ["integer", "string"]},
            "label": {"anyOf": [STRING, INTEGER]},
            "mode": {"enum": ["a", 1]},
            "anything": {},
        },
        "$defs": {"options": {"type": "object", "properties": {"deep": {"type": "boolean"}}}},
    },
)
QWEN = "qwen3_coder"
TAGGED = [name for name, each in TOOL_FORMATS.items() if each.arguments.text_end]


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[str]]:
    parser = ToolCallParser(form, tools={"write": TOOL, "now": Tool(name="now")})
    deltas = [parser.push(piece, last=False) for piece in pieces] + [parser.push("", last=True)]
    calls = joined_calls(delta for one in deltas for delta in one.tool_calls)
    return "".join(delta.content for delta in deltas), [call.arguments for call in calls]


def qwen(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"


# What a text becomes, by parameter.
VALUES = {
    "a string stays text": ("text", "12", "12"),
    "a string may be JSON": ("text", '{"a": 1}', '{"a": 1}'),
    "a string may be null": ("text", "null", "null"),
    "an empty string": ("text", "", ""),
    "newlines at the ends of a string": ("text", "\n a \n", "\n a \n"),
    "other marks in a string": ("text", "<tool_call></function>\n</para", "<tool_call></function>\n</para"),
    "an integer": ("count", "-12", -12),
    "a number": ("ratio", "1.50", 1.5),
    "a boolean": ("force", "true", True),
    "Python's boolean": ("force", "False", False),
    "Python's null": ("count", "None", None),
    "an array": ("edits", '[{"a": "</parameter>"}, 1]', [{"a": "</parameter>"}, 1]),
    "an object behind a reference": ("options", '{"deep": true}', {"deep": True}),
    "text in place of an integer": ("count", "many", "many"),
    "infinity is no JSON": ("ratio", "Infinity", "Infinity"),
    "a nullable string": ("maybe", "nullable", "nullable"),
    "null in place of a string": ("maybe", "null", None),
    "the first type of a union that fits": ("size", "7", 7),
    "the other type of a union": ("size", "7 km", "7 km"),
    "a string is preferred if it is first": ("label", "7", "7"),
    "a value of an enum": ("mode", "1", 1),
    "a string of an enum": ("mode", "a", "a"),
    "a parameter without a type": ("anything", "12", "12"),
    "an unknown parameter": ("other", "12", "12"),
}


@pytest.mark.parametrize("case", VALUES)
def test_the_schema_decides_what_a_text_is(case):
    key, text, value = VALUES[case]
    answer = qwen(**{key: text})
    for pieces in ([answer], [*answer]):
        content, [arguments] = read(TOOL_FORMATS[QWEN], pieces)
        assert content == ""
        assert json.loads(arguments) == {key: value}


ODD = {
    "no newlines": (
        "<tool_call><function=write><parameter=text>a</parameter></function></tool_call>",
        '{"text": "a"}',
    ),
    "text behind JSON": (qwen(edits="[1] and more"), '{"edits": [1]}'),
    "no parameters": ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "{}"),
    "cut in a string": (qwen(text="abc").partition("</par")[0], '{"text": "abc'),
    "cut in a number": (qwen(count="12").partition("</par")[0], '{"count": '),
    "cut between parameters": (qwen(text="abc").partition("</func")[0], '{"text": "abc"'),
}


@pytest.mark.parametrize("case", ODD)
def test_what_does_not_follow_the_syntax_is_read_as_far_as_possible(case):
    text, expected = ODD[case]
    for pieces in ([text], [*text]):
        assert read(TOOL_FORMATS[QWEN], pieces) == ("", [expected])


def test_a_head_without_arguments_is_content():
    text = "<tool_call>\n<function=write>\nHello"
    assert read(TOOL_FORMATS[QWEN], [*text]) == (text, [])


def test_strings_and_objects_are_streamed():
    parser = ToolCallParser(TOOL_FORMATS[QWEN], tools={"write": TOOL})
    head, _, rest = qwen(text='a "b"\nc', edits='[{"x": 1}]').partition("<parameter=text>\n")
    assert parser.push(head + "<parameter", last=False).tool_calls == ()
    sent = []
    for sign in "=text>\n" + rest:
        sent += [delta.arguments for delta in parser.push(sign, last=False).tool_calls]
    assert "".join(sent) == '{"text": "a \\"b\\"\\nc", "edits": [{"x": 1}]}'
    assert max(map(len, sent)) < 12


TEXT = st.text(alphabet='ab\n <>/"\\{}[]parmetvlu=_:,|', max_size=20)


@pytest.mark.parametrize("form", TAGGED)
@given(data=st.data())
def test_what_is_written_is_read_however_it_is_cut(form, data):
    shape = TOOL_FORMATS[form]
    arguments = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "text": TEXT.filter(lambda text: shape.arguments.text_end.strip() not in text),
                "count": st.integers(),
                "force": st.booleans(),
                "edits": st.lists(st.fixed_dictionaries({"a": TEXT}), max_size=2),
            },
        )
    )
    text = "I look.\n" + shape.written([("write", json.dumps(arguments)), ("now", "{}")])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = read(shape, pieces)
    assert content == "I look."
    assert [json.loads(call) for call in calls] == [arguments, {}]
    assert read(shape, [text])[1] == calls


def test_a_mark_within_a_string_ends_it():
    """The syntax has no escape for its mark; the grammar never writes one."""
    content, calls = read(TOOL_FORMATS[QWEN], [qwen(text="a</parameter>b")])
    assert (content, calls) == ("b\n</parameter>\n</function>\n</tool_call>", ['{"text": "a"}'])


def test_a_declared_format_may_have_tagged_arguments():
    arguments = {"before_key": "[", "before_text": "]=", "before_json": "]:", "after_value": ";"}
    parts = {"begin": "<do>", "before_name": "", "before_arguments": "(", "after_arguments": ")"}
    form = ToolFormat.declared({**parts, "arguments": arguments})
    assert form.written([("write", '{"text": "1", "count": 1}')]) == "<do>write([text]=1;[count]:1;)"
    assert read(form, [*"<do>write([text]=1;[count]:1;)"]) == ("", ['{"text": "1", "count": 1}'])
    for wrong in ({**arguments, "after_value": ""}, {"before_key": "["}, {**arguments, "x": 1}):
        with pytest.raises((TypeError, ValueError)):
            ToolFormat.declared({**parts, "arguments": wrong})
