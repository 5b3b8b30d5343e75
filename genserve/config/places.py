"""Places: where in the text of a config.pbtxt each field stands.

protobuf tells places for syntax errors alone, so a text that it has accepted is read a second time here,
for the places of its fields.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from google.protobuf import text_format

__all__ = ["Places"]

_CLOSING = {"{": "}", "<": ">"}


class Places:
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
