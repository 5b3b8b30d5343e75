from __future__ import annotations

from dataclasses import dataclass

import pytest

from genserve.cli.parser import CommandParser, UsageError
from genserve.cli.tritonserver_flags import tritonserver_words
from genserve.settings import Flag, flag


@dataclass(frozen=True, kw_only=True)
class Flags:
    strict: bool = flag(True, Flag(help="", variable="STRICT"))
    name: str = flag("", Flag(help=""))


def read(*words: str) -> Flags:
    parser = CommandParser(prog="server", flags=Flags, description="", examples=())
    flags = parser.read(tritonserver_words(words, switches=parser.switches))
    assert isinstance(flags, Flags)
    return flags


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
def test_both_spellings_of_switches_are_accepted(words: list[str], shown: str) -> None:
    flags = read(*words)
    assert f"{flags.strict} {flags.name}" == shown


def test_a_switch_takes_no_other_value() -> None:
    with pytest.raises(UsageError):
        read("--strict=perhaps")


def test_a_switch_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRICT", "false")
    assert not read().strict
