"""Health and metrics: the routes for probes and Prometheus."""

from __future__ import annotations

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from genserve.generation_metrics import Replicas
from genserve.repository.model_versions import ModelState
from genserve.request_context import MAY_FAIL, VERBOSE
from genserve.server.access.access_control import ANY_KEY, METADATA, PROBE
from genserve.server.observe.metrics_text import metrics_text
from genserve.server.route import Route, Router, rules
from genserve.server.services import SharedServices
from genserve.version import __version__

router = Router(tag="Health and metrics", route_class=Route)


@router.get("/health")
@rules(PROBE, levels=MAY_FAIL)
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
@rules(PROBE, levels=MAY_FAIL)
async def ping(services: SharedServices) -> JSONResponse:
    """The same as `/health`, for SageMaker."""
    return await health(services)


@router.get("/version")
@rules(METADATA)
async def version() -> dict[str, str]:
    """Return the version of this server."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
@rules(ANY_KEY, levels=VERBOSE)
def metrics(services: SharedServices, replicas: Replicas = "none") -> Response:
    """All metrics, in Prometheus' text format.

    In the ingress of a deployment they are its own; `replicas=each` are those of its replicas, with a label
    for each, and `replicas=sum` all of them together.
    """
    # Not `async`, so it runs on a thread: the text of a hundred models takes 0.1 s.
    return Response(metrics_text(services.metrics.shown(replicas)), media_type=CONTENT_TYPE_LATEST)
