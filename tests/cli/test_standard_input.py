"""Standard input of a process of its own: a terminal's encoding is the locale's, not the runner's."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = "from genserve.cli.console import read_text; print(ascii(read_text()))"


@pytest.mark.parametrize(
    ("encoding", "typed", "read"), [("utf-8", "é\r\n", "\\xe9\\n"), ("latin-1", "é", "\\xe9")]
)
def test_the_encoding_is_that_of_the_locale(encoding: str, typed: str, read: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=typed.encode(encoding),
        env={"PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == f"'{read}'"
