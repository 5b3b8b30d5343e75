"""Response events: the output items of a response, and the events of its stream that add to them.

A whole response is what the events of its stream add up to, so both are made here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeAlias

from genserve.completion import ToolCallDelta
from genserve.server.routes.logprob_formats import ID_PREFIX, ScoredToken
from genserve.server.routes.response_items import Item, new_id
from genserve.server.sse_response import event
from genserve.text.message_parser import MessageDelta

ItemStatus: TypeAlias = Literal["completed", "incomplete"]

# The events that bring the text of an item, without `.delta` and `.done`.
_TEXT_EVENTS: Mapping[str, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}
_NEW_PARTS: Mapping[str, Item] = {
    "reasoning": {"type": "reasoning_text", "text": ""},
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}
# What OpenAI writes for a token that is very unlikely; JSON has no infinity.
_UNKNOWN_LOGPROB = -9999.0


@dataclass(slots=True, kw_only=True)
class _OpenItem:
    """The item to which text is being added."""

    type: str
    id: str
    place: Mapping[str, Any]        # where the text of an event belongs
    call: ToolCallDelta | None      # the first delta of a function call
    texts: list[str] = field(default_factory=list)
    logprobs: list[Item] = field(default_factory=list)

    def written(self, status: str) -> Item:
        """Return the item as it is; while it is in progress, without content."""
        item: Item = {"id": self.id, "type": self.type, "status": status}
        if self.call is not None:
            named = {"call_id": self.call.id, "name": self.call.name}
            return item | named | {"arguments": "".join(self.texts)}
        content = [] if status == "in_progress" else [self.part()]
        if self.type == "message":
            return item | {"role": "assistant", "content": content}
        return item | {"summary": [], "content": content, "encrypted_content": None}

    def part(self) -> Item:
        """Return the content part."""
        part = _NEW_PARTS[self.type] | {"text": "".join(self.texts)}
        return part | {"logprobs": self.logprobs} if self.type == "message" else part


class OutputItems:
    """The output items of one response. The methods that change them return the events that say so.

    Attributes:
        items: those that are complete, as the response has them.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: _OpenItem | None = None
        self._before_delta = self._after_number = self._after_delta = ""    # of the open item's events
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
            events += self._begun("function_call", call)
            events += self._text(call.arguments) if call.arguments else b""
        return events

    def add_content(self, text: str, *, scores: Sequence[ScoredToken] = ()) -> bytes:
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
        self._open = _OpenItem(type=kind, id=place["item_id"], place=place, call=call)
        name = f"{_TEXT_EVENTS[kind]}.delta"
        self._before_delta = f'event: {name}\ndata: {{"type": "{name}", "sequence_number": '
        self._after_number = f', {json.dumps(place)[1:-1]}, "delta": '
        self._after_delta = ', "logprobs": []}\n\n' if kind == "message" else "}\n\n"
        added = {"output_index": len(self.items), "item": self._open.written("in_progress")}
        events += self.event("response.output_item.added", added)
        if part is not None:
            events += self.event("response.content_part.added", place | {"part": part})
        return events

    def _text(self, text: str, scores: Sequence[ScoredToken] = ()) -> bytes:
        """Add text to the open item."""
        assert self._open is not None
        self._open.texts.append(text)
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
        item, self._open = self._open, None
        text = {"arguments" if item.call else "text": "".join(item.texts)}
        logprobs = {"logprobs": _without_bytes(item.logprobs)} if item.type == "message" else {}
        events = self.event(f"{_TEXT_EVENTS[item.type]}.done", {**item.place, **text, **logprobs})
        if item.call is None:
            events += self.event("response.content_part.done", {**item.place, "part": item.part()})
        written = item.written(status)
        events += self.event("response.output_item.done", {"output_index": len(self.items), "item": written})
        self.items.append(written)
        return events


def _index(call: ToolCallDelta | None) -> int | None:
    return None if call is None else call.index


def _logprob(token: ScoredToken) -> Item:
    top = [_named(name, logprob) for name, logprob in token.top]
    return _named(token.name, token.logprob) | {"top_logprobs": top}


def _named(name: str, logprob: float | None) -> Item:
    spelled = [] if name.startswith(ID_PREFIX) else list(name.encode())
    return {"token": name, "logprob": _UNKNOWN_LOGPROB if logprob is None else logprob, "bytes": spelled}


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
