"""Stop regex: a regular expression whose first match ends a growing text."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import TYPE_CHECKING

from genserve.errors import InvalidRequest
from genserve.text.stop_strings import Stop

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_MATCH_CHARS = 256
END_OF_TEXT = 256       # the token id after those of the bytes


class StopRegex:
    r"""Finds the match that is completed first in a text that arrives in pieces; a `StopFinder`.

    The text ends at the first character that completes a match, so that `a+` ends it at the first `a`. Of the
    matches that end there the longest counts; none is longer than MAX_MATCH_CHARS. The result does not depend
    on how the text is cut into pieces. A character takes constant time for any expression, because llguidance
    matches by derivatives, without backtracking, and reports the text that may still become a match.

    Args:
        pattern: in the syntax of Rust's regex crate, without anchors (`^`, `$`, `\b`).

    Raises:
        InvalidRequest: the pattern is invalid, or matches the empty text; `field` is `stop_regex`.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._alone = _matcher(pattern, pattern)
        _matcher(f".(?:{pattern}).", pattern)   # rejects anchors, which are valid only in `_alone`
        self._behind_any_text = _matcher(f"(?s:.)*(?:{pattern})", pattern)
        if self._alone.is_accepting():
            raise _rejected(pattern, "it matches the empty text")
        self._pending = ""      # the last characters that may still become part of a match

    def fork(self) -> StopRegex:
        """Return an independent copy that has read the same; compiled states are shared."""
        fork = copy(self)
        fork._alone, fork._behind_any_text = self._alone.deep_copy(), self._behind_any_text.deep_copy()
        return fork

    @property
    def num_pending(self) -> int:
        """The number of last characters that may still become part of a match."""
        return len(self._pending)

    def find(self, text: str) -> Stop | None:
        """Read a piece, and return the first match that it completes; the rest is not read.

        Raises:
            InvalidRequest: the expression needs too much memory for this text.
        """
        for end, char in enumerate(text, start=1):
            self._read(char)
            if self._behind_any_text.is_accepting() and (length := self._match_length()):
                return Stop(end=end, length=length, reason=self._pattern)
        self._forget()
        return None

    def skip(self, text: str) -> None:
        """Read a piece in which matches are ignored.

        Raises:
            InvalidRequest: as `find`.
        """
        for char in text:
            self._read(char)
        self._forget()

    def _read(self, char: str) -> None:
        self._pending += char
        if not self._behind_any_text.consume_tokens([*char.encode()]):
            raise _rejected(self._pattern, "it needs too much memory for this text")

    def _match_length(self) -> int:
        """The number of last characters that are a match; 0: the match is too long."""
        for text in _endings(self._pending[-MAX_MATCH_CHARS:]):
            self._alone.reset()
            ids = [*text.encode()]
            if self._alone.try_consume_tokens(ids) == len(ids) and self._alone.is_accepting():
                return len(text)
        return 0

    def _forget(self) -> None:
        """Keep only the last characters that may still become part of a match."""
        self._alone.reset()
        self._pending = next(filter(self._may_begin, _endings(self._pending[1 - MAX_MATCH_CHARS :])), "")

    def _may_begin(self, text: str) -> bool:
        ids = [*text.encode()]
        return bool(self._alone.validate_tokens(ids) == len(ids))


def _endings(text: str) -> list[str]:
    return [text[start:] for start in range(len(text))]


def _matcher(regex: str, pattern: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(_bytes_as_tokens(), LLMatcher.grammar_from_regex(regex), log_level=0, limits=limits)
    if matcher.is_error():
        raise _rejected(pattern, _reason(matcher.get_error()))
    return matcher


@cache
def _bytes_as_tokens() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


class _Bytes:
    """A tokenizer for llguidance whose tokens are the bytes."""

    eos_token_id = END_OF_TEXT
    bos_token_id = None
    special_token_ids = (END_OF_TEXT,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return [*(text if isinstance(text, bytes) else text.encode())]


def _reason(error: str) -> str:
    """The line of llguidance's message that states the error, without the added context."""
    lines = error.splitlines()
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    return line.removeprefix("error: ").split("(in regex): ")[-1].split(" in regex /")[0]


def _rejected(pattern: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"stop_regex {pattern!r}: {reason}",
        field="stop_regex",
        remedy="use the syntax of Rust's regex crate, without anchors and \\b",
    )
