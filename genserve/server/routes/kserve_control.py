"""KServe control: what is loaded, and the settings of log and traces, over HTTP."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool

from genserve.errors import InferenceError, Status
from genserve.kserve.json_document import Kind, checked
from genserve.kserve.refusal import refuse_repository, refuse_unknown_model
from genserve.public_text import public_text
from genserve.server.beside import beside
from genserve.server.routes.kserve_call import Answer, Call, json_answer

__all__ = [
    "log_settings",
    "model_trace_settings",
    "repository_index",
    "repository_load",
    "repository_unload",
    "set_log_settings",
    "set_model_trace_settings",
    "set_trace_settings",
    "trace_settings",
]

_LOG_KINDS: Mapping[str, Kind] = {
    "log_file": Kind.STRING,
    "log_info": Kind.BOOLEAN,
    "log_warning": Kind.BOOLEAN,
    "log_error": Kind.BOOLEAN,
    "log_verbose_level": Kind.UNSIGNED,
    "log_format": Kind.STRING,
}
_TRACE_STRINGS = ("trace_file", "trace_rate", "trace_count", "log_frequency")


async def repository_index(call: Call) -> Answer:
    """List the models there are, or only those that answer."""
    ready = _members(await call.json()).get("ready", False)
    lines = call.services.repository.index(ready_only=checked(ready, Kind.BOOLEAN))
    return json_answer([_index_line(line) for line in lines])


async def repository_load(call: Call) -> Answer:
    """Load a model, by what the body says of its config and files."""
    refuse_repository(call.names["repository"])
    given = _members(await call.json()).get("parameters", {})
    if not isinstance(given, dict):
        text = "attempt to get members for non-object"
        raise InferenceError(text, status=Status.INTERNAL)
    config, files = "", {}
    for name, value in given.items():
        checked(value, Kind.STRING)
        if name == "config":
            config = value
        elif name.startswith("file:"):
            files[name.removeprefix("file:")] = await beside(len(value), _decoded, name, value)
        else:
            text = "unexpected error on creating Triton parameter"
            raise InferenceError(
                text, status=Status.INTERNAL, remedy=f"{name!r} is neither config nor file:<version>/<name>"
            )
    await run_in_threadpool(
        call.services.repository.load,
        call.model,
        config=config,
        files=files or None,
        allow_code=call.services.settings.allow_uploaded_code,
    )
    return Answer()


async def repository_unload(call: Call) -> Answer:
    """Begin to unload a model."""
    refuse_repository(call.names["repository"])
    given = _members(_members(await call.json()).get("parameters"))
    dependents = given.get("unload_dependents") is True  # anything else is passed over, as in Triton
    await run_in_threadpool(call.services.repository.unload, call.model, dependents=dependents)
    return Answer()


async def log_settings(call: Call) -> Answer:
    """Return the settings of the log."""
    return json_answer(call.services.log_settings.values)


async def set_log_settings(call: Call) -> Answer:
    """Change settings of the log, and return all of them."""
    given = _members(await _required(call))
    changes = {name: checked(given[name], kind) for name, kind in _LOG_KINDS.items() if name in given}
    return json_answer(call.services.log_settings.update(changes))


async def trace_settings(call: Call) -> Answer:
    """Return the settings of traces."""
    return json_answer(call.services.trace_settings.values())


async def set_trace_settings(call: Call) -> Answer:
    """Change settings of traces, and return all of them."""
    changes = _trace_changes(_members(await _required(call)))
    return json_answer(call.services.trace_settings.update(changes))


async def model_trace_settings(call: Call) -> Answer:
    """Return the settings of traces that hold for a model."""
    refuse_unknown_model(call.services.repository, call.model)
    return json_answer(call.services.trace_settings.values(call.model))


async def set_model_trace_settings(call: Call) -> Answer:
    """Change settings of traces for one model, and return all that hold for it."""
    refuse_unknown_model(call.services.repository, call.model)
    changes = _trace_changes(_members(await _required(call)))
    return json_answer(call.services.trace_settings.update(changes, model=call.model))


async def _required(call: Call) -> Any:
    document = await call.json()
    if document is None:
        text = "failed to parse the request JSON buffer: The document is empty. at 0"
        raise InferenceError(text, status=Status.INTERNAL)
    return document


def _members(document: Any) -> Mapping[str, Any]:
    """Return the members of a document; one that is no object has none, as Triton finds none in it."""
    return document if isinstance(document, dict) else {}


def _trace_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in _TRACE_STRINGS:
        if name in given:
            changes[name] = given[name] if given[name] is None else checked(given[name], Kind.STRING)
    if "trace_level" in given:
        levels = given["trace_level"]
        if levels is not None:
            levels = [checked(level, Kind.STRING) for level in checked(levels, Kind.ARRAY)]
        changes["trace_level"] = levels
    return changes


def _index_line(line: Any) -> dict[str, str]:
    entry = {"name": line.name}
    if line.version is not None:
        entry["version"] = str(line.version)
    if line.state is not None:
        entry["state"] = str(line.state)
    if line.reason:
        entry["reason"] = public_text(line.reason)
    return entry


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InferenceError(
            f"failed to decode base64 of parameter '{name}'", remedy="send the file's bytes in base64"
        ) from None
