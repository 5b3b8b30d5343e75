"""App: the routes of a server as one ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genserve.errors import GenserveError
from genserve.redaction import keep_routes
from genserve.request_context import current_request
from genserve.server.dialects import rerank, router_protocol, systemone, tgi, tokenize
from genserve.server.dialects.anthropic import messages
from genserve.server.dialects.gemini import routes as gemini
from genserve.server.dialects.ollama import blobs, embed, manage
from genserve.server.dialects.ollama import routes as ollama
from genserve.server.dialects.openai import adapters, chat, completions, embeddings, responses
from genserve.server.error_responses import ErrorResponses, document_errors
from genserve.server.http.sse_response import ClientLeft
from genserve.server.kserve.routes import ROUTES, KServe, is_kserve
from genserve.server.kserve.state import KServeState
from genserve.server.observe.access_log import CLIENT_CLOSED_REQUEST, AccessLog
from genserve.server.pages import bundled_pages, docs_page, health
from genserve.server.route import JsonRoute, no_route
from genserve.server.services import Services
from genserve.version import __version__

# Modules with a `router`, in the order of the page at /docs. An unknown path gets the errors of the longest
# prefix that fits, and TGI is the first without one.
_DIALECTS = (
    chat, responses, completions, embeddings, adapters, rerank, systemone, messages, gemini, ollama, embed,
    manage, blobs, tgi, tokenize, router_protocol,
)  # fmt: skip
_PAGES = (health, bundled_pages, docs_page)
ROUTERS = tuple(module.router for module in (*_DIALECTS, *_PAGES))


def create_app(services: Services, kserve: KServeState) -> FastAPI:
    """Return the application of a server; the caller loads and closes its repository."""
    app = _App(
        services,
        kserve,
        title="genserve",
        version=__version__,
        description="Text generation and embeddings from a model repository in Triton's format.",
        openapi_url=None,  # a route of `docs_page`, with rules
        docs_url=None,  # FastAPI's own pages load their scripts from the internet
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # `RequestSpans` has the spans
        # `include_router` would build each of them again, for 30 ms of the first request.
        routes=[route for router in ROUTERS for route in router.routes],
        redirect_slashes=False,  # a redirect would name a host, and repeat a request with its body
        strict_content_type=False,  # clients may leave it out; AccessControl rejects forms
    )
    app.state.services = services
    app.router.default = no_route
    declared: list[Any] = [*app.routes, *ROUTES]
    keep_routes(route.path for route in declared)
    return app


class _App(FastAPI):
    """FastAPI behind the routes of KServe and those that generate.

    Its middleware and its search for the route would add a third to the time of a rejected request.

    Attributes:
        errors: the responses to requests that fail.
    """

    _document: ClassVar[dict[str, Any] | None] = None

    def __init__(self, services: Services, kserve: KServeState, **options: Any) -> None:
        super().__init__(**options)
        self.errors = ErrorResponses(ROUTERS)
        self.errors.install(self)
        for error in (ClientLeft, ClientDisconnect):  # before the answer; in the middle of the body
            self.add_exception_handler(error, _on_client_left)
        self._generations = {
            route.path: route for route in self.routes if isinstance(route, JsonRoute) and route.generates
        }
        self._keys = services.keys
        self._kserve: ASGIApp = KServe(services, kserve)
        self._fastapi: ASGIApp = AccessLog(self._answer, services.request_spans)
        self._cors: ASGIApp | None = None
        if origins := services.settings.allowed_origins:
            self._cors = CORSMiddleware(
                self._route,
                allow_origins=[origin.lower() for origin in origins],  # as browsers do
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
                allow_private_network=True,  # some browsers check before a public page reaches loopback
            )

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the errors of each dialect."""
        # The applications of a process have the same routes, whose document takes half a second.
        if _App._document is None:
            document = super().openapi()
            document_errors(document, ROUTERS)
            _App._document = document
        return _App._document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; the ASGI protocol."""
        app = self._cors or self._route

        async def send_counted(message: Message) -> None:
            # Before its client has the end of the answer, and may send the next request.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._keys.end(current_request())
            await send(message)

        try:
            await app(scope, receive, send_counted if self._keys.has_keys else send)
        finally:
            self._keys.end(current_request())
            current_request().end_uses()

    def _route(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_of_kserve = scope["type"] == "http" and is_kserve(scope["path"])
        return (self._kserve if is_of_kserve else self._fastapi)(scope, receive, send)

    def _answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            if scope["method"] == "HEAD":  # as GET; uvicorn leaves out the body
                scope = {**scope, "method": "GET"}
            route = self._generations.get(scope["path"])
            if route is not None and scope["method"] in (route.methods or ()):
                return _generate({**scope, "app": self, "route": route}, receive, send)
        return super().__call__(scope, receive, send)


async def _generate(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a generation. Starlette's middleware of errors would wrap the sending of each event."""
    route: JsonRoute = scope["route"]
    errors: ErrorResponses = scope["app"].errors
    try:
        response = await route.generate(scope, receive)
    except GenserveError as error:
        response = errors.response(scope, error)
    except (ClientLeft, ClientDisconnect):
        response = Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:
        response = errors.unexpected(scope, error)
    await response(scope, receive, send)


async def _on_client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
