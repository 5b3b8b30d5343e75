"""What is derived from the table of sampling parameters is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import PARAMETERS

ROOT = Path(__file__).parents[2]


def test_the_options_and_the_page_are_those_that_the_script_writes() -> None:
    command = [sys.executable, ROOT / "scripts" / "sampling_tables.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_parameter_is_an_option_and_a_row_of_the_page() -> None:
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    assert list(SamplingOptions.__annotations__) == list(PARAMETERS)
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]* \| \S", page, re.MULTILINE)
    assert sorted(rows) == sorted(PARAMETERS)
