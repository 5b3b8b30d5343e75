from __future__ import annotations

from dataclasses import dataclass

import pytest

from genserve.cli.parser import CommandParser, UsageError
from genserve.settings import Flag, flag


@dataclass(frozen=True, kw_only=True)
class Flags:
    words: tuple[str, ...] = flag((), Flag(help="", is_argument=True))
    text: str = flag("", Flag(help="", names=("--text", "-t")))
    seed: int = flag(0, Flag(help=""))
    items: list[str] = flag(list, Flag(help=""))
    several: list[str] = flag(list, Flag(help="", takes_several=True))


def read(*words: str) -> Flags:
    flags = CommandParser(prog="command", flags=Flags, description="", examples=()).read(words)
    assert isinstance(flags, Flags)
    return flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--seed -1", Flags(seed=-1)),
        ("--text -brief", Flags(text="-brief")),
        ("-t --brief", Flags(text="--brief")),
        ("--items -a --items --b=1 x", Flags(items=["-a", "--b=1"], words=("x",))),
    ],
)
def test_a_value_may_begin_with_a_dash(words: str, expected: Flags) -> None:
    assert read(*words.split()) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-- -a", Flags(words=("-a",))),
        ("-- a --seed", Flags(words=("a", "--seed"))),
        ("--seed 3 -- -a", Flags(seed=3, words=("-a",))),
        ("a --seed 3 b -- -c -- --d", Flags(seed=3, words=("a", "b", "-c", "--", "--d"))),
        ("--several a b -- c", Flags(several=["a", "b"], words=("c",))),
    ],
)
def test_all_words_after_two_dashes_are_arguments(words: str, expected: Flags) -> None:
    assert read(*words.split()) == expected


@pytest.mark.parametrize("words", ["--text --seed 3", "--text --", "--text", "-a", "--several -a"])
def test_a_flag_is_no_value(words: str) -> None:
    with pytest.raises(UsageError):
        read(*words.split())
