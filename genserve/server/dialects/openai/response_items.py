"""Response items: the input of the Responses API, item by item.

The input items of a request become messages for the model. They are stored as dicts of the form in which
OpenAI's API lists them: a message of the user has parts of the type `input_text`, each item has an id. Items
that mean nothing to the model here, such as the calls of tools that another server has run, are left out: a
session that began elsewhere can go on.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from genserve.errors import ResponseNotFound, require
from genserve.prompt import MAX_TOOLS, Message, Role, Tool, ToolCall
from genserve.server.dialects.content_parts import placeholder, result_text, unreadable_part
from genserve.server.dialects.openai.custom_tools import custom_arguments
from genserve.server.dialects.openai.response_tools import (
    CALLED_TOOLS,
    CUSTOM_CALL,
    FUNCTION_CALL,
    TOOL_SEARCH_CALL,
    LoadedTools,
    ResponseTool,
    ResponseTools,
    function_name,
    function_names,
)
from genserve.server.dialects.tool_offers import announced
from genserve.server.http.request_body import Items, TolerantBody, of_known_types, text_parts

Item: TypeAlias = dict[str, Any]
_Find: TypeAlias = Callable[[str], Item]

# The types of the text parts of each kind of content; the first one is how they are stored.
_INPUT_TYPES = ("input_text", "output_text", "text")
_OUTPUT_TYPES = ("output_text", "input_text", "text", "refusal")
_REASONING_TYPES = ("reasoning_text", "text")
_SUMMARY_TYPES = ("summary_text", "text")
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
}
# Calls of tools that the client runs, and their results.
_CALLS = frozenset({FUNCTION_CALL, CUSTOM_CALL, *CALLED_TOOLS})
_TOOL_SEARCH_OUTPUT = "tool_search_output"
_OUTPUTS = frozenset({_TOOL_SEARCH_OUTPUT, *(f"{call}_output" for call in _CALLS - {TOOL_SEARCH_CALL})})
_ADDITIONAL_TOOLS = "additional_tools"
_READ = frozenset({"message", "reasoning", "item_reference", _ADDITIONAL_TOOLS, *_CALLS, *_OUTPUTS})
_MAX_ID = 256


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
        description="`message`, `reasoning`, `item_reference`, `additional_tools`, or a call of a tool that "
        "the client runs and its result: `function_call`, `custom_tool_call`, `shell_call`, "
        "`local_shell_call`, `apply_patch_call`, each with an `_output`, `tool_search_call`, "
        "`tool_search_output`. Items of other types, such as `web_search_call`, are left out.",
    )
    id: str | None = Field(
        default=None,
        max_length=_MAX_ID,
        description="Its id; that of the stored item, of an `item_reference`.",
    )
    status: str | None = Field(
        default=None,
        description="A last message of the assistant that is `incomplete` is continued; an "
        "`apply_patch_call_output` may be `failed`.",
    )
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        default=None, description="Whose message it is."
    )
    content: _Parts = Field(default=None, description="The text of a message, or of reasoning.")
    call_id: str | None = Field(default=None, description="The id of the call.")
    name: str | None = Field(default=None, description="The name of the called tool.")
    namespace: str | None = Field(default=None, description="The namespace of the called tool.")
    arguments: str | dict[str, Any] | None = Field(
        default=None,
        description="The arguments of the call: JSON text, which may be cut; of a `tool_search_call`, an "
        "object.",
    )
    input: str | None = Field(default=None, description="The input of the custom tool.")
    action: dict[str, Any] | None = Field(default=None, description="What a shell was to do.")
    operation: dict[str, Any] | None = Field(default=None, description="What `apply_patch` was to do.")
    output: Any = Field(
        default=None,
        description="What the tool returned: text, parts of it, or JSON. A part that is not text, such as an "
        "image, is replaced by a placeholder.",
    )
    tools: ResponseTools | None = Field(
        default=None,
        max_length=MAX_TOOLS,
        description="The tools that a search has found, or that `additional_tools` adds.",
    )
    summary: _Parts = Field(default=None, description="A summary of reasoning.")


_AN_ID = rf"(?s:.{{0,{_MAX_ID}}})"
InputItems = Items[Annotated[InputItem, of_known_types(_READ.__contains__, id=_AN_ID)]]


def new_id(kind: str) -> str:
    """Return a new id of an item of a type."""
    return f"{_ID_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


def read_items(items: Iterable[InputItem], *, find: _Find) -> list[Item]:
    """Return the items of a request as they are stored.

    Args:
        items: the items of the request's input.
        find: returns the stored item of an id, or raises ResponseNotFound.

    Raises:
        InvalidRequest: an item lacks a field, or a message has a part that the model cannot read; `field` has
            the item's index.
        ResponseNotFound: an `item_reference` refers to no stored item.
    """
    places = ((f"input[{index}]", item) for index, item in enumerate(items))
    return [
        _referenced(item, place, find) if _is_reference(item) else _read_item(item, place)
        for place, item in places
    ]


def unused_kinds(items: Iterable[Item]) -> list[str]:
    """Return the types of the items that the model does not see."""
    return list(dict.fromkeys(item["type"] for item in items if item["type"] not in _READ))


def loaded_tools(items: Sequence[Item], *, num_earlier: int) -> list[LoadedTools]:
    """Return the tools that some items add; `num_earlier` of the items are of earlier responses."""
    return [
        LoadedTools(
            tools=_tools_of(item),
            place=f"input[{index - num_earlier}].tools" if index >= num_earlier else "",
            are_found=item["type"] == _TOOL_SEARCH_OUTPUT,
            are_described=item["type"] == _TOOL_SEARCH_OUTPUT and item["call_id"] is not None,
        )
        for index, item in enumerate(items)
        if item["type"] in (_TOOL_SEARCH_OUTPUT, _ADDITIONAL_TOOLS)
    ]


def called_names(items: Iterable[Item]) -> list[str]:
    """Return the names of the functions that some items call, in their order."""
    return list(dict.fromkeys(_function_name(item) for item in items if item["type"] in _CALLS))


def _tools_of(item: Item) -> list[ResponseTool]:
    return [ResponseTool.model_validate(tool) for tool in item["tools"]]


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
        case kind if kind in _CALLS:
            fields = _call(item, place)
        case kind if kind in _OUTPUTS or kind == _ADDITIONAL_TOOLS:
            fields = _result(item, kind, place)
        case _:
            fields = {}
    kind = item.type or "message"
    return {"id": item.id or new_id(kind), "type": kind, "status": item.status or "completed", **fields}


def _message(item: InputItem, place: str) -> Item:
    require(item.role is not None, f"{place}.role", "is missing")
    require(item.content is not None, f"{place}.content", "is missing")
    field, given = f"{place}.content", item.content or ()
    if item.role == "assistant":
        return {"role": item.role, "content": _parts(given, field, types=_OUTPUT_TYPES)}
    for index, part in enumerate(given):
        if part.type not in _INPUT_TYPES:
            raise unreadable_part(part.type, field=f"{field}[{index}]")
    return {"role": item.role, "content": _parts(given, field, types=_INPUT_TYPES)}


def _call(item: InputItem, place: str) -> Item:
    names: tuple[str, ...] = ("call_id", "name", "input" if item.type == CUSTOM_CALL else "arguments")
    if item.type in CALLED_TOOLS:
        names = ("call_id", CALLED_TOOLS[item.type].item_field)
    for name in names:
        # A search that another server has run has no id: its call is left out.
        is_given = getattr(item, name) is not None or (item.type == TOOL_SEARCH_CALL and name == "call_id")
        require(is_given, f"{place}.{name}", "is missing")
    fields = {name: getattr(item, name) for name in names}
    if item.type == FUNCTION_CALL and not isinstance(item.arguments, str):
        fields["arguments"] = json.dumps(item.arguments, ensure_ascii=False)
    if item.type in CALLED_TOOLS:
        field = CALLED_TOOLS[item.type].item_field
        require(isinstance(fields[field], dict), f"{place}.{field}", "must be an object")
        return {**fields, **CALLED_TOOLS[item.type].others}
    return fields | ({"namespace": item.namespace} if item.namespace else {})


def _result(item: InputItem, kind: str, place: str) -> Item:
    """Return the fields of the result of a call, or of additional tools."""
    if kind in (_TOOL_SEARCH_OUTPUT, _ADDITIONAL_TOOLS):
        require(item.tools is not None, f"{place}.tools", "is missing")
        tools = [tool.model_dump(exclude_unset=True) for tool in item.tools or ()]
        if kind == _ADDITIONAL_TOOLS:
            return {"role": "developer", "tools": tools}
        return {"call_id": item.call_id, "execution": "client", "tools": tools}
    # The id of a result of the local shell is that of its call.
    call_id = item.call_id or (item.id if kind == "local_shell_call_output" else None)
    output = item.output
    if kind == "apply_patch_call_output":
        return {"call_id": call_id, "output": output}
    require(output is not None, f"{place}.output", "is missing")
    if kind != "shell_call_output":
        output = _output_text(output, f"{place}.output")
    name = {"name": function_name(item.name, item.namespace)} if item.name else {}
    return {"call_id": call_id, **name, "output": output}


def _output_text(output: Any, place: str) -> str:
    """Return the result of a tool as text: text and parts as they are, anything else as JSON."""
    if isinstance(output, str):
        return output
    are_parts = isinstance(output, list) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) for part in output
    )
    if not are_parts:
        return json.dumps(output, ensure_ascii=False)
    for index, part in enumerate(output):
        is_complete = part["type"] not in _INPUT_TYPES or isinstance(part.get("text"), str)
        require(is_complete, f"{place}[{index}].text", "is missing")
    return result_text(
        (part["type"], part["text"] if part["type"] in _INPUT_TYPES else None) for part in output
    )


def _function_name(item: Item) -> str:
    """Return the name of the function that a stored call calls."""
    if item["type"] in CALLED_TOOLS:
        return CALLED_TOOLS[item["type"]].function.name
    return function_name(item["name"], item.get("namespace"))


def _tool_call(item: Item) -> ToolCall:
    """Return a stored call as the model sees it."""
    match item["type"]:
        case kind if kind in CALLED_TOOLS:
            arguments = CALLED_TOOLS[kind].arguments(item[CALLED_TOOLS[kind].item_field])
        case "custom_tool_call":
            arguments = custom_arguments(item["input"])
        case _:
            arguments = item["arguments"]
    return ToolCall(id=item["call_id"], name=_function_name(item), arguments=arguments)


def _result_text(item: Item) -> str:
    """Return the result of a call as the model sees it."""
    match item["type"]:
        case "apply_patch_call_output":
            return _output_text(item["output"] or item["status"], "output")
        case "shell_call_output":
            return json.dumps(item["output"], ensure_ascii=False)
        case _:
            return str(item["output"])


def _parts(parts: Iterable[ItemPart], place: str, *, types: Sequence[str]) -> list[Item]:
    """Return text parts as they are stored, with a placeholder for each other part."""
    read = []
    more: Item = {"annotations": [], "logprobs": []} if types[0] == "output_text" else {}
    for index, part in enumerate(parts):
        name = "refusal" if part.type == "refusal" else "text"
        text = getattr(part, name) if part.type in types else placeholder(part.type)
        require(text is not None, f"{place}[{index}].{name}", "is missing")
        read.append({"type": types[0], "text": text, **more})
    return read


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def messages_of(
    items: Sequence[Item], *, instructions: str | None, described: Mapping[str, Tool]
) -> tuple[Message, ...]:
    """Return the messages of a conversation.

    The items of one turn of the assistant (reasoning, text, calls) become one message. The instructions are
    the first one. A call that was cut, and has no result, is left out.

    Args:
        items: what `read_items` returned, or what a stored response has.
        instructions: the instructions of this request.
        described: the functions that the results of searches describe.
    """
    answered = {item["call_id"] for item in items if item["type"] in _OUTPUTS}
    messages = _Messages(answered=answered, described=described)
    if instructions:
        messages.add("system", instructions)
    for item in items:
        messages.add_item(item)
    return messages.all()


class _Messages:
    def __init__(self, *, answered: set[str | None], described: Mapping[str, Tool]) -> None:
        self._answered = answered               # the ids of the calls with results
        self._to_describe = dict(described)
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}        # the names of the functions, by the ids of their calls

    def all(self) -> tuple[Message, ...]:
        return tuple(
            Message(**message | {"tool_calls": tuple(message.get("tool_calls", ()))})
            for message in self._messages
        )

    def add(self, role: Role, content: str, **fields: Any) -> None:
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
            case "tool_search_call" | "tool_search_output" if item["call_id"] is None:
                pass
            case kind if kind in _CALLS:
                if item["status"] != "completed" and item["call_id"] not in self._answered:
                    return
                call = _tool_call(item)
                self._names[call.id] = call.name
                self._turn(without=()).setdefault("tool_calls", []).append(call)
            case kind if kind in _OUTPUTS:
                call_id = item["call_id"] or ""
                name = self._names.get(call_id) or item.get("name", "")
                text = self._found(item) if kind == _TOOL_SEARCH_OUTPUT else _result_text(item)
                self.add("tool", text, tool_call_id=call_id, name=name)

    def _found(self, item: Item) -> str:
        """Return the result of a search, with the descriptions of the tools that are new."""
        lines = []
        for name in dict.fromkeys(function_names(_tools_of(item))):
            lines.append(announced(name, self._to_describe.pop(name, None)))
        return "\n".join(lines) or "No tool was found."

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
