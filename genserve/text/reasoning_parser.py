"""Reasoning parser: splits an answer that begins with a thought into reasoning and content."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["START", "THINKING_TAGS", "ReasoningDelta", "ReasoningParser"]


# Qwen's, DeepSeek's, SmolLM's.
THINKING_TAGS = START, END = ("<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """What a piece of text adds to either."""

    reasoning: str
    content: str


class _Place(Enum):
    BEFORE = auto()     # a thought may begin
    INSIDE = auto()
    BEHIND = auto()


class ReasoningParser:
    """Reads the text of one answer, piece by piece; where it is cut changes nothing.

    The reasoning is what stands between the tags at the beginning, without the blanks around it, and the
    content what follows these. A text that begins otherwise is content as it is, tags and all.
    """

    def __init__(self, *, begun: bool = False) -> None:
        """Begin a text; `begun`: the prompt has the tag that begins the thought."""
        self._place = _Place.INSIDE if begun else _Place.BEFORE
        self._held = ""
        self._blank = True      # of the reasoning, or the content behind it, nothing is out yet

    def push(self, text: str, *, last: bool = False) -> ReasoningDelta:
        """Take a piece; return what has become certain of both, which after the last one is all."""
        self._held += text
        if self._place is _Place.BEFORE:
            self._begin(last=last)
        reasoning = self._inside(last=last) if self._place is _Place.INSIDE else ""
        return ReasoningDelta(reasoning=reasoning, content=self._behind())

    def _begin(self, *, last: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(START):
            self._place, self._held = _Place.INSIDE, text.removeprefix(START)
        elif last or not START.startswith(text):
            self._place, self._blank = _Place.BEHIND, False

    def _inside(self, *, last: bool) -> str:
        before, tag, after = self._held.partition(END)
        if tag:
            reasoning = self._trimmed(before.rstrip())
            self._place, self._held, self._blank = _Place.BEHIND, after, True
            return reasoning
        # What may be the beginning of the tag is held back, and so are the blanks before it.
        num_tag = 0 if last else max(n for n in range(len(END)) if before.endswith(END[:n]))
        sure = before[: len(before) - num_tag].rstrip()
        self._held = before[len(sure) :]
        return self._trimmed(sure)

    def _behind(self) -> str:
        if self._place is not _Place.BEHIND:
            return ""
        content, self._held = self._held, ""
        return self._trimmed(content)

    def _trimmed(self, text: str) -> str:
        """Leave out the blanks at the beginning."""
        text = text.lstrip() if self._blank else text
        self._blank = self._blank and not text
        return text
