"""The command line in this process: its exit code, and what it prints."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from genserve.cli.main import main
from genserve.errors import GenserveError

__all__ = ["Ended", "check_error", "invoke"]


@dataclass(frozen=True)
class Ended:
    """How a command line has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """What is printed behind `error[...]:`, the remedy included."""
        return " ".join(self.stderr.split())


def invoke(words: Sequence[str], *, stdin: str | bytes = "", env: Mapping[str, str] | None = None) -> Ended:
    """Run a command line whose standard streams are pipes."""
    typed = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    exit_code = 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["genserve", *words])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            main()
        except SystemExit as end:
            exit_code = int(end.code or 0)
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))    # type: ignore[attr-defined]
    return Ended(exit_code, *texts)


def check_error(ended: Ended, kind: type[GenserveError], pattern: str = "") -> None:
    """Fail unless a command line has ended by an error, whose message and remedy have the pattern."""
    assert ended.exit_code == 1
    assert f"error[{kind.code}]: " in ended.stderr
    assert re.search(pattern, ended.error)
