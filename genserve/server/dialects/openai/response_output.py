"""Response output: the output items of the Responses API, and the events of a stream that bring them.

Items are made together with their events, so a whole response and a streamed one have the same items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeAlias

from genserve.completion import MessageDelta, ToolCallDelta
from genserve.server.dialects.logprob_formats import UNKNOWN_LOGPROB, NamedToken, ScoredToken
from genserve.server.dialects.openai.custom_tools import CustomInput
from genserve.server.dialects.openai.response_items import Item, new_id
from genserve.server.dialects.openai.response_tools import (
    CALLED_TOOLS,
    CUSTOM_CALL,
    FUNCTION_CALL,
    OfferedTool,
)
from genserve.server.http.sse_response import event

ItemStatus: TypeAlias = Literal["completed", "incomplete"]

# The events that bring the text of an item, without `.delta` and `.done`.
_TEXT_EVENTS: Mapping[str, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_NEW_PARTS: Mapping[str, Item] = {
    "reasoning": {"type": "reasoning_text", "text": ""},
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}


@dataclass(slots=True, kw_only=True)
class _OpenItem:
    """The item to which text is being added."""

    type: str
    id: str
    place: Mapping[str, Any]        # where the text of an event belongs
    call: ToolCallDelta | None      # the first delta of a call
    tool: OfferedTool | None        # that is called; None: only its function's name is known
    input: CustomInput | None       # reads the text of a call of a custom tool; None: it is none
    texts: list[str] = field(default_factory=list)
    logprobs: list[Item] = field(default_factory=list)

    def written(self, status: str) -> Item:
        """Return the item as it is; while it is in progress, without content."""
        item: Item = {"id": self.id, "type": self.type, "status": status}
        if self.call is not None:
            named = {"call_id": self.call.id, "name": self.tool.name if self.tool else self.call.name}
            if self.tool is not None and self.tool.namespace:
                named["namespace"] = self.tool.namespace
            return item | named | self.text()
        content = [] if status == "in_progress" else [self.part()]
        if self.type == "message":
            return item | {"role": "assistant", "content": content}
        return item | {"summary": [], "content": content, "encrypted_content": None}

    def text(self) -> dict[str, str]:
        """Return the field of the text, as the last event of it has it, too."""
        text = "".join(self.texts)
        match self.type:
            case "function_call":
                return {"arguments": text}
            case "custom_tool_call":
                return {"input": text}
        return {"text": text}

    def part(self) -> Item:
        """Return the content part."""
        part = _NEW_PARTS[self.type] | {"text": "".join(self.texts)}
        return part | {"logprobs": self.logprobs} if self.type == "message" else part


class OutputItems:
    """The output items of one response. The methods that change them return the events that say so.

    Args:
        tools: that the model may call, by the names of their functions.

    Attributes:
        items: the complete ones, as the response has them.
    """

    def __init__(self, tools: Mapping[str, OfferedTool]) -> None:
        self.items: list[Item] = []
        self._tools = tools
        self._open: _OpenItem | None = None
        self._before_delta = self._after_number = self._after_delta = ""    # around the texts of events
        self._numbers = count()

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Return the next event of the stream."""
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return event(json.dumps(data), name=kind)

    def add(self, delta: MessageDelta, *, scores: Sequence[ScoredToken] = ()) -> bytes:
        """Add the new part of an answer; `scores` are the log-probabilities of its content."""
        events = self._begun("reasoning") + self._text(delta.reasoning) if delta.reasoning else b""
        if delta.content:
            events += self.add_content(delta.content, scores=scores)
        for call in delta.tool_calls:
            events += self._called(call)
        return events

    def _called(self, call: ToolCallDelta) -> bytes:
        tool = self._tools.get(call.name) if call.name else self._open and self._open.tool
        events = self._begun(tool.call if tool else FUNCTION_CALL, call)
        return events + self._text(call.arguments) if call.arguments else events

    def add_content(self, text: str, *, scores: Sequence[ScoredToken]) -> bytes:
        """Add text to the message; see `add`."""
        return self._begun("message") + self._text(text, scores)

    def close(self, status: ItemStatus) -> bytes:
        """End the open item. A completed response has a message or a call, if only an empty message."""
        last = self._open.type if self._open else None
        begun = self._begun("message") if status == "completed" and last in (None, "reasoning") else b""
        return begun + self._closed(status)

    def _begun(self, kind: str, call: ToolCallDelta | None = None) -> bytes:
        """Begin an item, unless it is the open one."""
        if self._open is not None and self._open.type == kind and _index(call) == _index(self._open.call):
            return b""
        events = self._closed("completed")
        place: dict[str, Any] = {"item_id": new_id(kind), "output_index": len(self.items)}
        part = _NEW_PARTS.get(kind)
        if part is not None:
            place["content_index"] = 0
        tool = None if call is None else self._tools.get(call.name)
        self._open = _OpenItem(
            type=kind,
            id=place["item_id"],
            place=place,
            call=call,
            tool=tool,
            input=CustomInput() if kind == CUSTOM_CALL else None,
        )
        name = f"{_TEXT_EVENTS.get(kind)}.delta"
        self._before_delta = f'event: {name}\ndata: {{"type": "{name}", "sequence_number": '
        self._after_number = f', {json.dumps(place)[1:-1]}, "delta": '
        self._after_delta = ', "logprobs": []}\n\n' if kind == "message" else "}\n\n"
        if kind not in CALLED_TOOLS:
            events += self._item_event("added", self._open.written("in_progress"))
        if part is not None:
            events += self.event("response.content_part.added", place | {"part": part})
        return events

    def _text(self, text: str, scores: Sequence[ScoredToken] = ()) -> bytes:
        """Add text to the open item."""
        assert self._open is not None
        if self._open.input is not None:
            text = self._open.input.push(text)
        self._open.texts.append(text)
        if self._open.type not in _TEXT_EVENTS or not text:
            return b""
        if scores:
            logprobs = [_logprob(token) for token in scores]
            self._open.logprobs += logprobs
            fields = {**self._open.place, "delta": text, "logprobs": _without_bytes(logprobs)}
            return self.event(f"{_TEXT_EVENTS['message']}.delta", fields)
        number = next(self._numbers)
        written = f"{number}{self._after_number}{json.dumps(text)}"
        return f"{self._before_delta}{written}{self._after_delta}".encode()

    def _closed(self, status: ItemStatus) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open.input is not None and (rest := self._open.input.close()):
            self._open.input = None
            events = self._text(rest)
        item, self._open = self._open, None
        if item.type in CALLED_TOOLS:
            return self._own_call(item, status)
        text = item.text()
        logprobs = {"logprobs": _without_bytes(item.logprobs)} if item.type == "message" else {}
        if item.type in _TEXT_EVENTS:
            events += self.event(f"{_TEXT_EVENTS[item.type]}.done", {**item.place, **text, **logprobs})
        if item.call is None:
            events += self.event("response.content_part.done", {**item.place, "part": item.part()})
        return events + self._done(item.written(status))

    def _own_call(self, item: _OpenItem, status: ItemStatus) -> bytes:
        """Add a call of one of OpenAI's own tools, which no event brings in parts.

        A call that was cut is left out: half of a command should not run.
        """
        assert item.call is not None
        fields = CALLED_TOOLS[item.type].written("".join(item.texts))
        if fields is None:
            return b""
        written = {"id": item.id, "type": item.type, "call_id": item.call.id, **fields}
        # OpenAI's calls of `apply_patch` have no status "incomplete".
        last = "in_progress" if item.type == "apply_patch_call" and status == "incomplete" else status
        begun = self._item_event("added", {**written, "status": "in_progress"})
        return begun + self._done({**written, "status": last})

    def _done(self, item: Item) -> bytes:
        """Add a complete item."""
        events = self._item_event("done", item)
        self.items.append(item)
        return events

    def _item_event(self, what: str, item: Item) -> bytes:
        fields = {"output_index": len(self.items), "item": item}
        return self.event(f"response.output_item.{what}", fields)


def _index(call: ToolCallDelta | None) -> int | None:
    return None if call is None else call.index


def _logprob(token: ScoredToken) -> Item:
    return _named(token.own) | {"top_logprobs": [_named(other) for other in token.top]}


def _named(token: NamedToken) -> Item:
    return token.as_dict(unknown=UNKNOWN_LOGPROB) | {"bytes": [*token.spelled]}


def _without_bytes(logprobs: Sequence[Item]) -> list[Item]:
    """Return log-probabilities as events have them."""
    return [
        {
            "token": one["token"],
            "logprob": one["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in one["top_logprobs"]
            ],
        }
        for one in logprobs
    ]
