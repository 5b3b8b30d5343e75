"""Reasoning parser: splits an answer into the reasoning at its beginning and its content."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from genserve.completion import MessageDelta

# The tags of Qwen, DeepSeek and SmolLM.
THINKING_TAGS = START, END = ("<think>", "</think>")


class _State(Enum):
    BEFORE = auto()     # reasoning may begin
    INSIDE = auto()
    AFTER = auto()


class ReasoningParser:
    """Reads the text of one answer, piece by piece; the result does not depend on the cuts.

    The reasoning is the text between the tags at the beginning, without surrounding whitespace. The content
    is the text after them. A text without a tag at its beginning is all content, including later tags.

    Args:
        begun: the prompt ends with the tag that begins reasoning.
        tag_ids: of the tokens of both tags.
    """

    def __init__(self, *, begun: bool = False, tag_ids: tuple[int, int] = (-1, -1)) -> None:
        self._begun = self._found = begun
        self._tag_ids = tag_ids
        self._state = _State.INSIDE if begun else _State.BEFORE
        self._held = ""
        self._strip_start = True    # of the reasoning, or of the content after it, nothing was returned yet

    def push(self, text: str, *, last: bool = False) -> MessageDelta:
        """Add a piece; return the reasoning and content that no later piece can change."""
        self._held += text
        if self._state is _State.BEFORE:
            self._read_start(last=last)
        reasoning = self._read_reasoning(last=last) if self._state is _State.INSIDE else ""
        return MessageDelta(reasoning=reasoning, content=self._read_content())

    def num_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of the answer are reasoning, without the tags; after the last piece.

        Args:
            token_ids: of the whole answer.
        """
        if not self._found:
            return 0
        start, end = self._tag_ids
        first = token_ids.index(start) + 1 if start in token_ids and not self._begun else 0
        try:
            return token_ids.index(end, first) - first
        except ValueError:      # the answer ended before its reasoning did
            return len(token_ids) - first

    def _read_start(self, *, last: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(START):
            self._state, self._held, self._found = _State.INSIDE, text.removeprefix(START), True
        elif last or not START.startswith(text):
            self._state, self._strip_start = _State.AFTER, False

    def _read_reasoning(self, *, last: bool) -> str:
        before, tag, after = self._held.partition(END)
        if tag:
            reasoning = self._stripped(before.rstrip())
            self._state, self._held, self._strip_start = _State.AFTER, after, True
            return reasoning
        # A possible beginning of the tag is held back, and so is the whitespace before it.
        num_tag = 0 if last else max(n for n in range(len(END)) if before.endswith(END[:n]))
        certain = before[: len(before) - num_tag].rstrip()
        self._held = before[len(certain) :]
        return self._stripped(certain)

    def _read_content(self) -> str:
        if self._state is not _State.AFTER:
            return ""
        content, self._held = self._held, ""
        return self._stripped(content)

    def _stripped(self, text: str) -> str:
        """Remove whitespace at the start of the reasoning or the content."""
        text = text.lstrip() if self._strip_start else text
        self._strip_start = self._strip_start and not text
        return text
