"""KServe: the routes of the KServe v2 protocol over HTTP, with Triton's extensions.

They do not use FastAPI: paths match Triton's regular expressions, bodies are binary or parsed exactly as
Triton does, and `infer` is fast because nothing runs that a request does not need.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genserve.errors import GenserveError, InferenceError, Status
from genserve.log import LoggedRequest
from genserve.server.access_log import (
    CLIENT_CLOSED_REQUEST,
    answer_logged,
    begin_request,
    id_header,
    log_http,
)
from genserve.server.error_responses import as_genserve_error
from genserve.server.routes import kserve_administration as admin
from genserve.server.routes import kserve_inference as inference
from genserve.server.routes.kserve_http import KServeCall, KServeResponse, error_response, message_response
from genserve.server.services import Services
from genserve.server.sse_response import ClientLeft

Handler = Callable[[KServeCall], Awaitable[ASGIApp]]

_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = r"/v2/repository(?:/(?P<repository>[^/]+))?"
_REPOSITORY_MODEL = _REPOSITORY + r"/models/(?P<model>[^/]+)"
_REGION = r"(?:/region/(?P<region>[^/]+))?"
_SYSTEM_REGION = "/v2/systemsharedmemory" + _REGION
_CUDA_REGION = "/v2/cudasharedmemory" + _REGION
_TRACED: frozenset[Handler] = frozenset({inference.infer, inference.generate, inference.generate_stream})
# The handlers that change the server.
_CONTROL: frozenset[Handler] = frozenset({
    admin.repository_load, admin.repository_unload, admin.register_region, admin.unregister_region,
    admin.register_cuda_region, admin.unregister_cuda_region, admin.set_log_settings,
    admin.set_trace_settings, admin.set_model_trace_settings,
})  # fmt: skip
# Path, part of the protocol, handlers by method. The first match counts; `infer` is the most frequent.
_ROUTES: tuple[tuple[re.Pattern[str], str, Mapping[str, Handler]], ...] = tuple(
    (re.compile(path), part, handlers)
    for path, part, handlers in (
        (f"{_MODEL}/infer", "inference", {"POST": inference.infer}),
        (f"{_MODEL}/generate", "inference", {"POST": inference.generate}),
        (f"{_MODEL}/generate_stream", "inference", {"POST": inference.generate_stream}),
        (r"/v2/health/live", "health", {"GET": admin.server_live}),
        (r"/v2/health/ready", "health", {"GET": admin.server_ready}),
        (r"/v2", "metadata", {"GET": admin.server_metadata}),
        (r"/v2/models/stats", "statistics", {"GET": admin.statistics}),
        (f"{_MODEL}/stats", "statistics", {"GET": admin.statistics}),
        (f"{_MODEL}/ready", "health", {"GET": admin.model_ready}),
        (f"{_MODEL}/config", "model-config", {"GET": admin.model_config}),
        (_MODEL, "metadata", {"GET": admin.model_metadata}),
        (r"/v2/models/(?P<model>[^/]+)/trace/setting", "trace", {
            "GET": admin.model_trace_settings, "POST": admin.set_model_trace_settings}),
        (r"/v2/trace/setting", "trace", {"GET": admin.trace_settings, "POST": admin.set_trace_settings}),
        (r"/v2/logging", "logging", {"GET": admin.log_settings, "POST": admin.set_log_settings}),
        (f"{_REPOSITORY}/index", "model-repository", {"POST": admin.repository_index}),
        (f"{_REPOSITORY_MODEL}/load", "model-repository", {"POST": admin.repository_load}),
        (f"{_REPOSITORY_MODEL}/unload", "model-repository", {"POST": admin.repository_unload}),
        (f"{_SYSTEM_REGION}/status", "shared-memory", {"GET": admin.region_status}),
        (f"{_SYSTEM_REGION}/register", "shared-memory", {"POST": admin.register_region}),
        (f"{_SYSTEM_REGION}/unregister", "shared-memory", {"POST": admin.unregister_region}),
        (f"{_CUDA_REGION}/status", "shared-memory", {"GET": admin.cuda_status}),
        (f"{_CUDA_REGION}/register", "shared-memory", {"POST": admin.register_cuda_region}),
        (f"{_CUDA_REGION}/unregister", "shared-memory", {"POST": admin.unregister_cuda_region}),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KServeRoute:
    """One route, as the docs page shows it."""

    method: str
    path: str       # `/v2/models/{model}[/versions/{version}]`
    text: str       # one sentence


def route_table() -> list[KServeRoute]:
    """Return all routes, in the order of the table."""
    return [
        KServeRoute(method=method, path=_shown(pattern), text=(handler.__doc__ or "").partition("\n")[0])
        for pattern, _, handlers in _ROUTES
        for method, handler in handlers.items()
    ]


def _shown(pattern: re.Pattern[str]) -> str:
    named = re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", pattern.pattern)
    return re.sub(r"\(\?:(.*?)\)\?", r"[\1]", named)


def is_kserve(path: str) -> bool:
    """Whether a path belongs to the protocol."""
    return path.startswith("/v2") and path[3:4] in ("", "/")


def _match(path: str) -> tuple[re.Match[str] | None, str, Mapping[str, Handler]]:
    """Return the match of a path with its route, the part of the protocol, and the handlers by method."""
    for pattern, part, handlers in _ROUTES:
        if found := pattern.fullmatch(path):
            return found, part, handlers
    return None, "", {}


class Check(Protocol):
    """Raises the error that rejects a request, before its body is read."""

    def __call__(self, scope: Scope, *, part: str, controls: bool) -> None:
        """Check a request.

        Args:
            scope: of the request.
            part: of the protocol that its route belongs to, by Triton's name; empty: no route has its path.
            controls: whether it changes the server.
        """


class KServe:
    """All paths below `/v2`, as one ASGI application."""

    def __init__(self, services: Services, *, check: Check) -> None:
        """Serve `services`; `check` decides by the headers of each request."""
        self._services = services
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, with every error as a response, and log it; the ASGI protocol."""
        request = begin_request(scope, self._services.request_spans)
        try:
            response = await self._respond(request, scope, receive)
        except ClientLeft:
            log_http(request, scope, status=CLIENT_CLOSED_REQUEST)
            return
        if isinstance(response, KServeResponse):
            # Wrapping `send`, as for streams, would take a tenth of the time of `infer`.
            await response.send(send, id_header(request))
            log_http(request, scope, status=response.status_code)
        else:
            with suppress(ClientLeft):
                await answer_logged(request, response, scope, receive, send)

    async def _respond(self, request: LoggedRequest, scope: Scope, receive: Receive) -> ASGIApp:
        method = scope["method"]
        if method == "HEAD":    # answered as GET; uvicorn leaves out the body
            method = "GET"
        found, part, handlers = _match(scope["path"])
        handler = handlers.get(method)
        try:
            self._check(scope, part=part, controls=handler in _CONTROL)
        except GenserveError as error:
            return error_response(error)
        if found is None:
            return message_response("Not Found", status_code=404)
        if handler is None:
            allow = (b"allow", ", ".join(handlers).encode())
            return message_response("Method Not Allowed", status_code=405, headers=[allow])
        names = found.groupdict("")
        request.model = names.get("model", "")
        call = KServeCall(self._services, scope=scope, receive=receive, names=names)
        try:
            if self._services.trace_settings.enabled and handler in _TRACED:
                return await self._traced(handler, call)
            return await handler(call)
        except ClientLeft:
            raise
        except asyncio.CancelledError:
            # By the server, when the drain is over.
            return error_response(InferenceError("the server has stopped", status=Status.UNAVAILABLE))
        except Exception as error:
            return _failed(error, scope["path"])

    async def _traced(self, handler: Handler, call: KServeCall) -> ASGIApp:
        """Handle a request to a model that may be traced, and trace it if it is sampled."""
        call.trace = trace = self._services.trace_settings.sample(call.model)
        if trace is None:
            return await handler(call)
        trace.note("HTTP_RECV_START")
        try:
            response = await handler(call)
        except (ClientLeft, asyncio.CancelledError):
            trace.close()
            raise
        except Exception as error:
            response = _failed(error, f"model '{call.model}'")

        async def send_traced(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_noted(message: Message) -> None:
                if message["type"] != "http.response.body":
                    await send(message)
                    return
                trace.note("HTTP_SEND_START")
                await send(message)
                trace.note("HTTP_SEND_END")

            try:
                await response(scope, receive, send_noted)
            finally:
                trace.close()

        return send_traced


def _failed(error: Exception, target: str) -> ASGIApp:
    return error_response(as_genserve_error(error, doing=f"a request to {target}"))
