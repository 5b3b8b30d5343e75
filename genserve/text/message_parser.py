"""Message parser: splits an answer into reasoning, content and tool calls, delta by delta."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from genserve.completion import Completion, Delta, FinishReason, MessageDelta, joined_calls
from genserve.prompt import Message
from genserve.text.reasoning import ReasoningParser
from genserve.text.tool_call_parser import ToolCallParser


class MessageParser:
    """Reads one answer, delta by delta; the joined result does not depend on how the answer was cut.

    Args:
        reasoning: the parser of reasoning; None: the answer has none.
        tools: the parser of tool calls; None: the answer has none.

    Attributes:
        has_calls: whether a tool call has begun.
    """

    def __init__(self, *, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._token_ids: list[int] = []     # collected only if there may be reasoning
        self.has_calls = False

    def read(self, part: Delta | Completion) -> MessageDelta:
        """Read the next delta, or a whole answer; return what no later delta can change."""
        last = part.finish_reason is not None
        delta = MessageDelta(content=part.text)
        if self._reasoning is not None:
            self._token_ids += part.token_ids
            delta = self._reasoning.push(part.text, last=last)
        if self._tools is None:
            return delta
        called = self._tools.push(delta.content, last=last)
        self.has_calls = self.has_calls or bool(called.tool_calls)
        return replace(called, reasoning=delta.reasoning)

    @property
    def num_held(self) -> int:
        """The number of characters held back, since they may still become a tag or a call."""
        return sum(part.num_held for part in (self._reasoning, self._tools) if part is not None)

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens of the answer are reasoning; known after the last delta."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens(self._token_ids)

    def without_reasoning(self) -> MessageParser | None:
        """Return a parser that leaves reasoning in the content; None: all of the text is content."""
        return None if self._tools is None else MessageParser(reasoning=None, tools=self._tools)

    @property
    def within_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return self._tools is not None and self._tools.within_call

    def ends_with_calls(self, reason: FinishReason) -> bool:
        """Whether an answer that ended for this reason waits for the results of its calls."""
        return self.has_calls and reason is FinishReason.STOP and not self.within_call


def read_delta(parser: MessageParser | None, delta: Delta) -> MessageDelta:
    """Return what a delta adds to the message; without a parser the whole text is content."""
    return MessageDelta(content=delta.text) if parser is None else parser.read(delta)


def parsed_message(parser: MessageParser | None, completion: Completion) -> Message:
    """Return the message of a whole answer.

    If `max_tokens` or `stop` cut the arguments of a call, the call has the first part of them, which is not
    valid JSON.

    Args:
        parser: a parser that has read nothing yet; None: the whole text is content.
        completion: the whole answer.
    """
    if parser is None:
        return Message(role="assistant", content=completion.text)
    delta = parser.read(completion)
    calls = joined_calls(delta.tool_calls)
    return Message(
        role="assistant", content=delta.content, reasoning_content=delta.reasoning, tool_calls=calls
    )


def arguments_so_far(text: str) -> dict[str, Any]:
    """Return the arguments of a call as far as they were written; empty if the text is no JSON object."""
    try:
        read = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
