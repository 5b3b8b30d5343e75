"""Message parser: splits the text of an answer into reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import from_json

from genserve.completion import Completion, FinishReason, ToolCallDelta, joined_calls
from genserve.prompt import Message
from genserve.text.reasoning_parser import ReasoningParser


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """The new part of an answer, by the fields of its message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser(Protocol):
    """Reads the calls in the text of one answer, without its reasoning; see `text/tool_formats.py`."""

    @property
    def within_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""

    def push(self, text: str, *, last: bool) -> MessageDelta:
        """Add a piece; return the content and the calls that no later piece can change."""


class MessageParser:
    """Reads the text of one answer, piece by piece; the joined result does not depend on the cuts.

    Args:
        reasoning: the parser of its reasoning; None: it has none.
        tools: the parser of its tool calls; None: it has none.

    Attributes:
        has_calls: whether a tool call has begun.
    """

    def __init__(self, *, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.has_calls = False

    def push(self, text: str, *, last: bool = False) -> MessageDelta:
        """Add a piece; return the parts that no later piece can change.

        Args:
            text: the new text.
            last: whether the answer ends with it.
        """
        reasoning, content = "", text
        if self._reasoning is not None:
            read = self._reasoning.push(text, last=last)
            reasoning, content = read.reasoning, read.content
        if self._tools is None:
            return MessageDelta(reasoning=reasoning, content=content)
        called = self._tools.push(content, last=last)
        self.has_calls = self.has_calls or bool(called.tool_calls)
        return MessageDelta(reasoning=reasoning, content=called.content, tool_calls=called.tool_calls)

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens of the whole answer are reasoning; after the last piece."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens(token_ids)

    def without_reasoning(self) -> MessageParser | None:
        """Return a parser that leaves reasoning in the content; None: all of the text is content."""
        return None if self._tools is None else MessageParser(reasoning=None, tools=self._tools)

    @property
    def within_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return self._tools is not None and self._tools.within_call

    def ends_with_calls(self, reason: FinishReason) -> bool:
        """Whether an answer that ended for this reason waits for the results of its calls."""
        ended = reason in (FinishReason.END_OF_SEQUENCE, FinishReason.STOP_STRING)
        return self.has_calls and ended and not self.within_call


def parsed_message(parser: MessageParser | None, completion: Completion) -> Message:
    """Return the message of a whole answer.

    A call whose arguments were cut by `max_tokens` or `stop` has what there is of them, which is no valid
    JSON.

    Args:
        parser: of the answer, fresh; None: all of the text is content.
        completion: the whole answer.
    """
    if parser is None:
        return Message(role="assistant", content=completion.text)
    delta = parser.push(completion.text, last=True)
    calls = joined_calls(delta.tool_calls)
    return Message(
        role="assistant", content=delta.content, reasoning_content=delta.reasoning, tool_calls=calls
    )


def arguments_so_far(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of cut ones, what there is. Text that is no JSON object has none."""
    try:
        read = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
