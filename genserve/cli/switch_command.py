"""Switch command: a command whose switches may be written as tritonserver's: `--strict-readiness=false`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

__all__ = ["SwitchCommand"]

_YES, _NO = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})


class SwitchCommand(TyperCommand):
    """Takes `--switch`, `--no-switch`, `--switch=true` and `--switch=false`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write the long forms as the short ones, and parse."""
        switches = {
            name: option
            for option in self.params
            if isinstance(option, TyperOption) and option.is_flag and option.secondary_opts
            for name in option.opts
        }
        return super().parse_args(ctx, [_plain(word, switches) for word in args])


def _plain(word: str, switches: dict[str, TyperOption]) -> str:
    name, equals, value = word.partition("=")
    if equals and name in switches:
        if value.lower() in _YES:
            return name
        if value.lower() in _NO:
            return switches[name].secondary_opts[0]
    return word
