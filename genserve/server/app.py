"""App: the routes of a server as one ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from genserve.server.faults import add_fault_handlers
from genserve.server.gate import Gate
from genserve.server.request_id import RequestId
from genserve.server.routes import health, openai, openai_completions, reference, tgi
from genserve.server.routes.kserve import KServe, is_kserve
from genserve.server.services import Services
from genserve.server.sse import ClientLeft
from genserve.version import __version__

__all__ = ["create_app"]

_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; proxies' logs use this number


def create_app(services: Services) -> FastAPI:
    """Return the application over `services`; whoever calls it loads and closes the repository."""
    app = _App(
        services,
        title="genserve",
        version=__version__,
        description="Text generation from a model repository in Triton's format.",
        docs_url=None,  # FastAPI's own pages are empty where their scripts' server cannot be reached
        redoc_url=None,
    )
    app.state.services = services
    for routes in (openai, openai_completions, tgi, health, reference):  # in the order of the page at /docs
        app.include_router(routes.router)
    add_fault_handlers(app)
    for left in (ClientLeft, ClientDisconnect):  # before the answer; in the middle of the body
        app.add_exception_handler(left, _on_client_left)
    if services.settings.api_key:
        app.add_middleware(Gate, api_key=services.settings.api_key)
    return app


class _App(FastAPI):
    """FastAPI, with the routes of KServe before it: its middleware would cost them a third of their time."""

    def __init__(self, services: Services, **options: Any) -> None:
        super().__init__(**options)
        kserve: ASGIApp = KServe(services)
        if services.settings.api_key:
            kserve = Gate(kserve, api_key=services.settings.api_key)
        self._kserve = kserve
        self._others: ASGIApp = RequestId(super().__call__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the ASGI protocol."""
        if scope["type"] == "http" and is_kserve(scope["path"]):
            await self._kserve(scope, receive, send)
        else:
            await self._others(scope, receive, send)


async def _on_client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
