"""Switch command: a command whose switches may be written as tritonserver's: `--strict-readiness=false`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from typer.core import TyperCommand, TyperOption

from genserve.cli.tritonserver_flags import REFUSED

__all__ = ["SwitchCommand"]

_YES, _NO = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})


class SwitchCommand(TyperCommand):
    """Takes `--switch`, `--no-switch`, `--switch=true`, `--switch=false` and `--switch false`.

    A flag that only tritonserver has is refused with what to do instead, or ignored if its value changes
    nothing.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite `--switch=VALUE` as typer reads it, and parse."""
        switches = {
            name: option
            for option in self.params
            if isinstance(option, TyperOption) and option.is_flag and option.secondary_opts
            for name in option.opts
        }
        words = []
        for word in _joined(args, {*switches, *REFUSED}):
            name, _, value = word.partition("=")
            flag = REFUSED.get(name)
            if flag is None:
                words.append(_rewritten(word, switches))
            elif not value or _switch_value(value) != _switch_value(flag.ignored_value):
                ctx.fail(f"{name} is a flag of tritonserver that genserve does not have: {flag.instead}")
        return super().parse_args(ctx, words)


def _joined(words: list[str], flags: Collection[str]) -> Iterator[str]:
    """Yield `--switch=false` for `--switch` and `false`, as tritonserver reads them."""
    rest = iter([*words, ""])
    word = next(rest)
    for following in rest:
        if word in flags and following.lower() in _YES | _NO:
            yield f"{word}={following}"
            word = next(rest)
        else:
            yield word
            word = following


def _switch_value(value: str) -> str:
    """Return "true" or "false" for every spelling of them, and any other value as it is."""
    lower = value.lower()
    return "true" if lower in _YES else "false" if lower in _NO else value


def _rewritten(word: str, switches: dict[str, TyperOption]) -> str:
    name, _, value = word.partition("=")
    if name in switches:
        match _switch_value(value):
            case "true":
                return name
            case "false":
                return switches[name].secondary_opts[0]
    return word
