from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from genserve.cli.tritonserver_flags import TritonserverCommand

app = typer.Typer()


@app.command(cls=TritonserverCommand)
def show(
    strict: Annotated[bool, typer.Option("--strict/--no-strict", envvar="STRICT")] = True, name: str = ""
) -> None:
    print(strict, name)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "True "),
        (["--strict=false"], "False "),
        (["--strict=False"], "False "),
        (["--strict=0"], "False "),
        (["--no-strict", "--strict=true"], "True "),
        (["--no-strict"], "False "),
        (["--name=false"], "True false"),
        (["--name", "false"], "True false"),
        (["--strict", "false", "--name", "x"], "False x"),
        (["--strict", "TRUE"], "True "),
    ],
)
def test_both_spellings_of_switches_are_accepted(words, shown):
    assert CliRunner().invoke(app, words).output == f"{shown}\n"


def test_a_switch_takes_no_other_value():
    assert CliRunner().invoke(app, ["--strict=perhaps"]).exit_code == 2


def test_a_switch_may_come_from_the_environment():
    assert CliRunner().invoke(app, [], env={"STRICT": "false"}).output == "False \n"
