"""Help text: `--help` as plain text that shows every flag in full, however narrow the terminal is."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand

_MAX_WIDTH = 100
_MAX_NAMES_WIDTH = 30   # of the column of flags; a longer flag has a line of its own
_MIN_TEXT_WIDTH = 40    # of the column beside it; with less, all flags have a line of their own

Row = tuple[str, str]   # a flag, an argument or a command, and its explanation


class HelpCommand(TyperCommand):
    """A command whose `--help` is plain text. The `rich_help_panel` of a flag is its heading.

    typer's own tables cut the names of flags at 80 columns, and rich takes 60 ms to import.
    """

    def get_help(self, ctx: Any) -> str:
        """Return the help; headings are bold, which typer's `echo` removes where it is not shown."""
        return help_text(self, ctx, sections=parameter_sections(self, ctx))


def parameter_sections(command: Any, ctx: Any) -> dict[str, list[Row]]:
    """Return the arguments and flags of a command by their headings."""
    sections: dict[str, list[Row]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:      # hidden
            continue
        is_argument = parameter.param_type_name == "argument"
        heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
        sections.setdefault(heading, []).append(_row(parameter, record))
    if "Options" in sections:   # --help is the last of all
        sections["Options"] = sections.pop("Options")
    return sections


def _row(parameter: Any, record: Row) -> Row:
    names, text = record
    if parameter.param_type_name == "argument":
        name, _, kind = names.partition(" ")
        names = f"{name.upper()} {kind}" if "|" in kind else name.upper()     # its values, if they are few
    elif parameter.is_flag:
        short_first = sorted(parameter.opts, key=lambda name: name.startswith("--"))
        names = ", ".join([*short_first, *parameter.secondary_opts])
        # typer repeats the name: [default: no-exit-on-error].
        default = "default: on" if parameter.default else ""
        text = re.sub(r"\s*\[\]$", "", re.sub(r"(; )?default: [a-z0-9-]+", default, text))
    else:
        # A repeatable flag takes one value at a time; the range is among the explanations.
        names = re.sub(r"<list\[(.*)\]>", r"<\1>", names.replace("Path", "path").replace(" range>", ">"))
        names = names.replace("<str>", "<text>")
    # \xa0 does not break: a name stays next to its value.
    return names, text.replace("env var: ", "env:\xa0").replace("default: ", "default:\xa0")


def help_text(command: Any, ctx: Any, *, sections: dict[str, list[Row]]) -> str:
    """Return the description, the usage, the sections and the examples of a command."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    description = inspect.cleandoc(command.help or "").split("\n\n")
    usage = " ".join([ctx.command_path, *_usage(command, ctx)])
    blocks = [
        *("\n".join(_wrapped(" ".join(paragraph.split()), width)) for paragraph in description),
        f"{_bold('Usage')} {usage}",
        *(
            "\n".join([_bold(heading), *_table(rows, width=width)])
            for heading, rows in sections.items()
        ),
    ]
    if command.epilog:
        blocks.append("\n".join([_bold("Examples"), *(f"  {line}" for line in command.epilog.splitlines())]))
    return "\n\n".join(blocks)


def _usage(command: Any, ctx: Any) -> Iterator[str]:
    yield "[OPTIONS]"
    for parameter in command.get_params(ctx):
        if parameter.param_type_name == "argument":
            name = parameter.name.upper() + ("..." if parameter.nargs != 1 else "")
            yield name if parameter.required else f"[{name}]"
    if hasattr(command, "list_commands"):
        yield "COMMAND"


def _table(rows: Iterable[Row], *, width: int) -> Iterator[str]:
    """Yield the lines of two columns; a name that is too long for its column has a line of its own."""
    rows = list(rows)
    names_width = max((len(names) for names, _ in rows if len(names) <= _MAX_NAMES_WIDTH), default=0)
    indent = 2 + names_width + 2
    if width - indent < _MIN_TEXT_WIDTH:
        names_width, indent = 0, 6
    for names, text in rows:
        lines = _wrapped(text, width - indent)
        if len(names) > names_width or not lines:
            yield from (f"  {part}" for part in _wrapped(names, width - 2))
        else:
            yield f"  {names:{names_width}}  {lines.pop(0)}"
        yield from (" " * indent + line for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    # A flag such as --load-model is not broken.
    lines = textwrap.wrap(text, max(width, 20), break_on_hyphens=False, break_long_words=False)
    return [line.replace("\xa0", " ") for line in lines]


def _bold(heading: str) -> str:
    return typer.style(f"{heading}:", bold=True)
