"""Ollama's uploads: `/api/blobs/{digest}`, the files of which `/api/create` makes a model."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tempfile
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

from genserve.errors import InferenceError, InvalidRequest, RepositoryError, Status
from genserve.repository.options import ControlMode
from genserve.request_context import current_request
from genserve.server.access.access_control import METADATA, Rights
from genserve.server.dialects.ollama.routes import OLLAMA_ERRORS
from genserve.server.route import Route, Router, rules
from genserve.server.services import Services, SharedServices

router = Router(prefix="/api", tag="Ollama", errors=OLLAMA_ERRORS, route_class=Route)
# Downloads, creations and uploads need the same rights.
CHANGE = Rights(part="model-repository", controls=True)
REMEDY = (
    "start the server with --model-control-mode on-demand; or `genserve pull` and `genserve export` add "
    "models"
)
_DIGEST = re.compile("sha256[:-]([0-9a-f]{64})")


def require_changes(services: Services) -> None:
    """Raise InferenceError if the models of the server are those of its start."""
    if services.repository.options.control_mode is ControlMode.NONE:
        problem = "this server changes no models: it serves those of its start"
        raise InferenceError(problem, status=Status.UNSUPPORTED, remedy=REMEDY)


def blobs_folder(services: Services) -> Path:
    """Return the folder of uploaded files, which is hidden in the repository, and need not exist."""
    return services.settings.model_repository[0] / ".blobs"


def blob_path(services: Services, digest: str) -> Path:
    """Return the path of the file with this digest, which need not exist; raises InvalidRequest."""
    found = _DIGEST.fullmatch(digest)
    if found is None:
        raise InvalidRequest(
            f"{digest[:80]!r} is not a digest", field="digest", remedy="write sha256: and 64 digits"
        )
    return blobs_folder(services) / f"sha256-{found[1]}"


@router.get("/blobs/{digest}", include_in_schema=False)
@rules(METADATA)
async def has_blob(digest: str, services: SharedServices) -> Response:
    """200 if a file was uploaded, else 404; for HEAD."""
    return Response(status_code=200 if blob_path(services, digest).exists() else 404)


@router.post("/blobs/{digest}", status_code=201)
@rules(CHANGE)
async def upload_blob(digest: str, services: SharedServices, request: Request) -> Response:
    """Store a file for `/api/create`."""
    require_changes(services)
    path = blob_path(services, digest)
    current_request().change = f"upload {digest}"
    try:
        await _store(path, request)
    except OSError as error:
        raise RepositoryError(
            f"the file cannot be stored: {error.strerror}", remedy="check the disk of the model repository"
        ) from error
    return Response(status_code=201)


async def _store(path: Path, request: Request) -> None:
    hashed = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = f"{folder}/upload"
        with open(written, "wb") as file:  # noqa: ASYNC230, PTH123  # writes are on threads
            async for chunk in request.stream():
                hashed.update(chunk)
                await asyncio.to_thread(file.write, chunk)
        if not path.name.endswith(hashed.hexdigest()):
            raise InvalidRequest("the file has another digest", field="digest", remedy="upload it again")
        os.replace(written, path)  # noqa: PTH105  # see above
