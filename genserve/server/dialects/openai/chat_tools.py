"""OpenAI chat tools: the tools of `POST /v1/chat/completions`, as the functions that the model sees.

A custom tool is a function with a text as its only argument. Tools of other types, which a server would run,
are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from genserve.completion import ToolCallDelta
from genserve.errors import require
from genserve.prompt import Tool, ToolCall, inside, only_tool
from genserve.server.dialects.openai.custom_tools import CustomInput, custom_tool
from genserve.server.dialects.tool_offers import MAX_KIND, left_out_tool, require_some_tool
from genserve.server.http.request_body import Items, TolerantBody, of_known_types


class ToolFunction(TolerantBody):
    """What a tool is called, does and takes."""

    name: str = Field(description="Its name: letters, digits, `_`, `-` and `.`.")
    description: str | None = Field(default=None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of its arguments; none: it takes no arguments."
    )
    strict: bool | None = Field(
        default=None, description="Without effect: arguments are held to the schema in any case."
    )


class CustomFields(TolerantBody):
    """What a custom tool is called, does and takes."""

    name: str = Field(description="Its name: letters, digits, `_`, `-` and `.`.")
    description: str | None = Field(default=None, description="What it does, for the model.")
    format: dict[str, Any] | None = Field(
        default=None,
        description='The form of its input: `{"type": "text"}` or `{"type": "grammar", "grammar": '
        '{"syntax": "lark", "definition": ...}}`.',
    )

    @property
    def form(self) -> dict[str, Any]:
        """The form as Responses has it."""
        form = self.format or {}
        grammar = form.get("grammar")
        return {**form, **grammar} if isinstance(grammar, dict) else form


class ChatTool(TolerantBody):
    """A tool that the model may call."""

    type: str = Field(
        default="function",
        description="`function` or `custom`. Tools of other types, which the server would run, are left out.",
    )
    function: ToolFunction | None = Field(default=None, description="The function.")
    custom: CustomFields | None = Field(default=None, description="The custom tool.")


_TYPES = frozenset({"function", "custom"})
ChatTools = Items[Annotated[ChatTool, of_known_types(_TYPES.__contains__)]]


class ChatToolOffer:
    """The tools of one chat.

    Attributes:
        tools: the tools that the model sees.
        places: where each of them is in the request.
        custom: the names of the custom ones.
        left_out: the places and types of the others.

    Raises:
        InvalidRequest: an invalid tool.
    """

    def __init__(self, tools: Sequence[ChatTool]) -> None:
        self.tools: list[Tool] = []
        self.places: list[str] = []
        self.left_out: list[str] = []
        self.custom: set[str] = set()
        for index, tool in enumerate(tools):
            place = f"tools[{index}]"
            if tool.type not in _TYPES:
                self.left_out.append(left_out_tool(place, tool.type))
                continue
            require(getattr(tool, tool.type) is not None, f"{place}.{tool.type}", "is missing")
            with inside(f"{place}.{tool.type}"):
                self.tools.append(_offered(tool))
            self.places.append(place)
            if tool.type == "custom":
                self.custom.add(self.tools[-1].name)

    def require_some(self) -> None:
        """Raise InvalidRequest if all tools are left out."""
        require_some_tool(self.tools, self.left_out)


def _offered(tool: ChatTool) -> Tool:
    if tool.custom is not None:
        description = tool.custom.description or ""
        return custom_tool(tool.custom.name, description, tool.custom.form, place="format.grammar")
    assert tool.function is not None
    return Tool(
        name=tool.function.name,
        description=tool.function.description or "",
        parameters=tool.function.parameters or {},
    )


def _named(choice: Any) -> str | None:
    """Return the name in a choice of one tool; None: it names none."""
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
    named = choice.get(kind) if isinstance(kind, str) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    return name if isinstance(name, str) else None


def _choice(choice: Any) -> Any:
    """Validate a choice among the tools."""
    match choice:
        case "any":     # Mistral's word
            return "required"
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [*tools]}}:
            if all(isinstance(tool, Mapping) for tool in tools):
                return choice
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise ValueError(f"the type {kind[:MAX_KIND]!r} is not supported: the server runs no tools")
        case _ if _named(choice) is not None:
            return choice
    raise ValueError("must be none, auto, required, or an object that names tools")


ToolChoice = Annotated[
    Any,
    BeforeValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}),
]


def choice_fields(choice: Any, *, parallel: bool) -> dict[str, Any]:
    """Return the fields of `Chat` for a validated choice among the tools.

    Args:
        choice: the choice; entries that name no function or custom tool allow nothing.
        parallel: whether an answer may have several calls.

    Raises:
        InvalidRequest: a call is required, and all allowed tools are left out.
    """
    several = {"parallel_tool_calls": parallel}
    match choice:
        case None:
            return several
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}:
            names = tuple(name for tool in tools if (name := _named(tool)) is not None)
            if mode == "auto" and not names:
                return {"tool_choice": "none"}
            require(bool(names), "tool_choice", "names no tool that is in tools")
            return {"tool_choice": mode, "allowed_tools": names, **several}
        case str():
            return {"tool_choice": choice, **several}
    return only_tool(_named(choice) or "")


class CallChunks:
    """Writes the tool calls of one answer as the chunks of a stream have them.

    Args:
        custom: the names of the custom tools.
    """

    def __init__(self, custom: set[str]) -> None:
        self._custom = custom
        self._index = 0
        self._input: CustomInput | None = None      # of the call that is being written

    def add(self, call: ToolCallDelta) -> list[str]:
        """Return the JSON of the entries of `tool_calls` that bring a part of a call."""
        if not call.name and self._input is None:
            arguments = json.dumps(call.arguments)
            return [f'{{"index": {call.index}, "function": {{"arguments": {arguments}}}}}']
        if not call.name:
            return self._more(self._input.push(call.arguments)) if self._input else []
        entries = self.close()
        self._index = call.index
        named = f'"name": {json.dumps(call.name)}'
        if call.name in self._custom:
            self._input = CustomInput()
            text = json.dumps(self._input.push(call.arguments))
            written = f'"type": "custom", "custom": {{{named}, "input": {text}}}'
        else:
            written = (
                f'"type": "function", "function": {{{named}, "arguments": {json.dumps(call.arguments)}}}'
            )
        return [*entries, f'{{"index": {call.index}, "id": {json.dumps(call.id)}, {written}}}']

    def close(self) -> list[str]:
        """End the call; return the entries that complete its input."""
        reader, self._input = self._input, None
        return [] if reader is None else self._more(reader.close())

    def _more(self, text: str) -> list[str]:
        return [f'{{"index": {self._index}, "custom": {{"input": {json.dumps(text)}}}}}'] if text else []


def written_call(call: ToolCall, custom: set[str]) -> dict[str, Any]:
    """Return a whole call as a message has it; `custom` names the custom tools."""
    if call.name not in custom:
        return call.as_dict()
    reader = CustomInput()
    text = reader.push(call.arguments) + reader.close()
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
