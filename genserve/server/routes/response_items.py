"""Response items: the input and the output of the Responses API, item by item.

Input items become messages for the model. They are stored as dicts of the form in which OpenAI's API lists
them: a message of the user has parts of the type `input_text`, each item has an id. Output items are made
together with their events, so a whole response and a streamed one have the same items.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from genserve.completion import MessageDelta, ToolCallDelta
from genserve.errors import InvalidRequest, require
from genserve.prompt import Message, Role, ToolCall, inside
from genserve.server.request_body import Items, TolerantBody, text_parts
from genserve.server.response_store import ResponseNotFound
from genserve.server.routes.logprob_formats import ID_PREFIX, ScoredToken
from genserve.server.sse_response import event

Item: TypeAlias = dict[str, Any]
_Find: TypeAlias = Callable[[str], Item]

# The types of the text parts of each kind of content; the first one is how they are stored.
_INPUT_TYPES = ("input_text", "output_text", "text")
_OUTPUT_TYPES = ("output_text", "input_text", "text", "refusal")
_REASONING_TYPES = ("reasoning_text", "text")
_SUMMARY_TYPES = ("summary_text", "text")
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
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


class ItemPart(TolerantBody):
    """A part of a message, of reasoning, or of the output of a function."""

    type: str = Field(description="`input_text`, `output_text`, `refusal`, `reasoning_text`, `summary_text`.")
    text: str | None = Field(default=None, description="Its text.")
    refusal: str | None = Field(default=None, description="The text of a part of the type `refusal`.")


_Parts = Annotated[
    Items[ItemPart] | None, BeforeValidator(text_parts, json_schema_input_type=str | list[ItemPart] | None)
]


class InputItem(TolerantBody):
    """One item of the input; which fields it needs depends on its type."""

    type: str | None = Field(
        default=None,
        description="`message`, `function_call`, `function_call_output`, `reasoning` or `item_reference`.",
    )
    id: str | None = Field(
        default=None, max_length=256, description="Its id; that of the stored item, of an `item_reference`."
    )
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(
        default=None, description="A last message of the assistant that is `incomplete` is continued."
    )
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        default=None, description="Whose message it is."
    )
    content: _Parts = Field(default=None, description="The text of a message, or of reasoning.")
    call_id: str | None = Field(default=None, description="The id of the function call.")
    name: str | None = Field(default=None, description="The name of the called function.")
    arguments: str | None = Field(default=None, description="The JSON text of the function's arguments.")
    output: _Parts = Field(default=None, description="What the function returned.")
    summary: _Parts = Field(default=None, description="A summary of reasoning.")


def new_id(kind: str) -> str:
    """Return a new id of an item of a type."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def read_items(
    items: Iterable[InputItem], *, earlier: Sequence[Item], find: _Find
) -> list[Item]:
    """Return the items of a request as they are stored.

    Args:
        items: of the request's input.
        earlier: the items before them.
        find: returns the stored item of an id, or raises ResponseNotFound.

    Raises:
        InvalidRequest: an invalid item, or one that the server does not support; `field` has its index.
        ResponseNotFound: an `item_reference` refers to no stored item.
    """
    called = {item["call_id"] for item in earlier if _is_call(item)}
    read = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        stored = _referenced(item, place, find) if _is_reference(item) else _read_item(item, place)
        if _is_call(stored):
            called.add(stored["call_id"])
        elif stored["type"] == "function_call_output":
            rule = f"is {stored['call_id'][:64]!r}, which no earlier function_call has"
            require(stored["call_id"] in called, f"{place}.call_id", rule)
        read.append(stored)
    return read


def _is_call(item: Item) -> bool:
    """Whether the model sees the item as a call: its arguments may be cut, if it is incomplete."""
    return bool(item["type"] == "function_call" and item["status"] != "incomplete")


def _is_reference(item: InputItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None)


def _referenced(item: InputItem, place: str, find: _Find) -> Item:
    require(item.id is not None, place, "must have a type, or the id of a stored item")
    try:
        return find(item.id or "")
    except ResponseNotFound as error:
        raise ResponseNotFound(error.message, remedy=error.remedy, field=f"{place}.id") from None


def _read_item(item: InputItem, place: str) -> Item:
    match item.type or "message":
        case "message":
            fields = _message(item, place)
        case "reasoning":
            fields = {
                "summary": _parts(item.summary or (), f"{place}.summary", types=_SUMMARY_TYPES),
                "content": _parts(item.content or (), f"{place}.content", types=_REASONING_TYPES),
                "encrypted_content": None,
            }
        case "function_call":
            fields = _call(item, place)
        case "function_call_output":
            require(item.call_id is not None, f"{place}.call_id", "is missing")
            require(item.output is not None, f"{place}.output", "is missing")
            parts = _parts(item.output or (), f"{place}.output", types=_INPUT_TYPES)
            fields = {"call_id": item.call_id, "output": _joined(parts)}
        case kind:
            field = f"{place}.type"
            message = f"{field} {kind[:64]!r} is not supported"
            raise InvalidRequest(message, field=field, remedy="leave it out")
    kind = item.type or "message"
    return {"id": item.id or new_id(kind), "type": kind, "status": item.status or "completed", **fields}


def _message(item: InputItem, place: str) -> Item:
    require(item.role is not None, f"{place}.role", "is missing")
    require(item.content is not None, f"{place}.content", "is missing")
    types = _OUTPUT_TYPES if item.role == "assistant" else _INPUT_TYPES
    return {"role": item.role, "content": _parts(item.content or (), f"{place}.content", types=types)}


def _call(item: InputItem, place: str) -> Item:
    for name in ("call_id", "name", "arguments"):
        require(getattr(item, name) is not None, f"{place}.{name}", "is missing")
    if item.status != "incomplete":
        with inside(place):
            ToolCall(id="", name=item.name or "", arguments=item.arguments or "").parsed_arguments()
    return {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}


def _parts(parts: Iterable[ItemPart], place: str, *, types: Sequence[str]) -> list[Item]:
    """Return text parts as they are stored; raises InvalidRequest for others, such as images."""
    read = []
    for index, part in enumerate(parts):
        field = f"{place}[{index}]"
        if part.type not in types:
            message = f"{field}.type {part.type[:64]!r} is not supported here"
            raise InvalidRequest(message, field=f"{field}.type", remedy=f"send parts of the type {types[0]}")
        name = "refusal" if part.type == "refusal" else "text"
        text = getattr(part, name)
        require(text is not None, f"{field}.{name}", "is missing")
        more: Item = {"annotations": [], "logprobs": []} if types[0] == "output_text" else {}
        read.append({"type": types[0], "text": text, **more})
    return read


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def messages_of(items: Sequence[Item], *, instructions: str | None) -> tuple[Message, ...]:
    """Return the messages of a conversation.

    The items of one turn of the assistant (reasoning, text, calls) become one message. The instructions are
    joined with system messages at the beginning, because many templates accept only one.

    Args:
        items: from `read_items`, or of stored responses.
        instructions: of this request.
    """
    messages = _Messages()
    if instructions:
        messages.add("system", instructions)
    for item in items:
        messages.add_item(item)
    return messages.all()


class _Messages:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}        # of the functions, by the ids of their calls

    def all(self) -> tuple[Message, ...]:
        return tuple(
            Message(**message | {"tool_calls": tuple(message.get("tool_calls", ()))})
            for message in self._messages
        )

    def add(self, role: Role, content: str, **fields: Any) -> None:
        last = self._messages[-1] if self._messages else {}
        if role == "system" and len(self._messages) == 1 and last["role"] == "system":
            last["content"] += f"\n\n{content}"
        else:
            self._messages.append({"role": role, "content": content, **fields})

    def add_item(self, item: Item) -> None:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                self._turn(without=("content", "tool_calls"))["content"] = _joined(item["content"])
            case "message":
                role: Role = "user" if item["role"] == "user" else "system"
                self.add(role, _joined(item["content"]))
            case "reasoning" if text := _joined(item["content"] or item["summary"]):
                turn = self._turn(without=("content", "tool_calls", "reasoning_content"))
                turn["reasoning_content"] = text
            case "function_call" if _is_call(item):
                self._names[item["call_id"]] = item["name"]
                call = ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"])
                self._turn(without=()).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                name = self._names.get(item["call_id"], "")
                self.add("tool", item["output"], tool_call_id=item["call_id"], name=name)

    def _turn(self, *, without: Iterable[str]) -> dict[str, Any]:
        """Return the last message, if it is the assistant's and lacks these fields, or a new one."""
        last = self._messages[-1] if self._messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(name) for name in without):
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        return last


def is_unfinished(items: Sequence[Item]) -> bool:
    """Whether the last item is a message of the assistant that the model should continue."""
    last = items[-1] if items else {}
    return last.get("role") == "assistant" and last["status"] != "completed"


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
        items: the complete ones, as the response has them.
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
