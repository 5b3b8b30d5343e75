from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from genserve.cli.main import app
from genserve.errors import ExportError


def test_a_name_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pull", "nonsense", "--model-repository", str(tmp_path)])
    assert isinstance(result.exception, ExportError)


def test_a_precision_that_nobody_knows_is_wrong_usage(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pull", "smollm2", "--precision", "int3"])
    assert result.exit_code == 2
    assert "int3" in result.stderr
