"""Parser: reads the words of a command into the dataclass that the command takes, and writes its `--help`.

Each field of the dataclass is a flag or an argument (`genserve.settings.Flag`).
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from genserve.errors import GenserveError, closest
from genserve.settings import Flag

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_MAX_WIDTH = 100
_MAX_NAMES_WIDTH = 30   # width of the column of flags; a longer flag has a line of its own
_MIN_TEXT_WIDTH = 40    # least width of the second column; below it, all flags have lines of their own
TRUE, FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})     # for switches
_KINDS = {int: "int", float: "float", str: "text", Path: "path"}
_INVALID = {int: "is not an integer", float: "is not a number"}
# Stands before a word that begins with `-` and is no flag; argparse would take it for one. No command line
# has this character.
_MARK = "\0"

Row = tuple[str, str]   # a flag, an argument or a command, and its explanation


class UsageError(GenserveError):
    """A command line is wrong."""

    code: ClassVar[str] = "usage"


@dataclass(frozen=True)
class Parameter:
    """A field that the command line sets.

    Attributes:
        field: the field of the command's dataclass.
        kind: the type of one value: bool, int, float, str or Path.
        choices: the allowed texts; empty: any text.
        is_repeatable: whether the field is a list or a tuple of values.
    """

    field: Field[Any]
    kind: type
    choices: tuple[str, ...]
    is_repeatable: bool

    @property
    def flag(self) -> Flag:
        """The flag of the field."""
        flag: Flag = self.field.metadata["flag"]
        return flag

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings; the name of an argument is in upper case."""
        name = self.field.name.strip("_")
        return self.flag.names or ((name.upper(),) if self.flag.is_argument else (_option(name),))

    @property
    def takes_value(self) -> bool:
        """Whether exactly one value follows the flag."""
        return not (self.kind is bool or self.flag.is_argument or self.flag.takes_several)

    @cached_property
    def negations(self) -> tuple[str, ...]:
        """The spellings that switch the field off; empty if nothing else could switch it on."""
        if self.kind is not bool or (self.default is False and not self.flag.variable):
            return ()
        return tuple(f"--no-{name[2:]}" for name in self.names if name.startswith("--"))

    @property
    def variable(self) -> str:
        """The environment variable that sets the field; empty: none."""
        return self.flag.variable.replace("*", self.names[0].lstrip("-").upper().replace("-", "_"))

    @property
    def default(self) -> Any:
        """The default of the field; MISSING: a value is required."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    @property
    def metavar(self) -> str:
        """The value in `--help`."""
        if self.flag.metavar:
            return f"<{self.flag.metavar}>"
        return f"<{'|'.join(self.choices) or _KINDS[self.kind]}>"

    def read(self, text: str, *, place: str) -> Any:
        """Return the value that a text stands for.

        Raises:
            UsageError: the value is not allowed; the message names the place.
        """
        text = text.removeprefix(_MARK)
        if self.choices and text not in self.choices:
            allowed, near = ", ".join(map(repr, self.choices)), closest(text, known=self.choices)
            remedy = f"did you mean {near}?" if near else ""
            raise UsageError(f"{place}: {text!r} is not one of {allowed}", remedy=remedy)
        try:
            value = _switched(text) if self.kind is bool else self.kind(text)
        except ValueError as error:
            reason = f"{text!r} {_INVALID[self.kind]}" if self.kind in _INVALID else str(error)
            raise UsageError(f"{place}: {reason}") from None
        low, high = self.flag.minimum, self.flag.maximum
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            raise UsageError(f"{place}: {text} is not in the range {_range(self.flag)}")
        try:
            if self.flag.validate is not None:
                self.flag.validate(value)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error
        return value

    def value_of_environment(self) -> Any:
        """Return the value in the environment variable; MISSING: the variable is not set, or empty."""
        text = os.environ.get(self.variable) if self.variable else None
        if not text:
            return MISSING
        if not self.is_repeatable:
            return self.read(text, place=self.variable)
        words = text.split(os.pathsep) if self.kind is Path else text.split()
        return [self.read(word, place=self.variable) for word in words]


def parameters(flags: type) -> tuple[Parameter, ...]:
    """Return the flags and arguments of the dataclass that a command takes."""
    kinds = get_type_hints(flags)
    return tuple(
        _parameter(field, kinds[field.name])
        for field in fields(flags)
        if "flag" in field.metadata
    )


def _parameter(field: Field[Any], kind: Any) -> Parameter:
    repeatable, choices = False, ()
    while get_origin(kind) in (UnionType, Union, list, tuple):
        repeatable |= get_origin(kind) in (list, tuple)
        kind = next(each for each in get_args(kind) if each not in (NoneType, Ellipsis))
    if get_origin(kind) is Literal:
        choices, kind = get_args(kind), str
    return Parameter(field=field, kind=kind, choices=choices, is_repeatable=repeatable)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        prog: the words of the command: `genserve serve`.
        flags: the dataclass that the command takes.
        description: paragraphs, for `--help`.
        examples: command lines, for `--help`.
    """

    def __init__(self, *, prog: str, flags: type, description: str, examples: Sequence[str]) -> None:
        super().__init__(prog=prog, allow_abbrev=False, usage="", description=description)
        self.flags = flags
        self.parameters = parameters(flags)
        self._examples = examples
        for parameter in self.parameters:
            self._add(parameter)

    def _add(self, parameter: Parameter) -> None:
        flag = parameter.flag
        names = (parameter.field.name,) if flag.is_argument else parameter.names
        options: dict[str, Any] = {"help": flag.help, "default": None}
        if not flag.is_argument:
            options["dest"] = parameter.field.name
        if parameter.negations:
            self.add_argument(*parameter.negations, action="store_false", **options)
        if parameter.kind is bool:
            options["action"] = "store_true"
        else:
            options["type"] = partial(parameter.read, place=parameter.names[0])
            options["metavar"] = parameter.metavar
        if parameter.choices:
            options["choices"] = parameter.choices
        if flag.is_argument:    # `read` checks whether it is required
            options["nargs"] = "*" if parameter.is_repeatable else "?"
        elif parameter.is_repeatable:
            options |= {"action": "extend", "nargs": "+" if flag.takes_several else 1}
        action = self.add_argument(*names, **options)
        if parameter.kind is not Path and not parameter.choices:    # argcomplete offers files and choices
            action.completer = flag.complete or _no_values     # type: ignore[attr-defined]

    @property
    def switches(self) -> dict[str, str]:
        """The names of switches, with the names that switch them off."""
        pairs = (zip(each.names, each.negations, strict=True) for each in self.parameters if each.negations)
        return dict(pair for each in pairs for pair in each)

    def read(self, words: Sequence[str]) -> Any:
        """Return the flags of a command line; the environment sets flags that are not on it.

        Raises:
            UsageError: a word is wrong, or a required flag or argument is missing.
        """
        namespace, unknown = self.parse_known_intermixed_args([*self._marked(words)])
        if unknown:
            self._reject(unknown)
        given = {name: value for name, value in vars(namespace).items() if value not in (None, [])}
        for parameter in self.parameters:
            name = parameter.field.name
            if name not in given and (value := parameter.value_of_environment()) is not MISSING:
                given[name] = value
            if name not in given and parameter.default is MISSING:
                self.error(f"{parameter.names[0]} is missing")
            if isinstance(given.get(name), list) and isinstance(parameter.default, tuple):
                given[name] = tuple(given[name])
        return self.flags(**given)

    def _marked(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the words with `_MARK` before all words after `--`, and before values that begin with `-`."""
        known = {name for each in self.parameters for name in (*each.names, *each.negations)}
        with_value = {name for each in self.parameters if each.takes_value for name in each.names}
        rest, previous = iter(words), ""
        for word in rest:
            is_value = previous in with_value and word.startswith("-") and word != "--"
            yield f"{_MARK}{word}" if is_value and word.partition("=")[0] not in known else word
            if word == "--":
                break
            previous = word
        yield from (f"{_MARK}{word}" for word in rest)

    def _reject(self, words: Sequence[str]) -> NoReturn:
        flags = [word for word in words if word.startswith("-") and word not in ("-", "--")]
        if not flags:
            unexpected = " ".join(word.removeprefix(_MARK) for word in words if word != "--")
            remedy = f"write `{self.synopsis}`, with quotes around several words that belong together"
            raise UsageError(f"unexpected arguments: {unexpected}", remedy=remedy)
        given = flags[0].partition("=")[0]
        arguments = {each.names[0].lower() for each in self.parameters if each.flag.is_argument}
        if given.lstrip("-") in arguments:
            raise UsageError(f"there is no flag {given}", remedy=f"write `{self.synopsis}`")
        known = [name for each in self.parameters if not each.flag.is_argument for name in each.names]
        # The intended flag may share only one word: --port, --http-port.
        meant = {name.removeprefix("--"): name for name in known}
        for name in known:
            for word in name.removeprefix("--").split("-"):
                meant.setdefault(word, name)
        near = closest(given.lstrip("-"), known=meant)
        raise UsageError(f"there is no flag {given}", remedy=f"did you mean {meant[near]}?" if near else "")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for a wrong command line, where argparse would exit."""
        raise UsageError(message.removeprefix("argument "))

    @property
    def synopsis(self) -> str:
        """The usage in one line."""
        arguments = [each for each in self.parameters if each.flag.is_argument]
        names = [f"{each.names[0]}{'...' * each.is_repeatable}" for each in arguments]
        is_required = [each.default is MISSING for each in arguments]
        words = [name if needed else f"[{name}]" for name, needed in zip(names, is_required, strict=True)]
        return " ".join([self.prog, "[OPTIONS]", *words])

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help; argparse would ignore that nobody reads the output."""
        (file or sys.stdout).write(self.format_help())

    def format_help(self) -> str:
        """Return the help; argparse's own lacks headings, variables and defaults."""
        sections: dict[str, list[Row]] = {}
        for each in sorted(self.parameters, key=lambda each: not each.flag.is_argument):
            heading = "Arguments" if each.flag.is_argument else each.flag.heading or "Options"
            sections.setdefault(heading, []).append((_names(each), _explanation(each)))
        options = sections.pop("Options", [])   # below the other headings
        return help_text(
            self.description or "",
            usage=self.synopsis,
            sections=sections | {"Options": [*options, ("-h, --help", "Show this help.")]},
            examples=self._examples,
        )


def _no_values(**_: Any) -> dict[str, str]:
    return {}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _switched(text: str) -> bool:
    """Return the value of a switch; raises ValueError for any other text."""
    if text.lower() not in TRUE | FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() in TRUE


def _range(flag: Flag) -> str:
    low, high = (None if bound is None else f"{bound:.15g}" for bound in (flag.minimum, flag.maximum))
    return f"{low}<=x<={high}" if low and high else f"x>={low}" if low else f"x<={high}"


def _names(parameter: Parameter) -> str:
    short_first = sorted(parameter.names, key=lambda name: name.startswith("--"))
    names = ", ".join([*short_first, *parameter.negations])
    has_value = parameter.kind is not bool and (parameter.choices or not parameter.flag.is_argument)
    return f"{names} {parameter.metavar}" if has_value else names


def _explanation(parameter: Parameter) -> str:
    r"""Return the help of a parameter, with its variable, default and range. `\xa0` does not break."""
    flag, default = parameter.flag, parameter.default
    facts = [f"env:\xa0{parameter.variable}"] if flag.variable and flag.variable != "GENSERVE_*" else []
    if parameter.kind is bool:
        facts += ["default:\xa0on"] if default is True else []
    elif default is MISSING:
        facts += [] if flag.is_argument else ["required"]
    elif flag.show_default and default not in (None, "", [], ()):
        shown = default if isinstance(default, list | tuple) else [default]
        facts.append(f"default:\xa0{', '.join(map(str, shown))}")
    if flag.minimum is not None or flag.maximum is not None:
        facts.append(_range(flag))
    return f"{flag.help} [{'; '.join(facts)}]" if facts else flag.help


def help_text(
    description: str, *, usage: str, sections: Mapping[str, Iterable[Row]], examples: Sequence[str]
) -> str:
    """Return a help that shows every flag in full, however narrow the terminal is, with bold headings."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    paragraphs = (" ".join(paragraph.split()) for paragraph in inspect.cleandoc(description).split("\n\n"))
    blocks = [
        *("\n".join(_wrapped(paragraph, width)) for paragraph in paragraphs),
        f"{_bold('Usage')} {usage}",
        *("\n".join([_bold(heading), *_table(rows, width=width)]) for heading, rows in sections.items()),
    ]
    if examples:
        blocks.append("\n".join([_bold("Examples"), *(f"  {line}" for line in examples)]))
    return "\n\n".join(blocks) + "\n"


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
    # Do not break a flag such as --load-model.
    lines = textwrap.wrap(text, max(width, 20), break_on_hyphens=False, break_long_words=False)
    return [line.replace("\xa0", " ") for line in lines]


def _bold(heading: str) -> str:
    """Return a heading, bold where help has colours: on a terminal, or as the usual variables say."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return f"{heading}:"
    is_bold = bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
    return f"\x1b[1m{heading}:\x1b[0m" if is_bold else f"{heading}:"
