"""Switch command: a command whose switches may be written as tritonserver's: `--strict-readiness=false`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

from genserve.cli.tritonserver_flags import REFUSED

__all__ = ["SwitchCommand"]

_YES, _NO = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})


class SwitchCommand(TyperCommand):
    """Takes `--switch`, `--no-switch`, `--switch=true` and `--switch=false`.

    A flag that only tritonserver has is refused with what to do, or passed over if it asks for nothing.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write the long forms as the short ones, and parse."""
        switches = {
            name: option
            for option in self.params
            if isinstance(option, TyperOption) and option.is_flag and option.secondary_opts
            for name in option.opts
        }
        words = [word for word in args if not _is_idle(word)]
        for word in words:
            name = word.partition("=")[0]
            if name in REFUSED:
                instead = REFUSED[name].instead
                ctx.fail(f"{name} is a flag of tritonserver that genserve does not have: {instead}")
        return super().parse_args(ctx, [_plain(word, switches) for word in words])


def _is_idle(word: str) -> bool:
    """Whether a word is a flag of tritonserver's that asks for what is the case anyway."""
    name, _, value = word.partition("=")
    flag = REFUSED.get(name)
    return flag is not None and bool(value) and _switch(value) == _switch(flag.idle)


def _switch(value: str) -> str:
    """Return one word for the many of yes and of no; any other value as it is."""
    lower = value.lower()
    return "true" if lower in _YES else "false" if lower in _NO else lower


def _plain(word: str, switches: dict[str, TyperOption]) -> str:
    name, equals, value = word.partition("=")
    if equals and name in switches:
        if value.lower() in _YES:
            return name
        if value.lower() in _NO:
            return switches[name].secondary_opts[0]
    return word
