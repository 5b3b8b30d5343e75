"""Reasoning: the part of an answer before its content, split off by a parser and left free by a grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from genserve.completion import MessageDelta
from genserve.sampling.grammar_bitmask import ForkableGrammar, allow, forbid

# The tags of Qwen, DeepSeek and SmolLM.
THINKING_TAGS = START, END = ("<think>", "</think>")


class _ReasoningState(Enum):
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
        self._state = _ReasoningState.INSIDE if begun else _ReasoningState.BEFORE
        self._held = ""
        self._strip_start = True    # of the reasoning, or of the content after it, nothing was returned yet

    def push(self, text: str, *, last: bool = False) -> MessageDelta:
        """Add a piece; return the reasoning and content that no later piece can change."""
        self._held += text
        if self._state is _ReasoningState.BEFORE:
            self._read_start(last=last)
        reasoning = self._read_reasoning(last=last) if self._state is _ReasoningState.INSIDE else ""
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
            self._state, self._held, self._found = _ReasoningState.INSIDE, text.removeprefix(START), True
        elif last or not START.startswith(text):
            self._state, self._strip_start = _ReasoningState.AFTER, False

    def _read_reasoning(self, *, last: bool) -> str:
        before, tag, after = self._held.partition(END)
        if tag:
            reasoning = self._stripped(before.rstrip())
            self._state, self._held, self._strip_start = _ReasoningState.AFTER, after, True
            return reasoning
        # A possible beginning of the tag is held back, and so is the whitespace before it.
        num_tag = 0 if last else max(n for n in range(len(END)) if before.endswith(END[:n]))
        certain = before[: len(before) - num_tag].rstrip()
        self._held = before[len(certain) :]
        return self._stripped(certain)

    def _read_content(self) -> str:
        if self._state is not _ReasoningState.AFTER:
            return ""
        content, self._held = self._held, ""
        return self._stripped(content)

    def _stripped(self, text: str) -> str:
        """Remove whitespace at the start of the reasoning or the content."""
        text = text.lstrip() if self._strip_start else text
        self._strip_start = self._strip_start and not text
        return text


class ReasoningGrammar:
    """Lets an answer reason freely before it follows a grammar; implements `ForkableGrammar`.

    Reasoning may have any tokens except the ones that end an answer. It costs nothing but the mask.

    Args:
        grammar: of what follows.
        start_id: the token that begins reasoning.
        end_id: the token that ends it.
        ending_ids: the tokens that end an answer.
        begun: the prompt ends within reasoning.
    """

    def __init__(
        self,
        grammar: ForkableGrammar,
        *,
        start_id: int,
        end_id: int,
        ending_ids: Collection[int],
        begun: bool,
    ) -> None:
        self._grammar = grammar
        self._start_id = start_id
        self._end_id = end_id
        self._ending_ids = frozenset(ending_ids)
        self._state = _ReasoningState.INSIDE if begun else _ReasoningState.BEFORE

    cut = False

    def fork(self) -> ForkableGrammar | None:
        """See `ForkableGrammar`."""
        return None if self._state is _ReasoningState.INSIDE else self._grammar.fork()

    @property
    def complete(self) -> bool:
        """See `StructuredOutputGrammar`."""
        return self._state is not _ReasoningState.INSIDE and self._grammar.complete

    @property
    def failure(self) -> str:
        """See `StructuredOutputGrammar`."""
        return "" if self._state is _ReasoningState.INSIDE else self._grammar.failure

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `StructuredOutputGrammar`."""
        if self._state is _ReasoningState.INSIDE:
            mask[:] = -1
            for token_id in self._ending_ids:
                if token_id < 32 * len(mask):
                    forbid(mask, token_id)
            return
        self._grammar.fill(mask)
        if self._state is _ReasoningState.BEFORE:
            allow(mask, self._start_id)

    def accept(self, token_id: int) -> bool:
        """See `StructuredOutputGrammar`."""
        match self._state:
            case _ReasoningState.BEFORE if token_id == self._start_id:
                self._state = _ReasoningState.INSIDE
            case _ReasoningState.INSIDE:
                self._state = _ReasoningState.AFTER if token_id == self._end_id else _ReasoningState.INSIDE
                return token_id not in self._ending_ids
            case _:
                self._state = _ReasoningState.AFTER
                return self._grammar.accept(token_id)
        return True
