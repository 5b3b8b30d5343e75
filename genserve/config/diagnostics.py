"""Diagnostics: what is wrong with a model of a repository, where in its files, and what to write instead.

protobuf reports positions for syntax errors only. A text that it has accepted is therefore read a second time
here, for the positions of its fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from genserve.errors import ConfigError, Status

__all__ = ["Diagnostic", "Severity", "SourceMap", "ValidationContext", "first_error", "nearest"]


_CLOSING = {"{": "}", "<": ">"}


class SourceMap:
    """The line:column of each field of a text, by its path: `input[1].dims`; `[0]` may be left out."""

    def __init__(self, text: str) -> None:
        """Read a text that `text_format.Parse` accepts."""
        self._places: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._strings: dict[str, str] = {}
        tokens = text_format.Tokenizer(text.split("\n"))
        self._message(tokens, path="", end="")

    def of(self, path: str) -> str:
        """Return the place of a field, or of the nearest one around it that is written; at last 1:1."""
        path = path.replace("[0]", "")
        while path not in self._places and path:
            path = path.rpartition(".")[0]
        return self._places.get(path, "1:1")

    def of_key(self, path: str, key: str) -> str:
        """Return the place of the entry of a map that has this key."""
        return self.of(self.entry(path, key) or path)

    def entry(self, path: str, key: str) -> str | None:
        """Return the path of the entry of a map that has this key, the last one if there are several."""
        for index in reversed(range(len(self._strings))):
            entry = _indexed(path, index=index)
            if self._strings.get(f"{entry}.key".replace("[0]", "")) == key:
                return entry
        return None

    def of_value(self, path: str) -> str | None:
        """Return where the value of a field begins; None: the field is not written."""
        return self._values.get(path.replace("[0]", ""))

    def _message(self, tokens: Any, *, path: str, end: str) -> None:
        """Read fields up to `end`; with an empty one, to the end of the text."""
        counts: Counter[str] = Counter()
        while not tokens.AtEnd() and tokens.token != end:
            name, place = tokens.token, _here(tokens)
            tokens.NextToken()
            if name in ",;":
                continue
            _skip(tokens, ":")
            self._field(tokens, path=f"{path}{name}", counts=counts, place=place)

    def _field(self, tokens: Any, *, path: str, counts: Counter[str], place: str) -> None:
        """Read what follows a name: a value, or a list of them, of which each message has its own place."""
        if tokens.token != "[":
            self._value(tokens, path=_next(path, counts=counts), place=place)
            return
        tokens.NextToken()
        while tokens.token != "]":
            if tokens.token in _CLOSING:
                place = _here(tokens)
            self._value(tokens, path=_next(path, counts=counts), place=place)
            _skip(tokens, ",")
        tokens.NextToken()

    def _value(self, tokens: Any, *, path: str, place: str) -> None:
        self._places[path] = place
        self._values[path] = _here(tokens)
        first = tokens.token
        self._strings[path] = first.strip("\"'")
        tokens.NextToken()
        if first in _CLOSING:
            self._message(tokens, path=f"{path}.", end=_CLOSING[first])
            tokens.NextToken()
        elif first == "-":
            tokens.NextToken()
        while first[0] in "\"'" and tokens.token[:1] in ("'", '"'):  # strings side by side are one
            tokens.NextToken()


def _here(tokens: Any) -> str:
    error = tokens.ParseError("")
    return f"{error.GetLine()}:{error.GetColumn()}"


def _skip(tokens: Any, token: str) -> None:
    if tokens.token == token:
        tokens.NextToken()


def _next(path: str, *, counts: Counter[str]) -> str:
    counts[path] += 1
    return _indexed(path, index=counts[path] - 1)


def _indexed(path: str, *, index: int) -> str:
    return f"{path}[{index}]" if index else path


_LISTED = 12    # names that a remedy lists


class Severity(StrEnum):
    """Whether a model can be served in spite of a diagnostic."""

    ERROR = "error"         # no: it would not run, or would answer wrongly
    WARNING = "warning"     # yes, but something that its files say does not happen


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One diagnostic."""

    severity: Severity
    path: Path                      # the file, or the folder in which something is missing
    place: str = ""                 # line:column, counted from 1; empty where no line is at fault
    message: str
    remedy: str
    status: Status = Status.INVALID_ARG     # of a load that fails by it
    at_load: bool = False                   # Triton finds it as it loads the model, not before

    @property
    def line(self) -> int | None:
        """Counted from 1."""
        return int(self.place.partition(":")[0]) if self.place else None

    @property
    def column(self) -> int | None:
        """Counted from 1."""
        return int(self.place.partition(":")[2]) if self.place else None

    @property
    def where(self) -> str:
        """`path:line:column`, or the path alone."""
        return f"{self.path}:{self.place}" if self.place else str(self.path)


def first_error(diagnostics: Iterable[Diagnostic]) -> ConfigError | None:
    """Return the first diagnostic that is not a mere warning, as the error to raise; None: there is none."""
    for diagnostic in diagnostics:
        if diagnostic.severity is Severity.ERROR:
            return ConfigError(
                diagnostic.message, where=diagnostic.where, status=diagnostic.status, remedy=diagnostic.remedy
            )
    return None


def nearest(name: str, *, known: Iterable[str]) -> str:
    """Return the remedy for a name that is not known: the nearest that is, or those that there are."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"known there: {', '.join(names[:_LISTED]) or 'none'}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationContext:
    """One config with all that rules may ask for.

    Attributes:
        message: the `inference.ModelConfig`, with its backend.
        places: of the fields in the text; None: there is no text.
        source: the file that faults name.
        folder: of the model.
        backends: the names that `backend` may have.
        completed: whether what a backend knows from the model's file has been filled in.
    """

    message: Any
    places: SourceMap | None
    source: Path
    folder: Path
    backends: tuple[str, ...]
    completed: bool

    @property
    def name(self) -> str:
        """Of the model."""
        return self.folder.name

    def error(self, path: str, message: str, *, remedy: str, key: str | None = None) -> Diagnostic:
        """Make an error at a field, or at the entry of a map that has this key."""
        return self.diagnostic(Severity.ERROR, path, message, remedy=remedy, key=key)

    def warning(self, path: str, message: str, *, remedy: str, key: str | None = None) -> Diagnostic:
        """Make a warning at a field, or at the entry of a map that has this key."""
        return self.diagnostic(Severity.WARNING, path, message, remedy=remedy, key=key)

    def diagnostic(
        self, severity: Severity, path: str, message: str, *, remedy: str, key: str | None = None
    ) -> Diagnostic:
        """Make a diagnostic at a field, or at the entry of a map that has this key."""
        place = ""
        if self.places is not None:
            place = self.places.of(path) if key is None else self.places.of_key(path, key)
        return Diagnostic(severity=severity, path=self.source, place=place, message=message, remedy=remedy)
