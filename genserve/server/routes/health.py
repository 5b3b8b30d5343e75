"""Health and metrics: the routes for probes and Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from genserve.repository.model_versions import ModelState
from genserve.server.metrics_text import metrics_text
from genserve.server.services import SharedServices
from genserve.version import __version__

router = APIRouter(tags=["Health and metrics"])


@router.get("/health")
async def health(services: SharedServices) -> JSONResponse:
    """200 if every model is ready and the server is not stopping, else 503 with the reason.

    The status is `ok`, `loading`, `failed` (a model could not be loaded, or has died), `stalled` (an engine
    has requests and does not go on with them) or `draining`.
    """
    if services.draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    state = await services.readiness.state()
    if state == ModelState.READY:
        return JSONResponse({"status": "ok"})
    status = "loading" if state == ModelState.LOADING else "failed"
    if any(model.engine.stalled for model in services.repository.text_models):
        status = "stalled"
    return JSONResponse({"status": status}, status_code=503)


@router.get("/ping")
@router.post("/ping")
async def ping(services: SharedServices) -> JSONResponse:
    """The same as `/health`, for SageMaker."""
    return await health(services)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of this server."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(services: SharedServices) -> Response:
    """All metrics, in Prometheus' text format."""
    # Not `async`, so it runs on a thread: the text of a hundred models takes 0.1 s.
    return Response(metrics_text(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)
