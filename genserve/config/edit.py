"""Edit: a few values of a config.pbtxt changed in its text; the rest stays as its author wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf import text_encoding, text_format

from genserve.config.parse import parse_message
from genserve.config.places import Places
from genserve.errors import RepositoryError

__all__ = ["edit_config"]

_STRING = r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'"""
_VALUE = re.compile(rf"(?:{_STRING})(?:(?:\s|#[^\n]*\n)*(?:{_STRING}))*|[\w.+-]+")


def edit_config(
    text: str, *, fields: Mapping[str, int | str] | None = None, parameters: Mapping[str, str] | None = None
) -> str:
    """Return the text with other values: comments, order and layout stay.

    Args:
        text: of a config.pbtxt.
        fields: value by path. What is not written yet goes to the end, which only a field without a dot
            in its path can.
        parameters: value by key. One that stands in a comment of its own line, as `genserve export` writes
            those with a default, goes there; any other new one to the end.

    Raises:
        RepositoryError: the text is not the schema, or written in a way that cannot be edited.
    """
    fields, parameters = fields or {}, parameters or {}
    edited = text
    try:
        wanted = parse_message(text)
        for path, value in fields.items():
            if _assign(wanted, path, value):
                edited = _set_field(edited, path, _literal(value))
        for key, value in parameters.items():
            if key not in wanted.parameters or wanted.parameters[key].string_value != value:
                wanted.parameters[key].string_value = value
                edited = _set_parameter(edited, key, _literal(value))
        is_right = bool(parse_message(edited) == wanted)
    except text_format.ParseError:
        is_right = False
    if not is_right:
        values = "; ".join(f"{name}: {value}" for name, value in {**fields, **parameters}.items())
        raise RepositoryError("the config.pbtxt cannot be edited", remedy=f"write it yourself: {values}")
    return edited


def _assign(message: Any, path: str, value: int | str) -> bool:
    """Set a field of a message; False if it has this value already."""
    parent, _, name = path.rpartition(".")
    for part in filter(None, parent.split(".")):
        message = getattr(message, part)
    is_new = bool(getattr(message, name) != value)
    setattr(message, name, value)
    return is_new


def _set_field(text: str, path: str, literal: str) -> str:
    place = Places(text).of_value(path)
    return _replaced(text, place, literal) if place else _appended(text, f"{path}: {literal}")


def _set_parameter(text: str, key: str, literal: str) -> str:
    places = Places(text)
    entry = places.entry("parameters", key)
    place = places.of_value(f"{entry}.value.string_value") if entry is not None else None
    if place:
        return _replaced(text, place, literal)
    line = f'parameters [ {{ key: "{key}" value: {{ string_value: {literal} }} }} ]'
    in_comment = re.compile(
        rf'^# parameters \[ \{{ key: "{re.escape(key)}" value: \{{ string_value: "[^"\n]*" \}} \}} \]',
        re.MULTILINE,
    )
    edited, count = in_comment.subn(lambda _: line, text, count=1)
    return edited if count else _appended(text, line)


def _literal(value: int | str) -> str:
    return str(value) if isinstance(value, int) else f'"{text_encoding.CEscape(value, as_utf8=True)}"'


def _replaced(text: str, place: str, literal: str) -> str:
    """Put a scalar in place of the one that begins at line:column."""
    line, _, column = place.partition(":")
    start = sum(len(before) + 1 for before in text.split("\n")[: int(line) - 1]) + int(column) - 1
    old = _VALUE.match(text, start)
    return text[:start] + literal + text[old.end() if old else start :]


def _appended(text: str, line: str) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    gap = "" if text.endswith("\n") or not text else newline
    return f"{text}{gap}{line}{newline}"
