"""KServe administration: health, metadata, repository, shared memory, traces and log over HTTP."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from genserve.config.config_json import config_json
from genserve.errors import InferenceError
from genserve.redaction import redacted_text
from genserve.server.http.offload import offload_if_large, run_for_long
from genserve.server.kserve import model_metadata as metadata
from genserve.server.kserve.http_messages import KServeCall, KServeResponse, json_response, message_response
from genserve.server.kserve.model_metadata import (
    find_for_statistics,
    reject_repository,
    require_ready_model,
    statistics_json,
)
from genserve.server.kserve.shared_memory import cuda_unsupported, reject_cuda_region
from genserve.server.kserve.triton_parsing import JsonKind, checked, read_json
from genserve.version import __version__

_TEXT = b"text/plain"
_LOG_KINDS: Mapping[str, JsonKind] = {
    "log_file": JsonKind.STRING,
    "log_info": JsonKind.BOOLEAN,
    "log_warning": JsonKind.BOOLEAN,
    "log_error": JsonKind.BOOLEAN,
    "log_verbose_level": JsonKind.UNSIGNED,
    "log_format": JsonKind.STRING,
}
_TRACE_STRINGS = ("trace_file", "trace_rate", "trace_count", "log_frequency")
_FIELDS = ("name", "key", "offset", "byte_size")


async def server_live(_call: KServeCall) -> KServeResponse:
    """200: the server runs."""
    return KServeResponse(content_type=_TEXT)


async def server_ready(call: KServeCall) -> KServeResponse:
    """200 if the server is ready, else 400."""
    return KServeResponse(status_code=200 if await call.services.is_ready() else 400, content_type=_TEXT)


async def model_ready(call: KServeCall) -> KServeResponse:
    """200 if the model is ready, else 400."""
    if await call.services.readiness.of_model(call.model, call.version):
        return KServeResponse(content_type=_TEXT)
    return message_response("Model version not ready", status_code=400)


async def server_metadata(call: KServeCall) -> KServeResponse:
    """Return the name, version and extensions of the server."""
    name = call.services.settings.server_id
    return json_response({"name": name, "version": __version__, "extensions": metadata.EXTENSIONS})


async def model_metadata(call: KServeCall) -> KServeResponse:
    """Return the versions, inputs and outputs of a model."""
    repository = call.services.repository
    model = repository.find(call.model, call.version)
    versions = repository.versions(model.name) if call.version == -1 else [model.version]
    return json_response(metadata.model_metadata(model.config, versions=versions))


async def model_config(call: KServeCall) -> KServeResponse:
    """Return the complete config of a model."""
    model = call.services.repository.find(call.model, call.version)
    return KServeResponse(config_json(model.config.message).encode())


async def statistics(call: KServeCall) -> KServeResponse:
    """Return the inference statistics of one model, or of all."""
    name = call.names.get("model", "")
    return json_response(statistics_json(find_for_statistics(call.services.repository, name, call.version)))


async def repository_index(call: KServeCall) -> KServeResponse:
    """List all models, or only those that are ready."""
    ready = _members(await call.json()).get("ready", False)
    lines = call.services.repository.index(ready_only=checked(ready, JsonKind.BOOLEAN))
    return json_response([_index_line(line) for line in lines])


async def repository_load(call: KServeCall) -> KServeResponse:
    """Load a model, from its folder or from the config and files in the body."""
    reject_repository(call.names["repository"])
    given = _members(await call.json()).get("parameters", {})
    if not isinstance(given, dict):
        text = "attempt to get members for non-object"
        raise InferenceError(text)
    config, files = "", {}
    for name, value in given.items():
        checked(value, JsonKind.STRING)
        if name == "config":
            config = value
        elif name.startswith("file:"):
            files[name.removeprefix("file:")] = await offload_if_large(len(value), _decoded, name, value)
        else:
            text = "unexpected error on creating Triton parameter"
            raise InferenceError(
                text, remedy=f"{name!r} is neither config nor file:<version>/<name>"
            )
    await run_for_long(
        call.services.repository.load,
        call.model,
        config=config,
        files=files or None,
        allow_code=call.services.settings.allow_uploaded_code,
    )
    return KServeResponse()


async def repository_unload(call: KServeCall) -> KServeResponse:
    """Start to unload a model."""
    reject_repository(call.names["repository"])
    given = _members(_members(await call.json()).get("parameters"))
    dependents = given.get("unload_dependents") is True  # other values are ignored, as in Triton
    await run_for_long(call.services.repository.unload, call.model, dependents=dependents)
    return KServeResponse()


async def log_settings(call: KServeCall) -> KServeResponse:
    """Return the log settings."""
    return json_response(call.services.log_settings.values)


async def set_log_settings(call: KServeCall) -> KServeResponse:
    """Change log settings, and return all of them."""
    given = _members(await _required(call))
    changes = {name: checked(given[name], kind) for name, kind in _LOG_KINDS.items() if name in given}
    return json_response(call.services.log_settings.update(changes))


async def trace_settings(call: KServeCall) -> KServeResponse:
    """Return the trace settings."""
    return json_response(call.state.trace_settings.values())


async def set_trace_settings(call: KServeCall) -> KServeResponse:
    """Change trace settings, and return all of them."""
    changes = _trace_changes(_members(await _required(call)))
    return json_response(call.state.trace_settings.update(changes))


async def model_trace_settings(call: KServeCall) -> KServeResponse:
    """Return the trace settings of a model."""
    require_ready_model(call.services.repository, call.model)
    return json_response(call.state.trace_settings.values(call.model))


async def set_model_trace_settings(call: KServeCall) -> KServeResponse:
    """Change trace settings of a model, and return all of its settings."""
    require_ready_model(call.services.repository, call.model)
    changes = _trace_changes(_members(await _required(call)))
    return json_response(call.state.trace_settings.update(changes, model=call.model))


async def _required(call: KServeCall) -> Any:
    document = await call.json()
    if document is None:
        text = "failed to parse the request JSON buffer: The document is empty. at 0"
        raise InferenceError(text)
    return document


def _members(document: Any) -> Mapping[str, Any]:
    """Return the members of a JSON object; any other document has none, as in Triton."""
    return document if isinstance(document, dict) else {}


def _trace_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in _TRACE_STRINGS:
        if name in given:
            changes[name] = given[name] if given[name] is None else checked(given[name], JsonKind.STRING)
    if "trace_level" in given:
        levels = given["trace_level"]
        if levels is not None:
            levels = [checked(level, JsonKind.STRING) for level in checked(levels, JsonKind.ARRAY)]
        changes["trace_level"] = levels
    return changes


def _index_line(line: Any) -> dict[str, str]:
    entry = {"name": line.name}
    if line.version is not None:
        entry["version"] = str(line.version)
    if line.state is not None:
        entry["state"] = str(line.state)
    if line.reason:
        entry["reason"] = redacted_text(line.reason)
    return entry


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InferenceError(
            f"failed to decode base64 of parameter '{name}'", remedy="send the file's bytes in base64"
        ) from None


async def region_status(call: KServeCall) -> KServeResponse:
    """Return the registered regions of system shared memory, or one of them."""
    regions = call.state.shared_memory.regions(call.names["region"])
    return json_response([{field: getattr(region, field) for field in _FIELDS} for region in regions])


async def register_region(call: KServeCall) -> KServeResponse:
    """Register a region of system shared memory."""
    call.state.shared_memory.require_enabled()
    name = call.names["region"]
    if not name:
        raise InferenceError("'region name' is necessary to register system shared memory region")
    document = read_json(await call.plain_body())
    given = document if isinstance(document, dict) else {}
    for field in ("key", "byte_size"):
        if field not in given:
            raise InferenceError(f"Shared memory register request has no '{field}' field")
    call.state.shared_memory.register(
        name,
        key=checked(given["key"], JsonKind.STRING),
        offset=checked(given.get("offset", 0), JsonKind.UNSIGNED),
        byte_size=checked(given["byte_size"], JsonKind.UNSIGNED),
    )
    return KServeResponse()


async def unregister_region(call: KServeCall) -> KServeResponse:
    """Unregister a region of system shared memory, or all of them."""
    call.state.shared_memory.unregister(call.names["region"])
    return KServeResponse()


async def cuda_status(call: KServeCall) -> KServeResponse:
    """Return the registered regions of CUDA shared memory, of which this server has none."""
    reject_cuda_region(call.names["region"])
    return json_response([])


async def register_cuda_region(call: KServeCall) -> KServeResponse:
    """Reject a region of CUDA shared memory, which this server does not support."""
    call.state.shared_memory.require_enabled()
    raise cuda_unsupported(call.names["region"])


async def unregister_cuda_region(call: KServeCall) -> KServeResponse:
    """Unregister regions of CUDA shared memory, of which this server has none."""
    call.state.shared_memory.require_enabled()
    return KServeResponse()
