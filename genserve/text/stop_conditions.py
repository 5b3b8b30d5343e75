"""Stop conditions: end the text of an answer at its first stop string or match of a regex."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol

from genserve.errors import InvalidRequest
from genserve.text.detokenizer import NO_TOKENS, Detokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop that a piece of text completes."""

    end: int                # characters of the piece up to the end of the stop
    length: int             # characters of the stop; it may begin in an earlier piece
    reason: str             # the stop string or expression


class StopFinder(Protocol):
    """Searches a text that arrives in pieces for stops."""

    def fork(self) -> StopFinder:
        """Return an independent copy that has read the same; compiled parts are shared."""

    @property
    def num_pending(self) -> int:
        """The number of last characters that may still become part of a stop."""

    def find(self, text: str) -> Stop | None:
        """Read a piece, and return the first stop that it completes; the rest of the piece is not read."""

    def skip(self, text: str) -> None:
        """Read a piece in which stops are ignored."""


class StopChecker:
    """The output text of an answer: whole characters, never past a stop; the engine's `AnswerText`.

    The stop that is complete first ends the text; if several end at the same character, the longest counts.
    Text that may still become part of a stop is held back.

    Stops are searched in the text including the names of the `hidden` tokens, although the names are not
    shown: a stop may be, or contain, the name of a special token.

    Args:
        detokenizer: a detokenizer that has read nothing yet.
        finders: search for stops.
        hidden: names of tokens that have no text, by id.
        include_stop: the text includes the stop, and nothing is held back.
        min_tokens: stops completed within this many tokens are ignored.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        finders: Sequence[StopFinder],
        *,
        hidden: Mapping[int, str] = NO_TOKENS,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._finders = finders
        self._hidden = hidden
        self._include_stop = include_stop
        self._num_tokens_left = min_tokens
        self._held = ""
        self._names: list[tuple[int, int]] = []     # where names of hidden tokens begin and end in `_held`
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop that ended the text, or None."""
        return self._stop

    def fork(self) -> StopChecker:
        """Return an independent copy with the same tokens."""
        fork = copy(self)
        fork._detokenizer = self._detokenizer.fork()
        fork._finders = [finder.fork() for finder in self._finders]
        fork._names = [*self._names]
        return fork

    def push(self, token_id: int) -> str:
        """Append a token, and return the text that cannot become part of a stop."""
        text = self._detokenizer.push(token_id)
        if not self._finders:
            return text
        if token_id in self._hidden:
            text = self._hidden[token_id]
            self._names.append((len(self._held), len(self._held) + len(text)))
        return self._read(text, may_end=self._count_token())

    def flush(self) -> str:
        """Return the text that was held back."""
        text = self._detokenizer.flush()
        if self._finders:
            text = self._read(text, may_end=self._num_tokens_left == 0)
        return text + self._released(self._held)

    def _count_token(self) -> bool:
        """Count a token; return whether it may end the text."""
        if self._num_tokens_left == 0:
            return True
        self._num_tokens_left -= 1
        return False

    def _read(self, text: str, *, may_end: bool) -> str:
        if self._stop is not None:
            return ""
        if not may_end:
            for finder in self._finders:
                finder.skip(text)
        elif stop := self._first_stop(text):
            return self._end(text, stop)
        num_held = 0 if self._include_stop else max([finder.num_pending for finder in self._finders])
        if not (num_held or self._held or self._names):
            return text
        pending = self._held + text
        return self._released(pending, num_held=num_held)

    def _end(self, text: str, stop: Stop) -> str:
        pending, self._stop = self._held + text, stop.reason
        num_kept = len(pending) - len(text) + stop.end
        text = self._released(pending[: num_kept if self._include_stop else num_kept - stop.length])
        self._held, self._names = "", []
        return text

    def _released(self, pending: str, *, num_held: int = 0) -> str:
        """Hold back the last characters; return those before them, without the names of hidden tokens."""
        end = len(pending) - num_held
        shown, at = "", 0
        for first, last in self._names:
            shown += pending[at : min(first, end)]
            at = min(last, end)
        self._names = [(max(first - end, 0), last - end) for first, last in self._names if last > end]
        self._held = pending[end:]
        return shown + pending[at:end]

    def _first_stop(self, text: str) -> Stop | None:
        first = None
        for finder in self._finders:
            stop = finder.find(text)
            if stop and (first is None or (stop.end, -stop.length) < (first.end, -first.length)):
                first = stop
        return first


class StopStrings:
    """Finds the first stop string that is completed in a text that arrives in pieces; a `StopFinder`.

    The result does not depend on how the text is cut into pieces. If two stop strings end at the same
    character, the longer one counts. Each character takes amortised constant time for any stop strings.

    Source: Aho and Corasick, "Efficient string matching" (CACM 18(6), 1975).

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._starts = frozenset(stop[0] for stop in stops)
        self._root = self._node = _automaton(stops)

    def fork(self) -> StopStrings:
        """Return an independent copy that has read the same; the automaton is shared."""
        return copy(self)

    @property
    def num_pending(self) -> int:
        """The number of last characters that may still grow into a stop string."""
        return self._node.depth

    def find(self, text: str) -> Stop | None:
        """Read a piece, and return the first stop string that it completes; the rest is not read."""
        if self._node is self._root and self._starts.isdisjoint(text):
            return None
        for end, char in enumerate(text, start=1):
            self._node = self._node.after(char)
            if self._node.match is not None:
                return Stop(end=end, length=len(self._node.match), reason=self._node.match)
        return None

    def skip(self, text: str) -> None:
        """Read a piece in which stop strings are ignored."""
        for char in text:
            self._node = self._node.after(char)


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of some stop string: the longest one that the text read so far ends with."""

    depth: int                                              # its length
    match: str | None = None                                # the longest stop string that it ends with
    fail: _Node | None = None                               # its longest proper suffix that is also a prefix
    children: dict[str, _Node] = field(default_factory=dict)

    def after(self, char: str) -> _Node:
        node = self
        while char not in node.children and node.fail is not None:
            node = node.fail
        return node.children.get(char, node)


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for depth, char in enumerate(stop, start=1):
            node = node.children.setdefault(char, _Node(depth=depth))
        node.match = stop
    queue = deque([root])  # breadth first: shorter prefixes before longer ones
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            child.fail = root if node.fail is None else node.fail.after(char)
            child.match = child.match or child.fail.match
            queue.append(child)
    return root


MAX_MATCH_CHARS = 256
END_OF_TEXT = 256       # the token id after those of the bytes


class StopRegex:
    r"""Finds the match that is completed first in a text that arrives in pieces; a `StopFinder`.

    The text ends at the first character that completes a match, so that `a+` ends it at the first `a`. If
    several matches end there, the longest counts; a match has at most MAX_MATCH_CHARS. The result does not
    depend on how the text is cut into pieces. A character takes constant time for any expression, because
    llguidance matches by derivatives, without backtracking, and reports the text that may still become a
    match.

    Args:
        pattern: a regex in the syntax of Rust's regex crate, without anchors (`^`, `$`, `\b`).

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
            InvalidRequest: the same as in `find`.
        """
        for char in text:
            self._read(char)
        self._forget()

    def _read(self, char: str) -> None:
        self._pending += char
        if not self._behind_any_text.consume_tokens([*char.encode()]):
            raise _rejected(self._pattern, "it needs too much memory for this text")

    def _match_length(self) -> int:
        """Return the number of characters in the match at the end of the text; 0: the match is too long."""
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
        raise _rejected(pattern, _first_error(matcher.get_error()))
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


def _first_error(error: str) -> str:
    """Return the line of llguidance's message that states the error, without the added context."""
    lines = error.splitlines()
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    return line.removeprefix("error: ").split("(in regex): ")[-1].split(" in regex /")[0]


def _rejected(pattern: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"stop_regex {pattern!r}: {reason}",
        field="stop_regex",
        remedy="use the syntax of Rust's regex crate, without anchors and \\b",
    )
