"""KServe metadata: health, metadata, configs and statistics over HTTP."""

from __future__ import annotations

from genserve.config.to_json import config_json
from genserve.kserve import metadata
from genserve.kserve.statistics import find_for_statistics, statistics_json
from genserve.server.routes.kserve_call import Answer, Call, json_answer, message_answer
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

_TEXT = b"text/plain"


async def server_live(_call: Call) -> Answer:
    """200: whoever can ask is answered."""
    return Answer(content_type=_TEXT)


async def server_ready(call: Call) -> Answer:
    """200 if the server answers requests, else 400."""
    return Answer(status_code=200 if await call.services.is_ready() else 400, content_type=_TEXT)


async def model_ready(call: Call) -> Answer:
    """200 if the model answers, else 400."""
    if await call.services.readiness.of_model(call.model, call.version):
        return Answer(content_type=_TEXT)
    return message_answer("Model version not ready", status_code=400)


async def server_metadata(call: Call) -> Answer:
    """Say what server this is, and what it can do."""
    name = call.services.settings.server_id
    return json_answer({"name": name, "version": __version__, "extensions": metadata.EXTENSIONS})


async def model_metadata(call: Call) -> Answer:
    """Say what a model takes and gives."""
    repository = call.services.repository
    model = repository.find(call.model, call.version)
    versions = repository.versions(model.name) if call.version == -1 else [model.version]
    return json_answer(metadata.model_metadata(model.config, versions=versions))


async def model_config(call: Call) -> Answer:
    """Return the config of a model as it is in force."""
    model = call.services.repository.find(call.model, call.version)
    return Answer(config_json(model.config.message).encode())


async def statistics(call: Call) -> Answer:
    """Say what one model has done, or all of them."""
    name = call.names.get("model", "")
    return json_answer(statistics_json(find_for_statistics(call.services.repository, name, call.version)))
