"""App: the routes of a server as one ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from genserve.errors import GenserveError
from genserve.log import CURRENT_REQUEST
from genserve.server.access_control import AccessControl, check_restriction, parse_restrictions
from genserve.server.access_log import CLIENT_CLOSED_REQUEST, AccessLog
from genserve.server.connection_errors import raise_connection_error
from genserve.server.early_rejection import EarlyRejection
from genserve.server.error_responses import ErrorResponses, document_errors
from genserve.server.routes import (
    bundled_pages,
    docs_page,
    health,
    messages,
    ollama,
    openai,
    openai_completions,
    responses,
    router_protocol,
    tgi,
    tokenize,
)
from genserve.server.routes.kserve import KServe, is_kserve
from genserve.server.services import Services
from genserve.server.sse_response import ClientLeft
from genserve.version import __version__

# In the order of the page at /docs. A dialect is a module with a `router`, and the format of its `ERRORS`.
_DIALECTS = (openai, responses, openai_completions, messages, ollama, tgi, tokenize, router_protocol)
_ROUTES = (*_DIALECTS, health, bundled_pages, docs_page)
_METADATA_PATHS = (
    *router_protocol.PATHS,
    "/api/ps",
    "/api/show",
    "/api/tags",
    "/api/version",
    "/info",
    "/tokenizer_info",
    "/v1/models",
    "/version",
)
# Ollama's routes that change the models, which this server never does.
_CONTROL_PATHS = ("/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/")


def create_app(services: Services, *, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Return the application over `services`; the caller or `lifespan` loads and closes the repository."""
    errors = ErrorResponses({path: form for dialect in _DIALECTS for path, form in dialect.ERRORS.items()})
    app = _App(
        services,
        errors,
        title="genserve",
        lifespan=lifespan,
        version=__version__,
        description="Text generation from a model repository in Triton's format.",
        docs_url=None,  # FastAPI's own pages load their scripts from the internet
        redoc_url=None,
        # `include_router` would build each of them again, for 30 ms of the first request.
        routes=[route for module in _ROUTES for route in module.router.routes],
        redirect_slashes=False,     # a redirect would name a host, and repeat a request with its body
        strict_content_type=False,  # clients may leave it out; AccessControl rejects those of forms
    )
    app.state.services = services
    errors.install(app)
    for error in (ClientLeft, ClientDisconnect):    # before the answer; in the middle of the body
        app.add_exception_handler(error, _on_client_left)
    return app


class _App(FastAPI):
    """FastAPI behind the routes of KServe: its middleware would add a third to their time."""

    def __init__(self, services: Services, errors: ErrorResponses, **options: Any) -> None:
        super().__init__(**options)
        self._errors = errors
        settings = services.settings
        self._keys = services.keys
        self._access = AccessControl(settings, host=settings.host, keys=services.keys)
        self._restrictions = parse_restrictions(settings.http_restricted_api)
        self._kserve: ASGIApp = KServe(services, check=self._check)
        self._other_routes: ASGIApp = AccessLog(self._handle_others, services.request_spans)
        self._admitted: ASGIApp = EarlyRejection(super().__call__, services, errors)
        self._cors: ASGIApp | None = None
        if settings.allowed_origins:
            self._cors = CORSMiddleware(
                self._route,
                allow_origins=[origin.lower() for origin in settings.allowed_origins],   # as browsers do
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
                allow_private_network=True,     # some browsers check before a public page reaches loopback
            )

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the errors of each dialect."""
        is_new = self.openapi_schema is None
        document = super().openapi()
        if is_new:
            document_errors(document, self._errors)
        return document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; the ASGI protocol."""
        app = self._cors or self._route

        async def send_counted(message: Message) -> None:
            # Before its client has the end of the answer, and may send the next request.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._keys.end_current()
            await send(message)

        try:
            await app(scope, receive, send_counted if self._keys.are_limited else send)
        finally:
            self._keys.end_current()    # also if its key has had limits for an instant only

    def _route(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_of_kserve = scope["type"] == "http" and is_kserve(scope["path"])
        return (self._kserve if is_of_kserve else self._other_routes)(scope, receive, send)

    async def _handle_others(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._admitted
        if scope["type"] == "http":
            if scope["method"] == "HEAD":   # answered as GET; uvicorn leaves out the body
                scope = {**scope, "method": "GET"}
            controls = scope["path"].startswith(_CONTROL_PATHS)
            try:
                self._check(scope, part=_part_of_others(scope), controls=controls)
            except GenserveError as error:
                app = self._errors.response(error, path=scope["path"])
        await app(scope, receive, send)

    def _check(self, scope: Scope, *, part: str, controls: bool) -> None:
        """Raise the error that rejects a request, before its body is read.

        Args:
            scope: of the request.
            part: of KServe that it belongs to; empty: none.
            controls: whether it changes the server.
        """
        raise_connection_error(scope)
        request = CURRENT_REQUEST.get()
        assert request is not None
        request.controls = controls
        key = self._access.check(
            method=scope["method"], path=scope["path"], headers=scope["headers"], controls=controls
        )
        if self._restrictions:
            check_restriction(self._restrictions.get(part), headers=scope["headers"])
        if key is not None and part == "inference" and scope["method"] == "POST":
            self._keys.admit(request, key)


def _part_of_others(scope: Scope) -> str:
    """Return the part of KServe that corresponds to a route; empty: none, as for pages and metrics."""
    path = scope["path"]
    if path in ("/health", "/ping"):
        return "health"
    if path.startswith(_METADATA_PATHS):
        return "metadata"
    return "inference" if scope["method"] == "POST" or path.startswith("/v1/responses") else ""


async def _on_client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
