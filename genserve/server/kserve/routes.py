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

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genserve.errors import GenserveError, InferenceError, Status
from genserve.request_context import MAY_FAIL, VERBOSE, RequestContext
from genserve.server.access.access_control import HEALTH, INFERENCE, METADATA, PROBE, Part, Rights
from genserve.server.error_statuses import as_genserve_error
from genserve.server.http.sse_response import ClientLeft
from genserve.server.kserve import administration as admin
from genserve.server.kserve import inference
from genserve.server.kserve.http_messages import KServeCall, KServeResponse, error_response, message_response
from genserve.server.kserve.state import KServeState
from genserve.server.observe.access_log import (
    CLIENT_CLOSED_REQUEST,
    answer_logged,
    begin_request,
    id_header,
    log_http,
)
from genserve.server.route import NO_ROUTE, RouteRules, admit
from genserve.server.services import Services

Handler = Callable[[KServeCall], Awaitable[ASGIApp]]


def _reading(part: Part) -> RouteRules:
    return RouteRules(rights=Rights(part=part), levels=VERBOSE)


def _changing(part: Part) -> RouteRules:
    return RouteRules(rights=Rights(part=part, controls=True))


_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = r"/v2/repository(?:/(?P<repository>[^/]+))?"
_REPOSITORY_MODEL = _REPOSITORY + r"/models/(?P<model>[^/]+)"
_REGION = r"(?:/region/(?P<region>[^/]+))?"
_SYSTEM_REGION = "/v2/systemsharedmemory" + _REGION
_CUDA_REGION = "/v2/cudasharedmemory" + _REGION
_MODEL_TRACE = r"/v2/models/(?P<model>[^/]+)/trace/setting"

_INFER = RouteRules(rights=INFERENCE, levels=VERBOSE)
_PROBE = RouteRules(rights=PROBE, levels=MAY_FAIL)
_METADATA = RouteRules(rights=METADATA, levels=VERBOSE)
_REPOSITORY_CHANGE = _changing("model-repository")
_REGION_CHANGE = _changing("shared-memory")
_INDEX = RouteRules(rights=Rights(part="model-repository"))


@dataclass(frozen=True, slots=True)
class KServeRoute:
    """One route of the protocol."""

    method: str
    pattern: str        # a regular expression with a named group for each part that varies
    handler: Handler
    rules: RouteRules
    is_traced: bool = False

    @property
    def path(self) -> str:
        """The path as the docs show it: `/v2/models/{model}[/versions/{version}]`."""
        named = re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", self.pattern)
        return re.sub(r"\(\?:(.*?)\)\?", r"[\1]", named)

    @property
    def text(self) -> str:
        """What it does, in one sentence."""
        return (self.handler.__doc__ or "").partition("\n")[0]


# The first match of a path counts; `infer` is the most frequent.
ROUTES = (
    KServeRoute("POST", f"{_MODEL}/infer", inference.infer, _INFER, is_traced=True),
    KServeRoute("POST", f"{_MODEL}/generate", inference.generate, _INFER, is_traced=True),
    KServeRoute("POST", f"{_MODEL}/generate_stream", inference.generate_stream, _INFER, is_traced=True),
    KServeRoute("GET", "/v2/health/live", admin.server_live, _PROBE),
    KServeRoute("GET", "/v2/health/ready", admin.server_ready, _PROBE),
    KServeRoute("GET", "/v2", admin.server_metadata, _METADATA),
    KServeRoute("GET", "/v2/models/stats", admin.statistics, _reading("statistics")),
    KServeRoute("GET", f"{_MODEL}/stats", admin.statistics, _reading("statistics")),
    KServeRoute("GET", f"{_MODEL}/ready", admin.model_ready, RouteRules(rights=HEALTH, levels=MAY_FAIL)),
    KServeRoute("GET", f"{_MODEL}/config", admin.model_config, _reading("model-config")),
    KServeRoute("GET", _MODEL, admin.model_metadata, _METADATA),
    KServeRoute("GET", _MODEL_TRACE, admin.model_trace_settings, _reading("trace")),
    KServeRoute("POST", _MODEL_TRACE, admin.set_model_trace_settings, _changing("trace")),
    KServeRoute("GET", "/v2/trace/setting", admin.trace_settings, _reading("trace")),
    KServeRoute("POST", "/v2/trace/setting", admin.set_trace_settings, _changing("trace")),
    KServeRoute("GET", "/v2/logging", admin.log_settings, _reading("logging")),
    KServeRoute("POST", "/v2/logging", admin.set_log_settings, _changing("logging")),
    KServeRoute("POST", f"{_REPOSITORY}/index", admin.repository_index, _INDEX),
    KServeRoute("POST", f"{_REPOSITORY_MODEL}/load", admin.repository_load, _REPOSITORY_CHANGE),
    KServeRoute("POST", f"{_REPOSITORY_MODEL}/unload", admin.repository_unload, _REPOSITORY_CHANGE),
    KServeRoute("GET", f"{_SYSTEM_REGION}/status", admin.region_status, _reading("shared-memory")),
    KServeRoute("POST", f"{_SYSTEM_REGION}/register", admin.register_region, _REGION_CHANGE),
    KServeRoute("POST", f"{_SYSTEM_REGION}/unregister", admin.unregister_region, _REGION_CHANGE),
    KServeRoute("GET", f"{_CUDA_REGION}/status", admin.cuda_status, _reading("shared-memory")),
    KServeRoute("POST", f"{_CUDA_REGION}/register", admin.register_cuda_region, _REGION_CHANGE),
    KServeRoute("POST", f"{_CUDA_REGION}/unregister", admin.unregister_cuda_region, _REGION_CHANGE),
)


def _by_path() -> list[tuple[re.Pattern[str], dict[str, KServeRoute]]]:
    """Return the routes of each path by method, in the order of the table."""
    patterns: dict[str, dict[str, KServeRoute]] = {}
    for route in ROUTES:
        patterns.setdefault(route.pattern, {})[route.method] = route
    return [(re.compile(pattern), methods) for pattern, methods in patterns.items()]


_BY_PATH = _by_path()


def is_kserve(path: str) -> bool:
    """Whether a path belongs to the protocol."""
    return path.startswith("/v2") and path[3:4] in ("", "/")


def _match(path: str) -> tuple[re.Match[str] | None, Mapping[str, KServeRoute]]:
    """Return the match of a path with its pattern, and the routes by method."""
    for pattern, methods in _BY_PATH:
        if found := pattern.fullmatch(path):
            return found, methods
    return None, {}


class KServe:
    """All paths below `/v2`, as one ASGI application."""

    def __init__(self, services: Services, state: KServeState) -> None:
        self._services = services
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, with every error as a response, and log it; the ASGI protocol."""
        request = begin_request(scope, receive, self._services.request_spans)
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

    async def _respond(self, request: RequestContext, scope: Scope, receive: Receive) -> ASGIApp:
        method = scope["method"]
        if method == "HEAD":    # answered as GET; uvicorn leaves out the body
            method = "GET"
        found, methods = _match(scope["path"])
        route = methods.get(method)
        # A wrong method needs the rights of another one of its path, so that it tells nothing to others.
        known = route or next(iter(methods.values()), None)
        try:
            admit(self._services, scope, NO_ROUTE if known is None else known.rules)
        except GenserveError as error:
            return error_response(error)
        if found is None:
            return message_response("Not Found", status_code=404)
        if route is None:
            allow = (b"allow", ", ".join(methods).encode())
            return message_response("Method Not Allowed", status_code=405, headers=[allow])
        names = found.groupdict("")
        request.model = names.get("model", "")
        call = KServeCall(self._services, self._state, scope=scope, receive=receive, names=names)
        try:
            if route.is_traced and self._state.trace_settings.enabled:
                return await self._traced(route.handler, call)
            return await route.handler(call)
        except ClientLeft:
            raise
        except asyncio.CancelledError:
            # By the server, when the drain is over.
            return error_response(InferenceError("the server has stopped", status=Status.UNAVAILABLE))
        except Exception as error:
            return _failed(error, scope["path"])

    async def _traced(self, handler: Handler, call: KServeCall) -> ASGIApp:
        """Handle a request to a model that may be traced, and trace it if it is sampled."""
        call.trace = trace = self._state.trace_settings.sample(call.model)
        if trace is None:
            return await handler(call)
        trace.record("HTTP_RECV_START")
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
                trace.record("HTTP_SEND_START")
                await send(message)
                trace.record("HTTP_SEND_END")

            try:
                await response(scope, receive, send_noted)
            finally:
                trace.close()

        return send_traced


def _failed(error: Exception, target: str) -> ASGIApp:
    return error_response(as_genserve_error(error, doing=f"a request to {target}"))
