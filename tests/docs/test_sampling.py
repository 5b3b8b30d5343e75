"""What is derived from the table of sampling parameters is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from genserve.sampling.sampling_options import SamplingOptions
from genserve.sampling.sampling_params import PARAMETERS

ROOT = Path(__file__).parents[2]


def test_the_options_are_those_that_the_script_writes() -> None:
    command = [sys.executable, ROOT / "scripts" / "sampling_options.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert list(SamplingOptions.__annotations__) == list(PARAMETERS)
