"""KServe: the routes of the KServe v2 protocol over HTTP, with Triton's extensions.

They are a table of their own, not FastAPI's: paths match as Triton's regular expressions do, bodies are
binary or parsed to Triton's letter, and the way to `infer` has nothing on it that a request does not need.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

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
from genserve.server.routes.kserve_administration import (
    cuda_status,
    log_settings,
    model_config,
    model_metadata,
    model_ready,
    model_trace_settings,
    region_status,
    register_cuda_region,
    register_region,
    repository_index,
    repository_load,
    repository_unload,
    server_live,
    server_metadata,
    server_ready,
    set_log_settings,
    set_model_trace_settings,
    set_trace_settings,
    statistics,
    trace_settings,
    unregister_cuda_region,
    unregister_region,
)
from genserve.server.routes.kserve_http import KServeCall, KServeResponse, error_response, message_response
from genserve.server.routes.kserve_inference import generate, generate_stream, infer
from genserve.server.services import Services
from genserve.server.sse_response import ClientLeft

__all__ = ["KServe", "KServeRoute", "is_kserve", "part_of", "route_table"]

Handler = Callable[[KServeCall], Awaitable[ASGIApp]]

_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = r"/v2/repository(?:/(?P<repository>[^/]+))?"
_REGION = r"(?:/region/(?P<region>[^/]+))?"
_TRACED: frozenset[Handler] = frozenset({infer, generate, generate_stream})
# Each with the part of the protocol that it is; the first that matches answers. `infer` is asked most.
_ROUTES: tuple[tuple[re.Pattern[str], str, Mapping[str, Handler]], ...] = tuple(
    (re.compile(path), part, handlers)
    for path, part, handlers in (
        (f"{_MODEL}/infer", "inference", {"POST": infer}),
        (f"{_MODEL}/generate", "inference", {"POST": generate}),
        (f"{_MODEL}/generate_stream", "inference", {"POST": generate_stream}),
        (r"/v2/health/live", "health", {"GET": server_live}),
        (r"/v2/health/ready", "health", {"GET": server_ready}),
        (r"/v2", "metadata", {"GET": server_metadata}),
        (r"/v2/models/stats", "statistics", {"GET": statistics}),
        (f"{_MODEL}/stats", "statistics", {"GET": statistics}),
        (f"{_MODEL}/ready", "health", {"GET": model_ready}),
        (f"{_MODEL}/config", "model-config", {"GET": model_config}),
        (_MODEL, "metadata", {"GET": model_metadata}),
        (r"/v2/models/(?P<model>[^/]+)/trace/setting", "trace", {
            "GET": model_trace_settings, "POST": set_model_trace_settings}),
        (r"/v2/trace/setting", "trace", {"GET": trace_settings, "POST": set_trace_settings}),
        (r"/v2/logging", "logging", {"GET": log_settings, "POST": set_log_settings}),
        (f"{_REPOSITORY}/index", "model-repository", {"POST": repository_index}),
        (f"{_REPOSITORY}/models/(?P<model>[^/]+)/load", "model-repository", {"POST": repository_load}),
        (f"{_REPOSITORY}/models/(?P<model>[^/]+)/unload", "model-repository", {"POST": repository_unload}),
        (f"/v2/systemsharedmemory{_REGION}/status", "shared-memory", {"GET": region_status}),
        (f"/v2/systemsharedmemory{_REGION}/register", "shared-memory", {"POST": register_region}),
        (f"/v2/systemsharedmemory{_REGION}/unregister", "shared-memory", {"POST": unregister_region}),
        (f"/v2/cudasharedmemory{_REGION}/status", "shared-memory", {"GET": cuda_status}),
        (f"/v2/cudasharedmemory{_REGION}/register", "shared-memory", {"POST": register_cuda_region}),
        (f"/v2/cudasharedmemory{_REGION}/unregister", "shared-memory", {"POST": unregister_cuda_region}),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KServeRoute:
    """One route, as a person is shown it."""

    method: str
    path: str       # `/v2/models/{model}[/versions/{version}]`
    text: str       # what it does, one sentence


def route_table() -> list[KServeRoute]:
    """Return all routes, in the order in which they are looked for."""
    return [
        KServeRoute(method=method, path=_shown(pattern), text=(handler.__doc__ or "").partition("\n")[0])
        for pattern, _, handlers in _ROUTES
        for method, handler in handlers.items()
    ]


def _shown(pattern: re.Pattern[str]) -> str:
    named = re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", pattern.pattern)
    return re.sub(r"\(\?:(.*?)\)\?", r"[\1]", named)


def is_kserve(path: str) -> bool:
    """Whether a path is the protocol's."""
    return path.startswith("/v2") and path[3:4] in ("", "/")


def part_of(path: str) -> str:
    """Return the part of the protocol that a path belongs to, by Triton's name; empty: none has it."""
    return next((part for pattern, part, _ in _ROUTES if pattern.fullmatch(path)), "")


class KServe:
    """All paths below `/v2`, as one ASGI application."""

    def __init__(self, services: Services, *, check: Callable[[Scope], None]) -> None:
        """Answer for `services`; `check` raises what a request is refused with by its headers."""
        self._services = services
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it; whatever fails is an answer too. The ASGI protocol."""
        request = begin_request(scope)
        try:
            response = await self._respond(request, scope, receive)
        except ClientLeft:
            log_http(request, scope, status=CLIENT_CLOSED_REQUEST)
            return
        if isinstance(response, KServeResponse):
            # A wrapper around `send`, as for streams, would cost `infer` a tenth.
            await response.send(send, id_header(request))
            log_http(request, scope, status=response.status_code)
        else:
            with suppress(ClientLeft):
                await answer_logged(request, response, scope, receive, send)

    async def _respond(self, request: LoggedRequest, scope: Scope, receive: Receive) -> ASGIApp:
        try:
            self._check(scope)
        except GenserveError as error:
            return error_response(error)
        try:
            for pattern, _, handlers in _ROUTES:
                if found := pattern.fullmatch(scope["path"]):
                    handler = handlers.get(scope["method"])
                    if handler is None:
                        return message_response("Method Not Allowed", status_code=405)
                    names = found.groupdict("")
                    request.model = names.get("model", "")
                    call = KServeCall(self._services, scope=scope, receive=receive, names=names)
                    if self._services.trace_settings.enabled and handler in _TRACED:
                        return await self._traced(handler, call)
                    return await handler(call)
            return message_response("Not Found", status_code=404)
        except ClientLeft:
            raise
        except asyncio.CancelledError:
            # By the server, which has waited long enough for it.
            return error_response(InferenceError("the server has stopped", status=Status.UNAVAILABLE))
        except Exception as error:
            return _failed(error, scope["path"])

    async def _traced(self, handler: Handler, call: KServeCall) -> ASGIApp:
        """Answer a request to a model that is traced, if it is."""
        call.trace = trace = self._services.trace_settings.sample(call.model)
        if trace is None:
            return await handler(call)
        trace.note("HTTP_RECV_START")
        try:
            answer = await handler(call)
        except (ClientLeft, asyncio.CancelledError):
            trace.close()
            raise
        except Exception as error:
            answer = _failed(error, f"model '{call.model}'")

        async def send_traced(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_noted(message: Message) -> None:
                if message["type"] != "http.response.body":
                    await send(message)
                    return
                trace.note("HTTP_SEND_START")
                await send(message)
                trace.note("HTTP_SEND_END")

            try:
                await answer(scope, receive, send_noted)
            finally:
                trace.close()

        return send_traced


def _failed(error: Exception, asked: str) -> ASGIApp:
    return error_response(as_genserve_error(error, doing=f"a request to {asked}"))
