"""Argument syntax: how models write the arguments of a tool call, and how they become JSON piece by piece.

A `ToolFormat` has one of these syntaxes; `structured_output/argument_grammar.py` has their grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, TypeAlias

from genserve.text.literal_arguments import LiteralArguments
from genserve.text.marks import Cut, after, mark_start, squeezed
from genserve.text.parameter_types import json_type, parameter_schema, value_types

_JSON_SIGN = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_STREAMED = {"{": "object", "[": "array"}
_JSON_STARTS = '-0123456789{[tTfFnN'     # of values that are no strings, in JSON and in Python
_NULLS = ("null", "none")       # Python's words too: templates write values with Jinja's `string`


class ArgumentReader(Protocol):
    """Reads the arguments of one call, and turns them into JSON."""

    @property
    def ended(self) -> bool:
        """Whether the arguments have ended; `read` is not called again."""

    def read(self, text: str) -> tuple[str, int]:
        """Read a text; the next call gets its unread rest, followed by more text.

        Returns:
            the JSON that no later text can change, and how many characters were read. Its end, and what
            follows, belong to the format.
        """


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments that are a JSON object."""

    @property
    def marks(self) -> str:
        """All marks as one text, to search for special tokens."""
        return ""

    @property
    def beginning(self) -> str:
        """What arguments begin with, without whitespace."""
        return "{"

    @property
    def key_end(self) -> str:
        """The mark after a key, whatever the value; empty: keys are JSON."""
        return ""

    @property
    def text_end(self) -> str:
        """The mark after a value that is not JSON; empty: all values are JSON."""
        return ""

    def written(self, arguments: str) -> str:
        """Return a JSON object in this syntax."""
        return arguments

    def reader(self, parameters: Mapping[str, Any]) -> ArgumentReader:
        """Return a reader of the arguments of a call; `parameters` is the schema of the tool."""
        return _JsonReader()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    r"""Arguments between marks, such as `<parameter=city>\nParis\n</parameter>\n` for each.

    Strings are written as they are, and all other values as JSON. If the marks do not tell which of both a
    value is, the schema does: the first of its types that the text can be counts, and `null` before them, as
    in vLLM's parser for Qwen3-Coder. A string ends before the first `after_value`, which it cannot contain.
    A newline at the end of `before_text`, or at the start of `after_value`, is no part of the string.
    """

    before_key: str
    before_text: str        # between the key and a string
    before_json: str        # between the key and another value; may be the same
    after_value: str        # no spaces or newlines but around it
    untyped: tuple[str, ...] = ("string",)      # the types of a value about which the schema says nothing

    def __post_init__(self) -> None:
        for name in ("before_key", "before_text", "before_json", "after_value"):
            if not isinstance(value := getattr(self, name), str) or not value.strip():
                raise TypeError(f"{name} is not text")
        if len(self.after_value.split()) > 1:
            raise ValueError("after_value must be a mark without spaces")
        if not self.key_end:
            raise ValueError("before_text and before_json must begin with the same mark")

    @property
    def marks(self) -> str:
        """See `JsonArguments`."""
        return f"{self.before_key} {self.before_text} {self.before_json} {self.after_value}"

    @property
    def beginning(self) -> str:
        """See `JsonArguments`. Empty arguments are no text at all."""
        return squeezed(self.before_key)

    @property
    def text_end(self) -> str:
        """See `JsonArguments`."""
        return self.after_value

    @property
    def key_end(self) -> str:
        """See `JsonArguments`."""
        pairs = zip(self.before_text.split()[0], self.before_json.split()[0], strict=False)
        return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def has_types(self) -> bool:
        """Whether the marks tell strings from other values."""
        return self.before_text != self.before_json

    def types(self, parameters: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """Return the types that a parameter may have."""
        return value_types(parameter_schema(parameters, name), parameters) or self.untyped

    def written(self, arguments: str) -> str:
        """See `JsonArguments`."""
        return "".join(self._written(key, value) for key, value in json.loads(arguments).items())

    def _written(self, key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        before = self.before_text if is_text else self.before_json
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        return f"{self.before_key}{key}{before}{text}{self.after_value}"

    def reader(self, parameters: Mapping[str, Any]) -> ArgumentReader:
        """See `JsonArguments`."""
        return _TaggedReader(self, parameters)


# The closed set of syntaxes. Another one has the same members, and rules in `argument_grammar.py`.
ArgumentSyntax: TypeAlias = JsonArguments | TaggedArguments | LiteralArguments
JSON = JsonArguments()


class _JsonReader:
    """Finds the end of a JSON object or array; implements `ArgumentReader`."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escapes = False   # whether the next character is escaped

    def read(self, text: str) -> tuple[str, int]:
        """See `ArgumentReader`."""
        start = 1 if self._escapes and text else 0
        self._escapes = self._escapes and not text
        for sign in _JSON_SIGN.finditer(text, start):
            if sign[0].startswith("\\"):
                self._escapes = sign[0] == "\\"
            elif sign[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign[0] in "{[" else -1
                if self._depth == 0:
                    self.ended = True
                    return text[: sign.end()], sign.end()
        return text, len(text)


class _TaggedReader:
    """Reads `TaggedArguments`; implements `ArgumentReader`.

    Text that does not follow the syntax ends the arguments, or is left out behind a value.
    """

    def __init__(self, syntax: TaggedArguments, parameters: Mapping[str, Any]) -> None:
        self.ended = False
        self._syntax = syntax
        self._parameters = parameters
        self._end = syntax.after_value.strip()
        self._types: tuple[str, ...] = ()       # of the value
        self._json = _JsonReader()              # the value, if it is an object or an array
        self._separator = "{"                   # before the next key
        self._written: list[str] = []
        self._step: Callable[[str, int], int] = self._read_between

    def read(self, text: str) -> tuple[str, int]:
        """See `ArgumentReader`."""
        self._written, at, before = [], 0, None
        if self._separator == "{":
            self._write("{")
            self._separator = ""
        while before != self._step and not self.ended:      # each step reads all that it can
            before = self._step
            try:
                at = self._step(text, at)
            except Cut:
                break
        return "".join(self._written), at

    def _write(self, text: str) -> None:
        self._written.append(text)

    def _read_between(self, text: str, at: int) -> int:
        """Find out whether a parameter follows."""
        start = after(text, squeezed(self._syntax.before_key), at)
        if start is None:
            return self._finish(at)
        self._step = self._read_key
        return start

    def _finish(self, at: int) -> int:
        self._write("}")
        self.ended = True
        return at

    def _read_key(self, text: str, at: int) -> int:
        end = text.find(self._syntax.key_end, at)
        if end < 0:
            raise Cut
        syntax, key = self._syntax, text[at:end].strip()
        for mark in (syntax.before_text, syntax.before_json):
            start = after(text, squeezed(mark), end)
            if start is not None:
                break
        else:
            return self._finish(at)
        if mark.endswith("\n"):
            if start == len(text):
                raise Cut
            start += text[start] == "\n"
        self._types = self._syntax.types(self._parameters, key)
        if syntax.has_types:
            others = tuple(name for name in self._types if name != "string")
            self._types = ("string",) if mark == syntax.before_text else others
        self._write(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        self._step = self._read_value
        return start

    def _read_value(self, text: str, at: int) -> int:
        """Find out what a value is: a string, an object or an array, which are streamed, or another value."""
        end = mark_start(text, self._end, start=at)
        begun, has_ended = text[at:end], text.startswith(self._end, end)
        first = begun.lstrip()[:1]
        preferred = next((name for name in self._types if name != "null"), "")
        is_text = "string" in self._types and first and first not in _JSON_STARTS
        if is_text or (preferred == "string" and not ("null" in self._types and _may_be_null(begun))):
            self._write('"')
            self._step = self._read_text
            return at
        if "string" not in self._types and _STREAMED.get(first) in self._types:
            self._json = _JsonReader()
            self._step = self._read_json
            return len(text) - len(text[at:].lstrip())
        if not has_ended:
            raise Cut
        self._write(_json_of(self._without_newline(begun), self._types))
        self._step = self._read_rest
        return end

    def _read_text(self, text: str, at: int) -> int:
        end = mark_start(text, self._end, start=at)
        certain = text[at:end]
        has_ended = text.startswith(self._end, end)
        certain = self._without_newline(certain)
        self._write(json.dumps(certain, ensure_ascii=False)[1:-1])
        if not has_ended:
            return at + len(certain)
        self._write('"')
        self._step = self._read_rest
        return end

    def _without_newline(self, text: str) -> str:
        return text.removesuffix("\n") if self._syntax.after_value.startswith("\n") else text

    def _read_json(self, text: str, at: int) -> int:
        written, num_read = self._json.read(text[at:])
        self._write(written)
        if self._json.ended:
            self._step = self._read_rest
        return at + num_read

    def _read_rest(self, text: str, at: int) -> int:
        """Leave out what follows a value up to the mark."""
        end = mark_start(text, self._end, start=at)
        if text.startswith(self._end, end):
            self._step = self._read_between
            return end + len(self._end)
        return end


def _may_be_null(begun: str) -> bool:
    word = begun.strip().lower()
    return any(null.startswith(word) for null in _NULLS)


def _json_of(text: str, types: Sequence[str]) -> str:
    """Return the JSON of a value that ended; text that none of the types describes is a string."""
    word = text.strip()
    lowered = word.lower()
    if lowered in _NULLS and ("null" in types or "string" not in types):
        return "null"
    for name in types:
        if name == "string":
            break
        if name == "boolean" and lowered in ("true", "false"):
            return lowered
        if name != "boolean" and _is_json(word, name):
            return word
    if "string" not in types and _is_json(word, ""):
        return word
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str, name: str) -> bool:
    """Whether a text is JSON of a type; an empty name stands for any type."""
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    types = {"integer", "number"} if isinstance(value, float) else {json_type(value)}
    return not name or name in types or (name == "number" and "integer" in types)


def _not_json(name: str) -> None:
    raise ValueError(name)
