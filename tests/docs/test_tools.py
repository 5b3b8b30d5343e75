"""docs/tools.md: its list of formats, and the format that a model.py declares."""

from __future__ import annotations

import re
from pathlib import Path

from genserve.text.tool_formats import TOOL_FORMATS, ToolFormat

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def test_all_formats_are_listed():
    assert set(re.findall(r"^\| `(\w+)`: ", PAGE, re.MULTILINE)) == set(TOOL_FORMATS)


def test_the_declared_format_writes_the_answer_that_follows():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    declared: dict = {}
    exec(next(block for block in blocks if "tool_format" in block), declared)
    form = ToolFormat(**declared["TritonPythonModel"].tool_format)
    written = form.written([("get_weather", '{"city": "Paris"}')])
    assert f"`{written}`" in PAGE.replace("\\n", "\n")
