"""Prompt: the input of a text model, validated: a text, token ids, or a chat with tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast, get_args

from genserve.errors import InvalidRequest, require

Role = Literal["system", "user", "assistant", "tool"]
ToolMode = Literal["none", "auto", "required"]
_ROLES = get_args(Role)
_TOOL_MODES = get_args(ToolMode)

COMPLETION_TOKENS = 16      # the default `max_tokens` of `/v1/completions` and `complete`
# Bounds of what a template iterates over, while the chats of other clients wait; the bytes of a body are the
# limit of what a client sends. An agent's session has four items per step, and MCP servers hundreds of tools.
MAX_CHAT_MESSAGES = 16_384
MAX_TOOLS = 1024
# The efforts that turn reasoning off.
NO_REASONING = "none"
NO_EFFORTS = frozenset({NO_REASONING, "minimal"})
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """The form of a text: a grammar in llguidance's variant of Lark, or a regular expression as in Rust."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Raises:
        InvalidRequest: the name is invalid, the description is not text, or the parameters are no object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)     # a JSON schema; empty: no arguments
    in_messages: bool = False       # a message describes it, so the chat template does not
    input_format: TextFormat | None = None      # of the text `input`, which is then the only argument

    def __post_init__(self) -> None:
        valid = isinstance(self.name, str) and _TOOL_NAME.fullmatch(self.name) is not None
        require(valid, "name", "must be 1 to 128 letters, digits, '_', '-' or '.'")
        require(isinstance(self.description, str), "description", "must be text")
        require(isinstance(self.parameters, Mapping), "parameters", "must be a JSON schema: an object")

    def as_dict(self) -> dict[str, Any]:
        """Return the tool in OpenAI's JSON, which templates expect too."""
        parameters = dict(self.parameters) or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def may_be_object(schema: Mapping[str, Any]) -> bool:
    """Whether the `type` of a JSON schema, a type or a list of types, allows an object."""
    types = schema.get("type")
    return types is None or "object" in (types if isinstance(types, list) else [types])


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str      # a JSON object as text; incomplete if `max_tokens` or `stop` ended the answer in it

    def parsed_arguments(self) -> dict[str, Any]:
        """Return the arguments as an object.

        Raises:
            InvalidRequest: the arguments are not the JSON text of an object.
        """
        try:
            parsed = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        require(isinstance(parsed, dict), "arguments", "must be the JSON text of an object")
        return cast("dict[str, Any]", parsed)

    def shown_arguments(self) -> dict[str, Any] | str:
        """Return the arguments as chat templates get them: an object; a text that is none stays a text."""
        try:
            return self.parsed_arguments()
        except InvalidRequest:
            return self.arguments

    def as_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's JSON."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat.

    Raises:
        InvalidRequest: the role is unknown, the content is not text, or a field belongs to another role.
    """

    role: Role
    content: str = ""
    reasoning_content: str = ""     # the reasoning before the answer; the template decides what it shows
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""          # in a tool's message, the call that it answers
    name: str = ""                  # the name of the tool, or of the participant

    def __post_init__(self) -> None:
        require(self.role in _ROLES, "role", "must be one of system, user, assistant, tool")
        for name in ("content", "reasoning_content", "tool_call_id", "name"):
            require(isinstance(getattr(self, name), str), name, "must be text")
        for name, role in _FIELDS_OF_ROLES.items():
            if self.role != role:
                require(not getattr(self, name), name, f"is only for messages of the {role}")

    def as_dict(self) -> dict[str, Any]:
        """Return the message in OpenAI's JSON, without empty fields."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("reasoning_content", "tool_call_id", "name"):
            if value := getattr(self, name):
                fields[name] = value
        if self.tool_calls:
            fields["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return fields


_FIELDS_OF_ROLES = {"reasoning_content": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How a model is to reason before it answers, as far as its chat template and its tokens allow that.

    What is None stays as the template has it.
    """

    effort: str | None = None       # one word, such as low, medium or high
    enabled: bool | None = None
    budget: int | None = None       # tokens; `SamplingParams.thinking_token_budget` comes first

    @property
    def is_enabled(self) -> bool | None:
        """Whether the model is to reason: as stated, or as it follows from effort and budget."""
        if self.enabled is not None:
            return self.enabled
        if self.budget == 0 or self.effort in NO_EFFORTS:
            return False
        return None if self.effort is None else True

    def or_else(self, other: Reasoning) -> Reasoning:
        """Return what is asked for here, and by the other where this asks for nothing."""
        return Reasoning(
            effort=other.effort if self.effort is None else self.effort,
            enabled=other.enabled if self.enabled is None else self.enabled,
            budget=other.budget if self.budget is None else self.budget,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The turns of a chat, with the tools that the model may call and the options of the chat template.

    Raises:
        InvalidRequest: there is no message, or more than MAX_CHAT_MESSAGES; `continue_final_message` and
            `add_generation_prompt` are both set; two tools have the same name; or the chosen tool is missing.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolMode = "auto"              # required: the answer consists of calls
    allowed_tools: tuple[str, ...] = ()         # the names of the tools that may be called; empty: all
    parallel_tool_calls: bool = True            # several calls in one answer
    add_generation_prompt: bool | None = None   # begin the assistant's turn; None: unless one is continued
    continue_final_message: bool = False        # leave the last turn open, for the model to continue
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)    # variables of the template
    reasoning: Reasoning = Reasoning()          # how the model reasons before it answers
    drops_oldest_turns: bool = False            # drop turns until the chat fits into the context

    def __post_init__(self) -> None:
        _require_some_messages(len(self.messages))
        require(
            not (self.continue_final_message and self.add_generation_prompt),
            "continue_final_message",
            "cannot be combined with add_generation_prompt",
        )
        names = {tool.name for tool in self.tools}
        rule = f"has {len(self.tools)} tools; the limit is {MAX_TOOLS}"
        require(len(self.tools) <= MAX_TOOLS, "tools", rule)
        require(len(names) == len(self.tools), "tools", "has two tools with the same name")
        require(self.tool_choice in _TOOL_MODES, "tool_choice", "must be none, auto or required")
        require(bool(names) or self.tool_choice != "required", "tool_choice", "needs tools")
        require(names.issuperset(self.allowed_tools), "tool_choice", "names a tool that is not in tools")
        rule = f"names {len(self.allowed_tools)} tools; the limit is {MAX_TOOLS}"
        require(len(self.allowed_tools) <= MAX_TOOLS, "tool_choice", rule)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool for tool in self.tools if not self.allowed_tools or tool.name in self.allowed_tools)

    @property
    def template_tools(self) -> tuple[Tool, ...]:
        """The tools that the chat template describes."""
        return tuple(tool for tool in self.tools if not tool.in_messages)

    @property
    def later_turns(self) -> list[int]:
        """The indices of the user messages that begin a turn, without the first turn."""
        first = self._num_leading_system_messages
        roles = enumerate(message.role for message in self.messages)
        return [index for index, role in roles if role == "user" and index > first]

    def from_turn(self, begin: int) -> Chat:
        """Return the chat without the turns before this index; the system messages before the first stay."""
        kept = self.messages[: self._num_leading_system_messages]
        return replace(self, messages=(*kept, *self.messages[begin:]))

    @property
    def _num_leading_system_messages(self) -> int:
        return next((i for i, message in enumerate(self.messages) if message.role != "system"), 0)

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        return not self.continue_final_message and self.add_generation_prompt is not False


# The input of a text model: a text, token ids, or a chat.
Prompt: TypeAlias = str | Sequence[int] | Chat

# A chat, as callers write it; a text alone is one user message.
Messages: TypeAlias = str | Sequence[Message | Mapping[str, Any]] | Chat


# The tools of a chat, and the tool choice, as callers write them, in OpenAI's JSON.
Tools: TypeAlias = Sequence[Tool | Mapping[str, Any]]
ToolChoice: TypeAlias = ToolMode | Mapping[str, Any]


def read_chat(
    messages: Messages, *, tools: Tools | None = None, tool_choice: ToolChoice | None = None
) -> Chat:
    """Return a chat with messages, tools and a tool choice.

    Raises:
        InvalidRequest: see `read_messages`, `read_tools` and `Chat`.
    """
    chat = messages if isinstance(messages, Chat) else Chat(messages=read_messages(messages))
    if tools is not None:
        chat = replace(chat, tools=read_tools(tools))
    return chat if tool_choice is None else _with_choice(chat, tool_choice)


def _with_choice(chat: Chat, choice: ToolChoice) -> Chat:
    if isinstance(choice, str):
        return replace(chat, tool_choice=choice)
    named = choice.get("function") if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    require(isinstance(name, str), "tool_choice", "must be none, auto, required, or name a function")
    return replace(chat, **only_tool(str(name)))


def only_tool(name: str) -> dict[str, Any]:
    """Return the fields of a `Chat` that must be answered by one call of this tool."""
    return {"tool_choice": "required", "allowed_tools": (name,), "parallel_tool_calls": False}


def read_messages(messages: str | Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """Validate messages; a text alone is one user message, and the role `developer` is OpenAI's for `system`.

    Raises:
        InvalidRequest: there is no message, or more than MAX_CHAT_MESSAGES, or a message is invalid; `field`
            has its index.
    """
    if isinstance(messages, str):
        return (Message(role="user", content=messages),)
    _require_some_messages(len(messages))
    return tuple(_read_message(message, index) for index, message in enumerate(messages))


_MESSAGE_KEYS = frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"})


def _require_some_messages(number: int) -> None:
    require(number > 0, "messages", "must not be empty")
    rule = f"has {number} messages; the limit is {MAX_CHAT_MESSAGES}"
    require(number <= MAX_CHAT_MESSAGES, "messages", rule)


def _read_message(message: Message | Mapping[str, Any], index: int) -> Message:
    if isinstance(message, Message):
        return message
    place = f"messages[{index}]"
    require("role" in message, place, "must have the key role")
    given = {key: value for key, value in message.items() if value is not None}
    if given.get("role") == "developer":
        given["role"] = "system"
    for key in given:
        if key not in _MESSAGE_KEYS:
            raise InvalidRequest(f"{place} has the unknown key {str(key)[:64]!r}", field=place)
    require("content" in given or "tool_calls" in given, f"{place}.content", "is missing")
    with inside(place):
        written = given.pop("tool_calls", ())
        require(isinstance(written, Sequence), "tool_calls", "must be a list")
        calls = tuple(_read_tool_call(call, index) for index, call in enumerate(written))
        return Message(**given, tool_calls=calls)


def _read_tool_call(call: ToolCall | Mapping[str, Any], index: int) -> ToolCall:
    """Return a call from OpenAI's JSON."""
    if isinstance(call, ToolCall):
        return call
    place = f"tool_calls[{index}]"
    function = _function_of(call, place)
    for name in ("name", "arguments"):
        require(isinstance(function.get(name), str), f"{place}.function.{name}", "must be text")
    return ToolCall(id=str(call.get("id") or ""), name=function["name"], arguments=function["arguments"])


def _function_of(item: Any, place: str) -> Mapping[str, Any]:
    """Return the function of a tool or of a call."""
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{place} must have a function", field=place)
    return function


@contextmanager
def inside(place: str) -> Iterator[None]:
    """Prefix the `field` of an InvalidRequest with the place."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}.{error.message}", field=f"{place}.{error.field}") from None


def read_tools(tools: Sequence[Tool | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Validate tools in OpenAI's JSON.

    Raises:
        InvalidRequest: a tool is invalid; `field` has its index.
    """
    return tuple(_read_tool(tool, index) for index, tool in enumerate(tools))


def _read_tool(tool: Tool | Mapping[str, Any], index: int) -> Tool:
    if isinstance(tool, Tool):
        return tool
    place = f"tools[{index}]"
    function = _function_of(tool, place)
    with inside(f"{place}.function"):
        return Tool(
            name=function.get("name") or "",
            description=function.get("description") or "",
            parameters=function.get("parameters") or {},
        )


# One prompt or several, as texts or as token ids, for `/v1/completions` and `complete`.
Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


def read_prompt(prompt: str) -> str:
    """Return the one prompt of a call.

    Raises:
        InvalidRequest: it is not a text, such as a list of prompts.
    """
    if not isinstance(prompt, str):
        raise InvalidRequest(
            f"the prompt is not a text: {type(prompt).__name__}",
            remedy="pass several prompts, or token ids, to `complete`",
            field="prompt",
        )
    return prompt


def read_prompts(prompts: Prompts) -> list[str] | list[list[int]]:
    """Return the prompts as a list of texts or of lists of token ids.

    Raises:
        InvalidRequest: there is no prompt, or a prompt has another type; `field` is `prompt`.
    """
    items: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if items and all(_is_id(item) for item in items):
        items = [items]
    require(bool(items), "prompt", "is empty")
    if all(isinstance(item, str) for item in items):
        return items
    are_ids = all(isinstance(item, Sequence) and all(map(_is_id, item)) for item in items)
    require(are_ids, "prompt", "must be text, token ids, or a list of texts or of lists of token ids")
    return [list(item) for item in items]


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
