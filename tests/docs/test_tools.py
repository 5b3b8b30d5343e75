"""docs/tool_formats.md: its list of formats, and the format that a model.py declares."""

from __future__ import annotations

import re

from genserve.text.tool_formats import TOOL_FORMATS, ToolFormat
from tests.docs.snippets import ROOT, snippets

PAGE = (ROOT / "docs" / "tool_formats.md").read_text(encoding="utf-8")


def test_all_formats_are_listed():
    assert set(re.findall(r"^\| `(\w+)`: ", PAGE, re.MULTILINE)) == set(TOOL_FORMATS)


def test_the_declared_formats_write_the_answers_that_follow():
    texts = [one.text for one in snippets() if one.page.name == "tool_formats.md"]
    blocks = [text for text in texts if "tool_format =" in text]
    assert blocks
    for block in blocks:
        declared: dict = {}
        exec(block, declared)
        form = ToolFormat.declared(declared["TritonPythonModel"].tool_format)
        written = form.written([("get_weather", '{"city": "Paris"}')])
        assert f"`{written}`" in PAGE.replace("\\n", "\n")
