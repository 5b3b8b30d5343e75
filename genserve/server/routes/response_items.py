"""Response items: the input of the Responses API, as items to store and as messages for the model.

Items are dicts of the form in which OpenAI's API lists them: a message of the user has parts of the type
`input_text`, each item has an id.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from genserve.errors import InvalidRequest, require
from genserve.prompt import Message, Role, ToolCall, inside
from genserve.server.response_store import ResponseNotFound
from genserve.server.routes.responses_body import InputItem, ItemPart

Item: TypeAlias = dict[str, Any]
_Find: TypeAlias = Callable[[str], Item]

# The types of the text parts of each kind of content; the first one is how they are stored.
_INPUT_TYPES = ("input_text", "output_text", "text")
_OUTPUT_TYPES = ("output_text", "input_text", "text", "refusal")
_REASONING_TYPES = ("reasoning_text", "text")
_SUMMARY_TYPES = ("summary_text", "text")
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


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
            case "reasoning":
                turn = self._turn(without=("content", "tool_calls", "reasoning_content"))
                turn["reasoning_content"] = _joined(item["content"] or item["summary"])
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
