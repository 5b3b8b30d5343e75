"""Literal arguments: the arguments of a tool call as literals, and how they become JSON piece by piece."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from genserve.text.marks import Cut, past_space

# Keys without quotes, by whether strings have escapes; schemas may have keys with spaces.
_BARE_KEYS = {True: re.compile(r"[^:=,{}()\[\]\"'\n]+"), False: re.compile(r"[^:,{}\[\]\"\n]+")}
_WORD = re.compile(r"[^\s,{}()\[\]]+")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "\n": ""}
_ENDS = "})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralArguments:
    """Arguments as keys and literals, such as `city="Paris", days=[1]` or `city:<|"|>Paris<|"|>,days:[1]`.

    A reader takes the words of JSON and of Python, and keys with quotes or without.
    """

    quotes: tuple[str, ...]         # around a string; the first one is written
    assign: str                     # between an argument and its value
    separator: str                  # between arguments, and between parts of values
    nested_assign: str              # between a key and its value within a value
    has_escapes: bool               # strings and keys within values are JSON's or Python's, with escapes
    is_sorted: bool = False         # the template writes keys in the order of the alphabet

    @property
    def marks(self) -> str:
        """See `JsonArguments`."""
        return " ".join(self.quotes)

    @property
    def beginning(self) -> str:
        """See `JsonArguments`; arguments may begin with any key."""
        return ""

    @property
    def key_end(self) -> str:
        """The mark behind a key."""
        return self.assign

    @property
    def text_end(self) -> str:
        """The mark behind a string."""
        return self.quotes[0]

    def written(self, arguments: str) -> str:
        """See `JsonArguments`."""
        items = self._items(json.loads(arguments))
        return self.separator.join(f"{key}{self.assign}{self.value(part)}" for key, part in items)

    def value(self, value: Any) -> str:
        """Return a value in this syntax."""
        match value:
            case str() if self.has_escapes:
                return json.dumps(value, ensure_ascii=False)
            case str():
                return f"{self.quotes[0]}{value}{self.quotes[0]}"
            case bool() | None if self.has_escapes:
                return str(value)
            case Mapping():
                parts = (
                    f"{self.value(key) if self.has_escapes else key}{self.nested_assign}{self.value(part)}"
                    for key, part in self._items(value)
                )
                return "{" + self.separator.join(parts) + "}"
            case list():
                return "[" + self.separator.join(map(self.value, value)) + "]"
        return json.dumps(value)

    def reader(self, parameters: Mapping[str, Any]) -> LiteralReader:
        """See `JsonArguments`."""
        return LiteralReader(self)

    def _items(self, value: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return sorted(value.items(), key=lambda pair: pair[0].lower()) if self.is_sorted else [*value.items()]


class LiteralReader:
    """Reads `LiteralArguments`, to their end or a fault in the syntax; implements `ArgumentReader`."""

    def __init__(self, syntax: LiteralArguments) -> None:
        """Read the arguments of one call."""
        self.ended = False
        self._syntax = syntax
        self._open: list[str] = []          # the ends of the open objects and arrays
        self._is_first = True               # the part that follows is the first one
        self._quote = ""
        self._written: list[str] = []
        self._step: Callable[[str, int], int] = self._read_key

    def read(self, text: str) -> tuple[str, int]:
        """See `ArgumentReader`."""
        self._written, at = [], 0
        if not self._open:
            self._begin("}", "{")
        while not self.ended:
            try:
                at = self._step(text, at)
            except Cut:
                break
        return "".join(self._written), at

    def _begin(self, end: str, sign: str) -> None:
        self._written.append(sign)
        self._open.append(end)
        self._is_first = True
        self._step = self._read_key if end == "}" else self._read_item

    def _close(self, text: str, at: int) -> int:
        """End the innermost object or array; the end of the arguments is left to the format."""
        self._written.append(self._open.pop())
        self._is_first = False
        self._step = self._read_after
        if not self._open:
            self.ended = True
            return at
        return at + 1

    def _finish(self, at: int) -> int:
        """End the arguments where the text does not follow the syntax."""
        self._written += reversed(self._open)
        self.ended = True
        return at

    def _separate(self) -> None:
        self._written.append("" if self._is_first else ", ")
        self._is_first = False

    def _is_end(self, sign: str) -> bool:
        return sign in _ENDS if len(self._open) == 1 else sign == self._open[-1]

    def _read_key(self, text: str, at: int) -> int:
        start = past_space(text, at)
        if self._is_end(text[start]):
            return self._close(text, start)
        quote = self._quote_at(text, start)
        if quote:
            key, start = self._quoted(text, start, quote)
        else:
            found = _BARE_KEYS[self._syntax.has_escapes].match(text, start)
            if found is None:
                return self._finish(start)
            key, start = json.dumps(found[0].rstrip(), ensure_ascii=False), found.end()
        start = past_space(text, start)
        if text[start] not in ":=":
            return self._finish(at)
        self._separate()
        self._written.append(f"{key}: ")
        self._step = self._read_value
        return start + 1

    def _quoted(self, text: str, at: int, quote: str) -> tuple[str, int]:
        """Return the JSON of a key in quotes, and where the key ends; raises Cut."""
        reader, at = LiteralReader(self._syntax), at + len(quote)
        reader._quote, reader._step = quote, reader._read_text
        while reader._step == reader._read_text:
            at = reader._step(text, at)
        return '"' + "".join(reader._written), at

    def _read_item(self, text: str, at: int) -> int:
        at = past_space(text, at)
        if self._is_end(text[at]):
            return self._close(text, at)
        if not self._is_value(text, at):
            return self._finish(at)
        self._separate()
        self._step = self._read_value
        return at

    def _is_value(self, text: str, at: int) -> bool:
        return bool(text[at] in "{[" or self._quote_at(text, at) or _WORD.match(text, at))

    def _read_value(self, text: str, at: int) -> int:
        at = past_space(text, at)
        self._quote = self._quote_at(text, at)
        if self._quote:
            self._written.append('"')
            self._step = self._read_text
            return at + len(self._quote)
        if text[at] in "{[":
            self._begin("}" if text[at] == "{" else "]", text[at])
            return at + 1
        word = _WORD.match(text, at)
        if word is not None and word.end() == len(text):
            raise Cut
        self._written.append("null" if word is None else _json_of(word[0]))
        self._step = self._read_after
        return at if word is None else word.end()

    def _quote_at(self, text: str, at: int) -> str:
        """Return the quote at a place, if any; raises Cut if the text may become one."""
        for quote in self._syntax.quotes:
            if text.startswith(quote, at):
                return quote
            if quote.startswith(text[at:]):
                raise Cut
        return ""

    def _read_text(self, text: str, at: int) -> int:
        """Read a string up to the quote or an escape; raises Cut after what is certain."""
        signs = re.escape(self._quote[0]) + (r"\\" if self._syntax.has_escapes else "")
        found = re.compile(f"[{signs}]").search(text, at)
        end = len(text) if found is None else found.start()
        self._written.append(json.dumps(text[at:end], ensure_ascii=False)[1:-1])
        if end > at:
            return end
        if at == len(text):
            raise Cut
        if text[at] == "\\" and self._syntax.has_escapes:
            return self._read_escape(text, at)
        if text.startswith(self._quote, at):
            self._written.append('"')
            self._step = self._read_after
            return at + len(self._quote)
        if self._quote.startswith(text[at:]):
            raise Cut
        self._written.append(json.dumps(text[at], ensure_ascii=False)[1:-1])
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        kind = text[at + 1 : at + 2]
        length = {"x": 4, "u": 6, "U": 10}.get(kind, 2)
        if len(text) < at + length:
            raise Cut
        digits = text[at + 2 : at + length]
        if length > 2 and all(digit in string.hexdigits for digit in digits):
            code = int(digits, 16)      # of a character, or of half a surrogate pair
            self._written.append(json.dumps(chr(min(code, 0x10FFFF)))[1:-1])
            return at + length
        written = _ESCAPES.get(kind, kind if kind in "\\'\"/" else f"\\{kind}")
        self._written.append(json.dumps(written, ensure_ascii=False)[1:-1])
        return at + 2

    def _read_after(self, text: str, at: int) -> int:
        at = past_space(text, at)
        if self._is_end(text[at]):
            return self._close(text, at)
        if text[at] != ",":
            return self._finish(at)
        self._step = self._read_key if self._open[-1] == "}" else self._read_item
        return at + 1


def _json_of(word: str) -> str:
    """Return the JSON of a value without quotes; a word that is none of JSON's is a string."""
    known = _WORDS.get(word.lower())
    if known is not None:
        return known
    try:
        json.loads(word, parse_constant=_not_json)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


def _not_json(name: str) -> None:
    raise ValueError(name)
