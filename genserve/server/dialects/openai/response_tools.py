"""Response tools: the tools of the Responses API, as the functions that the model sees.

A tool in a namespace is a function whose name begins with that of the namespace, a custom tool one with a
text as its only argument. OpenAI's own tools that the client runs, such as `apply_patch`, are functions whose
arguments are those that OpenAI has published. Tools that OpenAI's servers run, such as `web_search`, are left
out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from genserve.errors import require
from genserve.prompt import MAX_TOOLS, Tool, inside
from genserve.server.dialects.openai.custom_tools import custom_tool
from genserve.server.dialects.tool_offers import left_out_tool, object_schema, require_some_tool
from genserve.server.http.request_body import Items, TolerantBody, of_known_types

FUNCTION_CALL = "function_call"
CUSTOM_CALL = "custom_tool_call"
TOOL_SEARCH_CALL = "tool_search_call"
_TOOL_SEARCH = "tool_search"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A tool of OpenAI's own that the client runs.

    Attributes:
        call: the type of the items that call it.
        item_field: the field of such an item that has the arguments of the function.
        function: as the model sees it.
        defaults: what this field has beside the arguments that the model wrote.
        others: the other fields of such an item.
    """

    call: str
    item_field: str
    function: Tool
    defaults: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    def written(self, arguments: str) -> dict[str, Any] | None:
        """Return the fields of an item, from the arguments of the function; None: they were cut."""
        try:
            given = json.loads(arguments)
        except ValueError:
            return None
        if not isinstance(given, dict):
            return None
        return {self.item_field: {**self.defaults, **given}, **self.others}

    def arguments(self, value: Mapping[str, Any]) -> str:
        """Return the arguments of the function, from the value of the item's field."""
        kept = {
            name: given
            for name, given in value.items()
            if given is not None and self.defaults.get(name) != given
        }
        return json.dumps(kept, ensure_ascii=False)


_PATH = {"type": "string", "description": "The path of the file, relative to the workspace."}
_MILLISECONDS = {"type": "integer", "description": "Ends a command that takes longer than this, ms."}
_CREATED = {"type": "string", "description": "The lines of the file, each with a + in front."}
_UPDATED = {
    "type": "string",
    "description": "The changes: sections that begin with a line @@, in which lines that stay have a space "
    "in front, lines that go a -, and lines that come a +.",
}
# By the type of the tool, which is the name of its function. The arguments are those in OpenAI's schemas.
CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "local_shell": ClientTool(
        call="local_shell_call",
        item_field="action",
        function=Tool(
            name="local_shell",
            description="Runs a command on the user's machine.",
            parameters=object_schema(
                ["command"],
                command={
                    "type": "array",
                    "items": {"type": "string"},
                    "description": 'The program and its arguments, such as ["bash", "-lc", "ls"].',
                },
                working_directory={"type": "string", "description": "The folder to run it in."},
                timeout_ms=_MILLISECONDS,
                env={
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                    "description": "Environment variables to set.",
                },
                user={"type": "string", "description": "The user to run it as."},
            ),
        ),
        defaults={"type": "exec", "env": {}},
    ),
    "shell": ClientTool(
        call="shell_call",
        item_field="action",
        function=Tool(
            name="shell",
            description="Runs shell commands on the user's machine.",
            parameters=object_schema(
                ["commands"],
                commands={
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "The commands, each a line for the shell.",
                },
                timeout_ms=_MILLISECONDS,
                max_output_length={
                    "type": "integer",
                    "description": "The characters of the output to return.",
                },
            ),
        ),
        defaults={"timeout_ms": None, "max_output_length": None},
        others={"environment": None},
    ),
    "apply_patch": ClientTool(
        call="apply_patch_call",
        item_field="operation",
        function=Tool(
            name="apply_patch",
            description="Creates, updates or deletes one file.",
            parameters={
                "type": "object",
                "anyOf": [
                    object_schema(["type", "path", "diff"], type={"const": kind}, path=_PATH, diff=diff)
                    for kind, diff in (("create_file", _CREATED), ("update_file", _UPDATED))
                ]
                + [object_schema(["type", "path"], type={"const": "delete_file"}, path=_PATH)],
            },
        ),
    ),
    _TOOL_SEARCH: ClientTool(
        call=TOOL_SEARCH_CALL,
        item_field="arguments",
        function=Tool(
            name=_TOOL_SEARCH,
            description="Finds further tools. The tools that it returns can be called afterwards.",
            parameters=object_schema(
                ["query"], query={"type": "string", "description": "What the tool should do."}
            ),
        ),
        others={"execution": "client"},
    ),
}
# By the type of the items that call them.
CALLED_TOOLS = {tool.call: tool for tool in CLIENT_TOOLS.values()}


_TYPES = frozenset({"function", "custom", "namespace", *CLIENT_TOOLS})


class ResponseTool(TolerantBody):
    """A tool that the model may call; which fields it needs depends on its type."""

    type: str = Field(
        description="`function`, `custom`, `namespace`, or a tool of OpenAI's that the client runs: `shell`, "
        "`local_shell`, `apply_patch`, `tool_search`. Tools of other types, which the server would run, are "
        "left out."
    )
    name: str | None = Field(default=None, description="Its name: letters, digits, `_`, `-` and `.`.")
    description: str | None = Field(default=None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of its arguments; none: it takes no arguments."
    )
    strict: bool | None = Field(
        default=None, description="Without effect: arguments are held to the schema in any case."
    )
    format: dict[str, Any] | None = Field(
        default=None,
        description="The form of the input of a `custom` tool: "
        '`{"type": "grammar", "syntax": "lark", "definition": ...}`, also with the syntax `regex`, or '
        '`{"type": "text"}`.',
    )
    tools: ResponseTools | None = Field(
        default=None, max_length=MAX_TOOLS, description="The tools of a `namespace`."
    )
    defer_loading: bool | None = Field(
        default=None,
        description="The model does not see the tool until a `tool_search` has found it; without a "
        "`tool_search` that the client runs it sees it at once.",
    )
    execution: str | None = Field(default=None, description="Who runs a `tool_search`: `client` or `server`.")
    environment: dict[str, Any] | None = Field(
        default=None, description="Where a `shell` runs: only that of the type `local` is offered."
    )


ResponseTools = Items[Annotated[ResponseTool, of_known_types(_TYPES.__contains__)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool as the client knows it, and as the model does.

    Attributes:
        function: as the model sees it.
        place: where it is in the request.
        type: its type.
        name: its name without the namespace.
        namespace: the name of the namespace; None: it is in none.
    """

    function: Tool
    place: str
    type: str
    name: str
    namespace: str | None = None

    @property
    def call(self) -> str:
        """The type of the items that call it."""
        if self.type in CLIENT_TOOLS:
            return CLIENT_TOOLS[self.type].call
        return CUSTOM_CALL if self.type == "custom" else FUNCTION_CALL

    def is_meant(self, choice: Mapping[str, Any]) -> bool:
        """Whether an entry of a choice among the tools means it."""
        if choice.get("type") in CLIENT_TOOLS:
            return bool(self.type == choice["type"])
        if choice.get("type") == "namespace":
            return self.namespace is not None and self.namespace == choice.get("name")
        is_named = choice.get("name") in (self.name, self.function.name)
        return is_named and choice.get("namespace") in (None, self.namespace)


def function_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def function_names(tools: Iterable[ResponseTool], namespace: str | None = None) -> Iterator[str]:
    """Yield the names of the functions for some tools."""
    for tool in tools:
        if tool.type == "namespace" and tool.tools:
            yield from function_names(tool.tools, tool.name)
        elif tool.type in ("function", "custom"):
            yield function_name(tool.name or "", namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTools:
    """Tools that an item of the conversation has added.

    Attributes:
        tools: the tools.
        place: where they are in the request; empty: they came with an earlier one.
        are_found: whether a search has found them, so that none is deferred.
        are_described: whether the result of the search describes those that the model has not seen.
    """

    tools: Sequence[ResponseTool]
    place: str
    are_found: bool
    are_described: bool


class ToolOffer:
    """The tools of one request.

    Args:
        tools: the tools of the request itself.
        loaded: the tools that the conversation has added, except functions that are already there.
        called: the names of functions that the conversation has called, which are not deferred.
        choice: the choice among the tools; a tool that it names is not deferred.

    Attributes:
        tools: the tools that the model sees, by the names of their functions.
        described: the functions that the results of searches describe, by their names.
        left_out: the places and types of the others, without those that are deferred.

    Raises:
        InvalidRequest: an invalid tool, or two with the same name.
    """

    def __init__(
        self,
        tools: Sequence[ResponseTool],
        *,
        loaded: Iterable[LoadedTools] = (),
        called: Collection[str] = (),
        choice: Any = None,
    ) -> None:
        self._given = tools
        self.described: dict[str, Tool] = {}
        self.left_out: list[str] = []
        chosen = choice if isinstance(choice, Mapping) else {}
        known: dict[str, OfferedTool] = {}
        waiting: set[str] = set()
        for tool, is_deferred in self._read(tools, "tools"):
            name = tool.function.name
            require(name not in known, "tools", "has two tools with the same name")
            known[name] = tool
            if is_deferred and not tool.is_meant(chosen):
                waiting.add(name)
        found = dict.fromkeys(name for name in known if name not in waiting)    # in their order
        for added in loaded:
            for tool, is_deferred in self._read(added.tools, added.place):
                name = tool.function.name
                known.setdefault(name, tool)
                if is_deferred and not added.are_found:
                    waiting.add(name)
                    continue
                # In its place in the conversation, so that the prompt before it stays cached.
                if added.are_described and name not in found:
                    self.described[name] = known[name].function
                found[name] = None
        found |= dict.fromkeys(name for name in called if name in waiting)
        if not any(known[name].type == _TOOL_SEARCH for name in found):
            # Nothing else would make the deferred ones known.
            found, self.described = dict.fromkeys(known), {}
        self.tools: dict[str, OfferedTool] = {name: known[name] for name in found}
        for name, function in self.described.items():
            self.tools[name] = replace(self.tools[name], function=replace(function, in_messages=True))

    def require_some(self) -> None:
        """Raise InvalidRequest if the request has tools, and all of them are left out."""
        if self._given:
            require_some_tool([*self.tools], self.left_out)

    def meant(self, choice: Mapping[str, Any]) -> list[str]:
        """Return the names of the functions that an entry of a choice among the tools means."""
        return [name for name, tool in self.tools.items() if tool.is_meant(choice)]

    @cached_property
    def written(self) -> list[dict[str, Any]]:
        """The tools of the request as the response repeats them, without those that are left out."""
        return [*_written(self._given)]

    def _read(
        self, tools: Sequence[ResponseTool], place: str, namespace: str | None = None
    ) -> Iterator[tuple[OfferedTool, bool]]:
        """Yield the tools that the client runs, and whether they are deferred."""
        for index, tool in enumerate(tools):
            where = f"{place}[{index}]"
            if tool.type == "namespace" and namespace is None:
                require(bool(tool.name), f"{where}.name", "is missing")
                yield from self._read(tool.tools or (), f"{where}.tools", tool.name)
            elif _is_run_by_client(tool):
                with inside(where):
                    yield _offered(tool, where, namespace), bool(tool.defer_loading)
            elif place:
                self.left_out.append(left_out_tool(where, tool.type))


def _is_run_by_client(tool: ResponseTool) -> bool:
    match tool.type:
        case "tool_search":
            return tool.execution == "client"
        case "shell":
            return tool.environment is None or tool.environment.get("type") == "local"
        case kind:
            return kind in ("function", "custom", *CLIENT_TOOLS)


def _offered(tool: ResponseTool, place: str, namespace: str | None) -> OfferedTool:
    if tool.type in CLIENT_TOOLS:
        known = CLIENT_TOOLS[tool.type].function
        function = Tool(
            name=known.name,
            description=tool.description or known.description,
            parameters=tool.parameters or known.parameters,
        )
        return OfferedTool(function=function, place=place, type=tool.type, name=known.name)
    require(tool.name is not None, "name", "is missing")
    name, description = function_name(tool.name or "", namespace), tool.description or ""
    if tool.type == "custom":
        function = custom_tool(name, description, tool.format or {})
    else:
        function = Tool(name=name, description=description, parameters=tool.parameters or {})
    return OfferedTool(
        function=function, place=place, type=tool.type, name=tool.name or "", namespace=namespace
    )


def _written(tools: Sequence[ResponseTool]) -> Iterator[dict[str, Any]]:
    for tool in tools:
        head = {"type": tool.type, "name": tool.name, "description": tool.description}
        match tool.type:
            case "function":
                yield head | {"parameters": tool.parameters, "strict": tool.strict is not False}
            case "custom":
                yield head | {"format": tool.format or {"type": "text"}}
            case "namespace":
                yield head | {"tools": [*_written(tool.tools or ())]}
            case _ if _is_run_by_client(tool):
                yield tool.model_dump(exclude_unset=True)
