"""Parsed text: the text of an answer, as an output parser of the repository rewrites it."""

from __future__ import annotations

from collections.abc import Callable

from genserve.errors import ModelFailed
from genserve.generation.plugins import OutputParser, plugin_call
from genserve.generation.token_sequence import AnswerText

__all__ = ["ParsedText"]


class ParsedText:
    """What a parser makes of a text, piece by piece; `generation.AnswerText`.

    Its methods raise ModelFailed, which names the parser, where the parser raises or returns no text.
    """

    def __init__(self, text: AnswerText, parser: OutputParser, *, name: str) -> None:
        self._text = text
        self._parser = parser
        self._name = name

    @property
    def stop(self) -> str | None:
        """The stop string that has ended what goes into the parser."""
        return self._text.stop

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is now safe to show."""
        parsed = self._pushed(self._text.push(token_id))
        return parsed if self.stop is None else parsed + self._parsed(self._parser.flush)

    def flush(self) -> str:
        """Return what was held back; nothing where a stop has ended the text, since `push` has told all."""
        if self.stop is not None:
            return ""
        return self._pushed(self._text.flush()) + self._parsed(self._parser.flush)

    def _pushed(self, text: str) -> str:
        return self._parsed(lambda: self._parser.push(text)) if text else ""

    def _parsed(self, parse: Callable[[], str]) -> str:
        with plugin_call("output parser", self._name):
            parsed: object = parse()
        if not isinstance(parsed, str):
            raise ModelFailed(f"the output parser {self._name!r} returned something that is no text")
        return parsed
