"""Diagnostics: the errors and warnings of a model, their positions in its files, and the remedies.

protobuf reports positions for syntax errors only, so `SourceMap` reads an accepted text again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from genserve.errors import ConfigError, Status

_CLOSING = {"{": "}", "<": ">"}


class Severity(StrEnum):
    """Whether a model can be served in spite of a diagnostic."""

    ERROR = "error"         # not served: it would not run, or would answer wrongly
    WARNING = "warning"     # served, but some settings have no effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """An error or a warning about a model, with its position and a remedy."""

    severity: Severity
    path: Path                      # the file, or the folder in which a file is missing
    position: str = ""              # line:column, counted from 1; empty: the whole file
    message: str
    remedy: str
    status: Status = Status.INVALID_ARG     # Triton's code for a load that fails with it
    at_load: bool = False                   # an error of the config that Triton reports only when it loads it

    @property
    def line(self) -> int | None:
        """The line, counted from 1."""
        return int(self.position.partition(":")[0]) if self.position else None

    @property
    def column(self) -> int | None:
        """The column, counted from 1."""
        return int(self.position.partition(":")[2]) if self.position else None

    @property
    def where(self) -> str:
        """`path:line:column`, or the path alone."""
        return f"{self.path}:{self.position}" if self.position else str(self.path)


def first_error(diagnostics: Iterable[Diagnostic]) -> ConfigError | None:
    """Return the first error among the diagnostics, to be raised; None: there are only warnings."""
    for each in diagnostics:
        if each.severity is Severity.ERROR:
            return ConfigError(each.message, where=each.where, status=each.status, remedy=each.remedy)
    return None


class SourceMap:
    """The line:column of each field of a text, by its path: `input[1].dims`; `[0]` may be left out.

    The text is read at the first question: most configs have no diagnostics.
    """

    def __init__(self, text: str) -> None:
        """Keep a text that `text_format.Parse` accepts."""
        self._text = text
        self._values: dict[str, str] = {}
        self._strings: dict[str, str] = {}

    def of(self, path: str) -> str:
        """Return the position of a field, or of the nearest written one around it; without one, 1:1."""
        path = path.replace("[0]", "")
        while path not in self._fields and path:
            path = path.rpartition(".")[0]
        return self._fields.get(path, "1:1")

    def of_key(self, path: str, key: str) -> str:
        """Return the position of the entry of a map that has this key."""
        return self.of(self.entry(path, key) or path)

    def entry(self, path: str, key: str) -> str | None:
        """Return the path of the entry of a map that has this key, the last one if there are several."""
        for index in reversed(range(len(self._fields))):
            entry = _indexed(path, index=index)
            if self._strings.get(f"{entry}.key".replace("[0]", "")) == key:
                return entry
        return None

    def of_value(self, path: str) -> str | None:
        """Return where the value of a field begins; None: the field is not written."""
        return self._values.get(path.replace("[0]", "")) if self._fields else None

    @cached_property
    def _fields(self) -> dict[str, str]:
        """The positions by path; reading them fills `_values` and `_strings` too."""
        positions: dict[str, str] = {}
        self._message(text_format.Tokenizer(self._text.split("\n")), positions, path="", end="")
        return positions

    def _message(self, tokens: Any, positions: dict[str, str], *, path: str, end: str) -> None:
        """Read fields up to `end`; with an empty `end`, to the end of the text."""
        counts: Counter[str] = Counter()
        while not tokens.AtEnd() and tokens.token != end:
            name, position = tokens.token, _here(tokens)
            tokens.NextToken()
            if name in ",;":
                continue
            _skip(tokens, ":")
            self._field(tokens, positions, path=f"{path}{name}", counts=counts, position=position)

    def _field(
        self, tokens: Any, positions: dict[str, str], *, path: str, counts: Counter[str], position: str
    ) -> None:
        """Read the value of a field, or a list of values; a message in a list has its own position."""
        if tokens.token != "[":
            self._value(tokens, positions, path=_next(path, counts=counts), position=position)
            return
        tokens.NextToken()
        while tokens.token != "]":
            if tokens.token in _CLOSING:
                position = _here(tokens)
            self._value(tokens, positions, path=_next(path, counts=counts), position=position)
            _skip(tokens, ",")
        tokens.NextToken()

    def _value(self, tokens: Any, positions: dict[str, str], *, path: str, position: str) -> None:
        positions[path] = position
        self._values[path] = _here(tokens)
        first = tokens.token
        self._strings[path] = first.strip("\"'")
        tokens.NextToken()
        if first in _CLOSING:
            self._message(tokens, positions, path=f"{path}.", end=_CLOSING[first])
            tokens.NextToken()
        elif first == "-":
            tokens.NextToken()
        while first[0] in "\"'" and tokens.token[:1] in ("'", '"'):  # adjacent strings are one
            tokens.NextToken()


def _here(tokens: Any) -> str:
    # The public way, `tokens.ParseError`, copies the whole line each time.
    return f"{tokens._line + 1}:{tokens._column + 1}"


def _skip(tokens: Any, token: str) -> None:
    if tokens.token == token:
        tokens.NextToken()


def _next(path: str, *, counts: Counter[str]) -> str:
    counts[path] += 1
    return _indexed(path, index=counts[path] - 1)


def _indexed(path: str, *, index: int) -> str:
    return f"{path}[{index}]" if index else path


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """The file of a config, and the positions of its fields.

    Attributes:
        path: the file, which may be missing; the config may come from a client instead.
        source_map: the positions of fields in the text; None: diagnostics have no position.
    """

    path: Path
    source_map: SourceMap | None = None

    def position(self, field: str, *, key: str | None = None) -> str:
        """Return where a field is, or the entry of a map that has this key; empty: there is no text."""
        if self.source_map is None:
            return ""
        return self.source_map.of(field) if key is None else self.source_map.of_key(field, key)

    def diagnostic(
        self,
        severity: Severity,
        field: str,
        message: str,
        *,
        remedy: str,
        key: str | None = None,
    ) -> Diagnostic:
        """Make a diagnostic at a field, or at the entry of a map that has this key."""
        position = self.position(field, key=key)
        return Diagnostic(
            severity=severity, path=self.path, position=position, message=message, remedy=remedy
        )
