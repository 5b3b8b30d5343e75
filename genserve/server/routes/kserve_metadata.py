"""KServe metadata: health, metadata, configs and statistics over HTTP."""

from __future__ import annotations

from starlette.responses import Response

from genserve.config.to_json import config_json
from genserve.kserve import metadata
from genserve.kserve.statistics import find_for_statistics, statistics_json
from genserve.server.routes.kserve_call import Call, empty_response, json_response, message_response
from genserve.version import __version__

__all__ = [
    "model_config",
    "model_metadata",
    "model_ready",
    "server_live",
    "server_metadata",
    "server_ready",
    "statistics",
]

_TEXT = "text/plain"


async def server_live(_call: Call) -> Response:
    """200: whoever can ask is answered."""
    return empty_response(content_type=_TEXT)


async def server_ready(call: Call) -> Response:
    """200 if the server answers requests, else 400."""
    return empty_response(status_code=200 if call.services.ready else 400, content_type=_TEXT)


async def model_ready(call: Call) -> Response:
    """200 if the model answers, else 400."""
    if call.services.repository.is_ready(call.model, call.version):
        return empty_response(content_type=_TEXT)
    return message_response("Model version not ready", status_code=400)


async def server_metadata(call: Call) -> Response:
    """Say what server this is, and what it can do."""
    name = call.services.settings.server_id
    return json_response({"name": name, "version": __version__, "extensions": metadata.EXTENSIONS})


async def model_metadata(call: Call) -> Response:
    """Say what a model takes and gives."""
    repository = call.services.repository
    model = repository.find(call.model, call.version)
    versions = repository.versions(model.name) if call.version == -1 else [model.version]
    return json_response(metadata.model_metadata(model.config, versions=versions))


async def model_config(call: Call) -> Response:
    """Return the config of a model as it is in force."""
    model = call.services.repository.find(call.model, call.version)
    text = config_json(model.config.message)
    return Response(text, headers={"content-type": "application/json"})


async def statistics(call: Call) -> Response:
    """Say what one model has done, or all of them."""
    name = call.names.get("model", "")
    version = int(call.names.get("version") or -1)
    return json_response(statistics_json(find_for_statistics(call.services.repository, name, version)))
