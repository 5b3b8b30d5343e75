"""Arguments as literals: Gemma 4's and LFM2's, whole and in pieces."""

from __future__ import annotations

import json
import random

import pytest

from genserve.text.literal_arguments import LiteralReader
from genserve.text.tool_formats import TOOL_FORMATS

GEMMA, LFM = (TOOL_FORMATS[name].arguments for name in ("gemma4", "lfm2"))


def read(syntax, text: str, *, most: int = 1000) -> tuple[str, str]:
    """Return the JSON of some arguments, and the text behind them."""
    reader, held, written = LiteralReader(syntax), "", ""
    draw = random.Random(0)
    while text and not reader.ended:
        size = draw.randint(1, most)
        held, text = held + text[:size], text[size:]
        part, num_read = reader.read(held)
        written, held = written + part, held[num_read:]
    return written, held + text


@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        (GEMMA, "}", {}),
        (GEMMA, 'a:<|"|>x "y" \\n<|"|>,b:1}', {"a": 'x "y" \\n', "b": 1}),
        (GEMMA, 'a:<|"|><|"<|"|>}', {"a": '<|"'}),
        (GEMMA, 'a:{b:[1,2.5,true,null],<|"|>c d<|"|>:{}},e:[]}',
         {"a": {"b": [1, 2.5, True, None], "c d": {}}, "e": []}),
        (GEMMA, "a: tomorrow , b: false }", {"a": "tomorrow", "b": False}),
        (GEMMA, "size (mb):1,it's a=b: 2}", {"size (mb)": 1, "it's a=b": 2}),
        (LFM, ")", {}),
        (LFM, "the size=1, b = 2)", {"the size": 1, "b": 2}),
        (LFM, 'a="x\\"\\n\\u00e9\\x41", b=\'it\\\'s "so"\')', {"a": 'x"\n\u00e9A', "b": 'it\'s "so"'}),
        (LFM, "a=[True, False, None, -1.5e3], b={'c': {\"d\": true}})",
         {"a": [True, False, None, -1500.0], "b": {"c": {"d": True}}}),
        (LFM, r"""a={"gr\u00f6\\\"e": 1, 'it\'s': 2})""", {"a": {'gr\u00f6\\"e': 1, "it's": 2}}),
        (LFM, "a='line\nline', b=[])", {"a": "line\nline", "b": []}),
        (LFM, r"a='\d+\\', b='\U0001F600')", {"a": "\\d+\\", "b": "\N{GRINNING FACE}"}),
    ],
)  # fmt: skip
def test_arguments_become_json(syntax, text, expected, most):
    written, rest = read(syntax, text + "<rest>", most=most)
    assert json.loads(written) == expected
    assert rest == text[-1] + "<rest>"


@pytest.mark.parametrize("text", ["a:1;", "a 1", "a:[1:2]", "=", '<|"|>a', "a:{b:[1}"])
def test_arguments_that_do_not_follow_the_syntax_end(text):
    found = {read(GEMMA, text + "....", most=most)[0] for most in (1, 3, 1000)}
    assert len(found) == 1


@pytest.mark.parametrize("syntax", [GEMMA, LFM])
def test_what_is_written_is_read(syntax):
    value = {"b": "x\ny", "f": {"gr\u00f6\u00dfe": 1}, "a": {"d": [1, "z", None, True], "c": {}}, "e": 0.5}
    written, rest = read(syntax, syntax.written(json.dumps(value)) + ("}" if syntax is GEMMA else ")"))
    assert json.loads(written) == value
    assert len(rest) == 1
