"""Edit: changes values in the text of a config.pbtxt, and leaves the rest as its author wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import text_encoding, text_format

from genserve.config.diagnostics import SourceMap
from genserve.config.parse import parse_message
from genserve.errors import RepositoryError

_STRING = r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'"""
_VALUE = re.compile(rf"(?:{_STRING})(?:(?:\s|#[^\n]*\n)*(?:{_STRING}))*|[\w.+-]+")
_STEP = re.compile(r"(?P<field>\w+)(?:\[(?P<index>\d+)\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """New values of a config."""

    fields: Mapping[str, int | str]         # by path: "max_batch_size", "input[1].data_type"
    parameters: Mapping[str, str]           # by key

    def __str__(self) -> str:
        return "; ".join(f"{name}: {value}" for name, value in {**self.fields, **self.parameters}.items())


def change_message(message: Any, change: ConfigChange) -> None:
    """Set the values in an `inference.ModelConfig`."""
    for path, value in change.fields.items():
        parent, name = _parent(message, path)
        setattr(parent, name, _number(parent, name, value))
    for key, value in change.parameters.items():
        message.parameters[key].string_value = value


def change_text(text: str, change: ConfigChange) -> str:
    """Return the text with new values; comments, order and layout stay, and so do equal values.

    A missing field is appended, if its path has no dot; so is a missing parameter, unless it is in a comment
    line, where `genserve export` writes it as an example.

    Raises:
        RepositoryError: the text does not follow the schema, or cannot be edited.
    """
    changed = text
    try:
        before, wanted = parse_message(text), parse_message(text)
        change_message(wanted, change)
        for path, value in change.fields.items():
            parent, name = _parent(before, path)
            if getattr(parent, name) != _number(parent, name, value):
                changed = _set_field(changed, path, _literal(parent, name, value))
        for key, value in change.parameters.items():
            if key not in before.parameters or before.parameters[key].string_value != value:
                changed = _set_parameter(changed, key, _quoted(value))
        is_changed = bool(parse_message(changed) == wanted)
    except (text_format.ParseError, IndexError):    # or a list is too short
        is_changed = False
    if not is_changed:
        raise RepositoryError("the config.pbtxt cannot be edited", remedy=f"set the values by hand: {change}")
    return changed


def _parent(message: Any, path: str) -> tuple[Any, str]:
    """Return the message with the last field of a path, and the name of that field."""
    *steps, name = path.split(".")
    for step in map(_STEP.fullmatch, steps):
        assert step is not None, path
        message = getattr(message, step["field"])
        if step["index"]:
            message = message[int(step["index"])]
    return message, name


def _number(parent: Any, name: str, value: int | str) -> int | str:
    """Return the value in a message: for an enum, its number."""
    kind = parent.DESCRIPTOR.fields_by_name[name].enum_type
    return value if kind is None else int(kind.values_by_name[value].number)


def _literal(parent: Any, name: str, value: int | str) -> str:
    is_text = isinstance(value, str) and parent.DESCRIPTOR.fields_by_name[name].enum_type is None
    return _quoted(str(value)) if is_text else str(value)


def _quoted(value: str) -> str:
    return f'"{text_encoding.CEscape(value, as_utf8=True)}"'


def _set_field(text: str, path: str, literal: str) -> str:
    position = SourceMap(text).of_value(path)
    return _replaced(text, position, literal) if position else _appended(text, f"{path}: {literal}")


def _set_parameter(text: str, key: str, literal: str) -> str:
    source_map = SourceMap(text)
    entry = source_map.entry("parameters", key)
    position = source_map.of_value(f"{entry}.value.string_value") if entry is not None else None
    if position:
        return _replaced(text, position, literal)
    line = f'parameters [ {{ key: "{key}" value: {{ string_value: {literal} }} }} ]'
    in_comment = re.compile(
        rf'^# parameters \[ \{{ key: "{re.escape(key)}" value: \{{ string_value: "[^"\n]*" \}} \}} \]',
        re.MULTILINE,
    )
    edited, count = in_comment.subn(lambda _: line, text, count=1)
    return edited if count else _appended(text, line)


def _replaced(text: str, position: str, literal: str) -> str:
    """Replace the scalar that begins at line:column."""
    line, _, column = position.partition(":")
    start = sum(len(before) + 1 for before in text.split("\n")[: int(line) - 1]) + int(column) - 1
    old = _VALUE.match(text, start)
    return text[:start] + literal + text[old.end() if old else start :]


def _appended(text: str, line: str) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = "" if text.endswith("\n") or not text else newline
    return f"{text}{gap}{line}{newline}"
