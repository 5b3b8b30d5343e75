"""The Python of docs/structured_outputs.md, run as it stands but for the address."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "structured_outputs.md"


def test_the_examples_run(tiny_server, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block.replace("http://localhost:8000", tiny_server.url), PAGE.name, "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] in ("yes", "no")
