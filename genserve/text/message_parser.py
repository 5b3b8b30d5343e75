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
    """Reads one answer, delta by delta; the joined result does not depend on the cuts.

    Args:
        reasoning: the parser of its reasoning; None: it has none.
        tools: the parser of its tool calls; None: it has none.

    Attributes:
        has_calls: whether a tool call has begun.
    """

    def __init__(self, *, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._token_ids: list[int] = []     # if there may be reasoning
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
    def num_reasoning_tokens(self) -> int:
        """How many tokens of the answer are reasoning; after the last delta."""
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
        ended = reason in (FinishReason.END_OF_SEQUENCE, FinishReason.STOP_STRING)
        return self.has_calls and ended and not self.within_call


def read_delta(parser: MessageParser | None, delta: Delta) -> MessageDelta:
    """Return what a delta adds to the message; without a parser all of its text is content."""
    return MessageDelta(content=delta.text) if parser is None else parser.read(delta)


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
    delta = parser.read(completion)
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
