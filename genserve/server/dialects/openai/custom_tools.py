"""Custom tools: the tools of OpenAI's APIs whose input is a text, as functions with one argument, `input`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from genserve.errors import require
from genserve.prompt import TextFormat, Tool
from genserve.text.message_parser import arguments_so_far


def custom_tool(name: str, description: str, form: Mapping[str, Any], *, place: str = "format") -> Tool:
    """Return the function that stands for a custom tool.

    Args:
        name: the tool's name for the model.
        description: what it does.
        form: the `format` of its input, as Responses has it.
        place: where the grammar of the format is in the tool.

    Raises:
        InvalidRequest: the name or the format is invalid.
    """
    text = {"type": "string", "description": "The input of the tool, as it is."}
    grammar = _grammar(form, place)
    if grammar is not None:
        text["description"] += f" It follows this grammar ({grammar.syntax}):\n{grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description, parameters=parameters, input_format=grammar)


def _grammar(form: Mapping[str, Any], place: str) -> TextFormat | None:
    """Return the grammar of a format; None: any text will do."""
    kind, syntax, definition = (form.get(name) for name in ("type", "syntax", "definition"))
    if kind in (None, "text"):
        return None
    require(kind == "grammar", "format.type", "must be text or grammar")
    require(syntax in ("lark", "regex"), f"{place}.syntax", "must be lark or regex")
    require(isinstance(definition, str) and definition != "", f"{place}.definition", "must be text")
    return TextFormat(syntax="lark" if syntax == "lark" else "regex", definition=str(definition))


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


class CustomInput:
    """Reads the input of a custom tool from the arguments of its function, piece by piece.

    The joined text does not depend on how the arguments were cut. Of cut arguments it is what there is.
    """

    def __init__(self) -> None:
        self._held = ""             # not read yet
        self._has_begun = False     # the input
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Add a piece of the arguments; return the text that it adds to the input."""
        if self._has_ended:
            return ""
        self._held += arguments
        if not self._has_begun:
            start = _START.match(self._held)
            if start is None:
                return ""
            self._has_begun, self._held = True, self._held[start.end() :]
        return self._read(_WHOLE)

    def close(self) -> str:
        """Return the text that the input has beyond that of all pieces."""
        if self._has_begun:
            return "" if self._has_ended else self._read(_REST)
        # No grammar holds a call in a thought, so that its arguments may have another form.
        given = arguments_so_far(self._held).get("input")
        return given if isinstance(given, str) else ""

    def _read(self, part: re.Pattern[str]) -> str:
        """Remove the part at the beginning of what is held, and return its text."""
        read = part.match(self._held)
        assert read is not None
        self._held = self._held[read.end() :]
        self._has_ended = self._held.startswith('"')
        text = str(json.loads(f'"{read[0]}"', strict=False))
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# The part of a JSON string that no later piece can change: half of a surrogate pair waits for the other one.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
_REST = re.compile(r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
