"""Message tools: the tools of the Messages API, as the functions that the model sees.

Anthropic's own tools that the client runs (`bash`, the text editor, `memory`) are functions with the
arguments that Anthropic has published. Tools that Anthropic's servers run, such as `web_search`, and
`computer`, whose results are pictures, are left out.

A tool with `defer_loading` is not in the prompt until the result of another tool refers to it. That result
then describes it, so everything before it stays in the prefix cache.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from genserve.errors import InvalidRequest, require
from genserve.prompt import Tool, inside, may_be_object
from genserve.server.dialects.tool_offers import (
    LEFT_OUT_REMEDY,
    MAX_KIND,
    left_out_tool,
    object_schema,
    require_some_tool,
)
from genserve.server.http.request_body import Items, TolerantBody, of_known_types

_NAME = r"^[A-Za-z0-9_.-]{1,128}$"


def _of_object(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is not None and not may_be_object(schema):
        raise ValueError("must be the schema of an object")
    return schema


class ToolFields(TolerantBody):
    """A tool that the client runs."""

    type: str | None = Field(
        default=None,
        description="`custom`, or a tool of Anthropic's that the client runs: `bash_20250124`, "
        "`text_editor_20250728`, `memory_20250818`, or another version of them. Others are left out.",
    )
    name: str | None = Field(default=None, pattern=_NAME, description="Its name.")
    description: str | None = Field(default=None, description="What it does.")
    input_schema: Annotated[dict[str, Any] | None, AfterValidator(_of_object)] = Field(
        default=None, description="The JSON schema of its arguments; tools of Anthropic's have none."
    )
    defer_loading: bool | None = Field(
        default=None, description="The model does not see the tool until the result of a tool refers to it."
    )


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*names], "description": "What to do."}


_FILE_TEXT = _text("For `create`: the content of the file.")
_OLD_TEXT = _text("For `str_replace`: the text to replace, as it is in the file, where it must be unique.")
_NEW_TEXT = "For `str_replace`: the text to put in its place; none: nothing."
_INSERT_LINE = {
    "type": "integer",
    "minimum": 0,
    "description": "For `insert`: the number of the line after which to insert; 0: at the beginning.",
}
_INSERT_TEXT = _text("For `insert`: the text to insert.")
_VIEW_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For `view` of a file: the first and the last line to show, counted from 1; -1: the end.",
}

_BASH = Tool(
    name="bash",
    description="Runs commands in a bash shell that stays open between calls.",
    parameters=object_schema(
        [],
        command=_text("The command to run; needed unless `restart` is true."),
        restart={"type": "boolean", "description": "Restart the shell instead."},
    ),
)
_EDITOR = Tool(
    name="str_replace_based_edit_tool",
    description="Views, creates and edits text files. `view` of a folder lists its files.",
    parameters=object_schema(
        ["command", "path"],
        command=_commands("view", "create", "str_replace", "insert"),
        path=_text("The path of the file or folder."),
        file_text=_FILE_TEXT,
        old_str=_OLD_TEXT,
        new_str=_text(_NEW_TEXT),
        insert_line=_INSERT_LINE,
        insert_text=_INSERT_TEXT,
        view_range=_VIEW_RANGE,
    ),
)
# Before Claude 4: it can undo an edit, and inserts `new_str`.
_OLD_EDITOR = Tool(
    name="str_replace_editor",
    description=f"{_EDITOR.description} `undo_edit` reverts the last edit of a file.",
    parameters=object_schema(
        ["command", "path"],
        command=_commands("view", "create", "str_replace", "insert", "undo_edit"),
        path=_text("The path of the file or folder."),
        file_text=_FILE_TEXT,
        old_str=_OLD_TEXT,
        new_str=_text(f"{_NEW_TEXT} For `insert`: the text to insert."),
        insert_line=_INSERT_LINE,
        view_range=_VIEW_RANGE,
    ),
)
_MEMORY = Tool(
    name="memory",
    description="Views and edits files below /memories, which stay between conversations. View the folder "
    "before a task, and note there what later conversations need.",
    parameters=object_schema(
        ["command"],
        command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_text("The path of the file or folder; for all commands but `rename`."),
        file_text=_FILE_TEXT,
        old_str=_OLD_TEXT,
        new_str=_text(_NEW_TEXT),
        insert_line=_INSERT_LINE,
        insert_text=_INSERT_TEXT,
        view_range=_VIEW_RANGE,
        old_path=_text("For `rename`: the path of the file or folder."),
        new_path=_text("For `rename`: its new path."),
    ),
)
_FIRST_OF_NEW_EDITORS = "20250429"
_CLIENT_TOOL = re.compile(r"(bash|text_editor|memory)_(\d{8})")


def _client_tool(kind: str) -> Tool | None:
    """Return a tool of Anthropic's that the client runs; None: the type is another one."""
    match = _CLIENT_TOOL.fullmatch(kind)
    if match is None:
        return None
    if match[1] == "text_editor":
        return _EDITOR if match[2] >= _FIRST_OF_NEW_EDITORS else _OLD_EDITOR
    return _BASH if match[1] == "bash" else _MEMORY


def _is_known(kind: str) -> bool:
    return kind == "custom" or _client_tool(kind) is not None


Tools = Items[Annotated[ToolFields, of_known_types(_is_known, name=_NAME)]]


class ToolOffer:
    """The tools of one request.

    Args:
        tools: the tools of the request.
        referenced: the names of tools to which results of tools refer, in their order.
        called: the names of tools that the conversation has called, in their order.
        choice: the name of the tool that the answer has to call; None: any.

    Attributes:
        tools: the tools that may be called. The prompt begins with tools in the order of the request, but
            deferred ones that were called come last, in the order of their calls.
        places: where these are in the request.
        described: the tools that results describe, by their names.
        left_out: the places and types of the tools that nobody here can run.

    Raises:
        InvalidRequest: an invalid tool, or `choice` names one that is left out.
    """

    def __init__(
        self,
        tools: Sequence[ToolFields],
        *,
        referenced: Collection[str] = (),
        called: Collection[str] = (),
        choice: str | None = None,
    ) -> None:
        self.left_out: list[str] = []
        known: dict[int, Tool] = {}
        for index, tool in enumerate(tools):
            if tool.type is None or _is_known(tool.type):
                known[index] = _function(tool, f"tools[{index}]")
                continue
            self.left_out.append(left_out_tool(f"tools[{index}]", tool.type))
            if choice is not None and tool.name == choice:
                kind = tool.type[:MAX_KIND]
                raise InvalidRequest(
                    f"tool_choice.name {choice!r} is of the type {kind!r}, which is not supported",
                    field="tool_choice.name",
                    remedy=LEFT_OUT_REMEDY,
                )
        deferred = _deferred(tools, known)
        described = deferred.intersection(referenced)
        undescribed = deferred - described
        late_names = (name for name in (*called, choice) if name in undescribed)
        late = {name: place for place, name in enumerate(dict.fromkeys(late_names))}
        shown = [index for index, tool in known.items() if tool.name not in deferred]
        late_ones = [index for index, tool in known.items() if tool.name in late]
        shown += sorted(late_ones, key=lambda index: late[known[index].name])
        in_results = [index for index, tool in known.items() if tool.name in described]
        self.places = [f"tools[{index}]" for index in (*shown, *in_results)]
        self.described = {known[index].name: known[index] for index in in_results}
        self.tools = (
            *(known[index] for index in shown),
            *(replace(known[index], in_messages=True) for index in in_results),
        )

    def require_some(self) -> None:
        """Raise InvalidRequest if the request has tools, and all of them are left out."""
        require_some_tool(self.tools, self.left_out)


def _deferred(tools: Sequence[ToolFields], known: Mapping[int, Tool]) -> set[str]:
    """Return the names of the deferred tools; none, if nothing else could make them known."""
    if any(tool.type is not None and tool.type.startswith("tool_search_tool") for tool in tools):
        return set()    # a search that Anthropic's servers run
    deferred = {tool.name for index, tool in known.items() if tools[index].defer_loading}
    return deferred if len(deferred) < len(known) else set()


def _function(tool: ToolFields, place: str) -> Tool:
    if tool.type is not None and (own := _client_tool(tool.type)) is not None:
        return replace(own, name=tool.name or own.name)
    require(tool.name is not None, f"{place}.name", "is missing")
    require(tool.input_schema is not None, f"{place}.input_schema", "is missing")
    with inside(place):
        return Tool(
            name=tool.name or "", description=tool.description or "", parameters=tool.input_schema or {}
        )
