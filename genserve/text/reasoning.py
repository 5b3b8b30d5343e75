"""Reasoning: the part of an answer before its content. A parser splits it off, a grammar leaves it free."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.completion import MessageDelta, ToolCallDelta, joined_calls
from genserve.sampling.grammar_bitmask import ForkableGrammar, allow, forbid, is_allowed
from genserve.text.marks import mark_start
from genserve.text.tool_call_parser import ToolCallParser

# Text in reasoning that begins like a call but is none is read again from its second character on, since
# a call may begin inside. Without a limit, a text of nothing but beginnings of calls took minutes.
MAX_FALSE_CALLS = 16


class ThinkingTags(NamedTuple):
    """The marks around the reasoning of a family of models."""

    start: str      # a token
    end: str        # a token
    label: str = ""     # follows the first token, before the reasoning
    note: str = ""      # a token with which reasoning may begin, where the prompt rules out more of it

    @property
    def opening(self) -> str:
        """The text before the reasoning."""
        return self.start + self.label


# The formats by the name that `reasoning_format` in config.pbtxt may have. Without a name, the first format
# whose tags are tokens counts. Most models have the first tags, among them Qwen, DeepSeek, GLM and SmolLM.
REASONING_FORMATS: Mapping[str, ThinkingTags | None] = MappingProxyType(
    {
        "think": ThinkingTags("<think>", "</think>"),
        "mistral": ThinkingTags("[THINK]", "[/THINK]"),
        "gemma4": ThinkingTags("<|channel>", "<channel|>", label="thought"),
        "seed_oss": ThinkingTags("<seed:think>", "</seed:think>", note="<seed:cot_budget_reflect>"),
        "none": None,
    }
)
THINKING_TAGS = tuple(tags for tags in REASONING_FORMATS.values() if tags is not None)
THINKING_STARTS = tuple(tags.start for tags in THINKING_TAGS)


class _ReasoningState(Enum):
    BEFORE = auto()     # reasoning may begin
    INSIDE = auto()
    AFTER = auto()


class ReasoningParser:
    """Reads the text of one answer, piece by piece; the result does not depend on how the text was cut.

    The reasoning is the text between the tags at the beginning, without surrounding whitespace. The content
    is the text after them. A text without a tag at its beginning is all content, including later tags.

    Tool calls at the end of an answer are content even if the tag that ends reasoning is missing, since some
    models forget it. Tool calls followed by more reasoning or by the tag are reasoning.

    Args:
        begun: the prompt ends with the tag that begins reasoning. The answer may repeat it.
        tags: the tags of the model.
        tag_ids: the token ids of both tags.
        new_calls: makes a parser of tool calls; None: there are no tools.
    """

    def __init__(
        self,
        *,
        begun: bool = False,
        tags: ThinkingTags = THINKING_TAGS[0],
        tag_ids: tuple[int, int] = (-1, -1),
        new_calls: Callable[[], ToolCallParser] | None = None,
    ) -> None:
        self._opening, self._end = tags.opening, tags.end
        self._found = begun
        self._tag_ids = tag_ids
        self._num_tags = 0          # tags in the answer that begin reasoning
        self._calls = None if new_calls is None else _CallsAtEnd(new_calls)
        self._state = _ReasoningState.INSIDE if begun else _ReasoningState.BEFORE
        self._held = ""
        self._strip_start = True    # no reasoning, or no content after it, was returned yet

    @property
    def num_held(self) -> int:
        """The number of characters held back, since they may still become a tag or a call."""
        return len(self._held)

    def push(self, text: str, *, last: bool = False) -> MessageDelta:
        """Add a piece; return the reasoning and content that no later piece can change."""
        self._held += text
        if self._state is _ReasoningState.BEFORE:
            self._read_start(last=last)
        reasoning = self._read_reasoning(last=last) if self._state is _ReasoningState.INSIDE else ""
        return MessageDelta(reasoning=reasoning, content=self._read_content())

    def num_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of the answer are reasoning, without the tags. Call it after the last piece.

        Args:
            token_ids: the ids of the whole answer.
        """
        if not self._found:
            return 0
        (start, end), first = self._tag_ids, 0
        for _ in range(self._num_tags):
            first = token_ids.index(start, first) + 1 if start in token_ids[first:] else first
        try:
            return token_ids.index(end, first) - first
        except ValueError:      # the answer ended before its reasoning did
            return len(token_ids) - first

    def _read_start(self, *, last: bool) -> None:
        if self._strips_tag():
            self._state, self._found = _ReasoningState.INSIDE, True
        elif last or not self._opening.startswith(self._held.lstrip()):
            self._state, self._strip_start = _ReasoningState.AFTER, False

    def _strips_tag(self) -> bool:
        """Remove the tag that begins reasoning from the start of the text; return whether it was there."""
        text = self._held.lstrip()
        if not text.startswith(self._opening):
            return False
        self._held = text.removeprefix(self._opening)
        self._num_tags += 1
        return True

    def _read_reasoning(self, *, last: bool) -> str:
        if self._strip_start:
            while self._strips_tag():
                pass
            if self._opening.startswith(self._held.lstrip()) and not last:
                return ""
        before, tag, after = self._held.partition(self._end)
        if tag:
            reasoning = self._stripped(before.rstrip())
            self._state, self._held, self._strip_start = _ReasoningState.AFTER, after, True
            return reasoning
        num_certain = len(before) if self._calls is None else self._calls.start(before, last=last)
        if last:
            reasoning = self._stripped(before[:num_certain].rstrip())
            if num_certain < len(before):
                self._state, self._held, self._strip_start = _ReasoningState.AFTER, before[num_certain:], True
            return reasoning
        # A possible beginning of the tag is held back, and so is the whitespace before it.
        num_tag = max(n for n in range(len(self._end)) if before.endswith(self._end[:n]))
        certain = before[: min(num_certain, len(before) - num_tag)].rstrip()
        self._held = before[len(certain) :]
        if self._calls is not None:
            self._calls.forget(len(certain))
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


class _CallsAtEnd:
    """Finds the tool calls at the end of a text that arrives in pieces.

    It gives up after MAX_FALSE_CALLS texts that begin like a call and are none.
    """

    def __init__(self, new_parser: Callable[[], ToolCallParser]) -> None:
        self._new_parser = new_parser
        self._mark = new_parser().mark
        self._parser: ToolCallParser | None = None      # reads the text from `_start` on, which may be calls
        self._deltas: list[ToolCallDelta] = []
        self._start = 0         # the position in the text before which no calls begin
        self._num_read = 0      # characters
        self._num_tries = MAX_FALSE_CALLS

    def start(self, text: str, *, last: bool) -> int:
        """Return where the calls at the end of the text begin, or may begin if more text follows.

        Args:
            text: the text so far, without the forgotten characters.
            last: the text is complete, so only complete calls with valid JSON arguments count.
        """
        while self._num_tries:
            if self._parser is None:
                self._start = mark_start(text, self._mark, start=self._start)
                if self._start == len(text):
                    return self._start
                self._parser, self._deltas, self._num_read = self._new_parser(), [], self._start
            delta = self._parser.push(text[self._num_read :], last=last)
            self._num_read = len(text)
            self._deltas += delta.tool_calls
            if not delta.content and not (last and not self._are_whole()):
                return self._start
            self._num_tries -= bool(self._deltas)
            self._parser, self._start = None, self._start + 1
        return len(text)

    def forget(self, num_chars: int) -> None:
        """Count the text from a later character on; no calls begin before it."""
        self._start -= num_chars
        self._num_read -= num_chars

    def _are_whole(self) -> bool:
        assert self._parser is not None
        try:
            for call in joined_calls(self._deltas):
                json.loads(call.arguments)
        except ValueError:
            return False
        return bool(self._deltas)


class ReasoningGrammar:
    """Lets an answer reason freely before it follows a grammar; implements `ForkableGrammar`.

    Reasoning may have any tokens, except that no token may end the answer there if the grammar does not allow
    an empty answer. The mask is the only cost.

    Args:
        grammar: constrains the content after the reasoning.
        start_id: the token that begins reasoning.
        end_id: the token that ends reasoning.
        ending_ids: the tokens that end an answer.
        begun: the prompt ends within reasoning.
        newline_ids: the tokens that may precede reasoning, as GLM writes one.
    """

    def __init__(
        self,
        grammar: ForkableGrammar,
        *,
        start_id: int,
        end_id: int,
        ending_ids: Collection[int],
        begun: bool,
        newline_ids: Collection[int] = (),
    ) -> None:
        self._grammar = grammar
        self._start_id = start_id
        self._end_id = end_id
        self._ending_ids = frozenset(ending_ids)
        self._newline_ids = frozenset(newline_ids)
        self._forbidden_ids: Sequence[int] | None = None    # within reasoning; None: not computed yet
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
            if self._forbidden_ids is None:
                self._grammar.fill(mask)    # nothing but newlines was accepted yet
                within = [token_id for token_id in self._ending_ids if token_id < 32 * len(mask)]
                may_end = any(is_allowed(mask, token_id) for token_id in within)
                self._forbidden_ids = [] if may_end else within
            mask[:] = -1
            for token_id in self._forbidden_ids:
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
                return token_id not in (self._forbidden_ids or ())
            case _:
                if token_id not in self._newline_ids:
                    self._state = _ReasoningState.AFTER
                return self._grammar.accept(token_id)
        return True
