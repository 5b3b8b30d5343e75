"""Tool offers: what the dialects' readers of tools have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from genserve.errors import InvalidRequest
from genserve.prompt import Tool

# Characters of a type that the client chose.
MAX_KIND = 64
LEFT_OUT_REMEDY = "offer functions, which the client runs, such as those of an MCP server"


def left_out_tool(place: str, kind: str) -> str:
    """Return how a tool of a type that nobody here can run is named: `tools[2]=web_search`."""
    return f"{place}={kind[:MAX_KIND]}"


def require_some_tool(
    tools: Sequence[object], left_out: Sequence[str], *, types_are_fields: bool = False
) -> None:
    """Raise InvalidRequest if all tools of a request are left out.

    Args:
        tools: those that the model sees.
        left_out: the others, see `left_out_tool`.
        types_are_fields: whether a tool has its type as the name of a field, as Google's have.
    """
    if left_out and not tools:
        place, _, kind = left_out[0].partition("=")
        field = f"{place}.{kind}" if types_are_fields else f"{place}.type"
        problem = field if types_are_fields else f"{field} {kind!r}"
        message = f"{problem} is not supported, and there is no other tool"
        raise InvalidRequest(message, field=field, remedy=LEFT_OUT_REMEDY)


def announced(name: str, tool: Tool | None) -> str:
    """Return the text that says that a tool can be called from now on, with its description if there is one.

    It is a part of the result of a search, so that the prompt before it stays in the prefix cache.
    """
    now = f"The tool {name} can be called now"
    return f"{now}." if tool is None else f"{now}:\n{json.dumps(tool.as_dict(), ensure_ascii=False)}"


def object_schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object that has no other properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }
