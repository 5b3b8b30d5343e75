"""Plug-in call: the name of a plug-in that a request uses, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from genserve.errors import InvalidRequest, require

MAX_PLUGIN_CALLS = 16
MAX_NAME_CHARS = 128
_REMEDY = 'write {"name": "...", "args": {...}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginCall:
    """A plug-in of the model's decoder stage, by its name there.

    The model checks whether it exists and takes these arguments.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)   # JSON-serializable


class PluginCallOptions(TypedDict, total=False):
    """A `PluginCall` as a dict."""

    name: str
    args: Mapping[str, Any]


def read_plugin_calls(value: Any, *, field: str) -> tuple[PluginCall, ...]:
    """Read a list of calls; None is an empty one.

    Raises:
        InvalidRequest: the value is no list of calls; `field` names the place.
    """
    calls = () if value is None else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{field} must be a list of plug-ins", field=field, remedy=_REMEDY)
    require(len(calls) <= MAX_PLUGIN_CALLS, field, f"takes at most {MAX_PLUGIN_CALLS} plug-ins")
    return tuple(read_plugin_call(call, field=f"{field}[{index}]") for index, call in enumerate(calls))


def read_plugin_call(value: Any, *, field: str) -> PluginCall:
    """Read one call. Raises as `read_plugin_calls` does."""
    if isinstance(value, PluginCall):
        return value
    if not isinstance(value, Mapping) or "name" not in value or value.keys() - {"name", "args"}:
        raise InvalidRequest(f"{field} must have the keys name and args", field=field, remedy=_REMEDY)
    name, args = value["name"], value.get("args", {})
    is_name = isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS
    require(is_name, f"{field}.name", f"must be a text of 1 to {MAX_NAME_CHARS} characters")
    require(isinstance(args, Mapping), f"{field}.args", "must map names of arguments to values")
    return PluginCall(name=name, args=dict(args))
