"""Access log: one line for each request that has ended, with its id.

Requests that are rejected or fail are logged as warnings, generations and changes of the server as
information, inferences of other models and polling at a verbose level. No line quotes a request or an answer.
Requests that change the server, or try to, have their line in the audit log instead, which clients cannot
switch off.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genserve.errors import ModelFailed
from genserve.log import AUDIT, CURRENT_REQUEST, LoggedRequest, quoted
from genserve.server.access_control import PAGE_FILES, PROBES
from genserve.server.error_responses import error_code
from genserve.server.request_spans import RequestSpans
from genserve.server.sse_response import ClientLeft

logger = logging.getLogger(__name__)
audit = logging.getLogger(AUDIT)
audit.setLevel(logging.INFO)    # whatever the level of the log is

# Any other id is replaced by one of ours.
_ID = re.compile(rb"[!-~]{1,128}")
_ID_NAME = b"x-request-id"
_SERVER_ID = secrets.token_hex(10)      # of this process, so that ids differ between servers
_numbers = itertools.count()
CLIENT_CLOSED_REQUEST = 499  # as in the logs of nginx; no client receives it


class AccessLog:
    """ASGI middleware that logs each request, and returns its id as `X-Request-Id`."""

    def __init__(self, app: ASGIApp, spans: RequestSpans | None) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the header to its response."""
        if scope["type"] == "http":
            await answer_logged(begin_request(scope, self._spans), self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)


def begin_request(scope: Scope, spans: RequestSpans | None) -> LoggedRequest:
    """Return the log's record of a request, and make it the current one; call `log_http` when it has ended.

    Its id is the caller's or a new one, and is in each line that is logged for the request. It has a span if
    the server has `spans`.
    """
    request = LoggedRequest(id=_given_id(scope) or _new_id())
    if spans is not None:
        request.span = spans.begin(scope["headers"])
    CURRENT_REQUEST.set(request)
    return request


async def answer_logged(
    request: LoggedRequest, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Call an application, add the id to its response's headers, and log how the request ended."""
    status = 0

    async def send_with_id(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            message["headers"] = [*message["headers"], id_header(request)]
        await send(message)

    try:
        await app(scope, receive, send_with_id)
    except ClientLeft:
        log_http(request, scope, status=status or CLIENT_CLOSED_REQUEST)
        raise
    except BaseException as error:
        if request.error is None and not isinstance(error, asyncio.CancelledError):
            request.error = ModelFailed("the answer ended early")
        log_http(request, scope, status=status or 500)
        raise
    log_http(request, scope, status=status or CLIENT_CLOSED_REQUEST)


def id_header(request: LoggedRequest) -> tuple[bytes, bytes]:
    """Return the response header with the id of a request."""
    return _ID_NAME, request.id.encode()


def _given_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _ID_NAME:
            return value.decode() if _ID.fullmatch(value) else ""
    return ""


def _new_id() -> str:
    # A random number for each request would be the log's largest cost in `infer`.
    return f"{_SERVER_ID}{next(_numbers):012x}"


def is_verbose() -> bool:
    """Whether the lines of the verbose level are logged."""
    return logger.isEnabledFor(logging.DEBUG)


def log_request(
    request: LoggedRequest, *, client: str, call: str, status: str, failed: bool, as_info: bool
) -> None:
    """Write the line of a request that has ended.

    Args:
        request: the log's record of it.
        client: its address.
        call: the method and path of HTTP, or the method of gRPC.
        status: the number or word that the client received.
        failed: whether it was rejected or failed.
        as_info: whether to log a success at the default level; generations always are.
    """
    if request.span is not None:
        request.span.end(request)
    if failed:
        level = logging.WARNING
    elif as_info or request.answers or request.controls:
        level = logging.INFO
    else:
        level = logging.DEBUG
    log = audit if request.controls else logger
    if not log.isEnabledFor(level):
        return
    fields = {
        "model": quoted(request.model) if request.model else "",
        "key": request.key,
        "change": quoted(request.change) if request.change else "",
    }
    if request.answers:
        first_token_s, tokens_per_s = request.first_token_s(), request.tokens_per_s()
        fields |= {
            "prompt_tokens": str(request.prompt_tokens),
            "cached_tokens": str(request.cached_tokens),
            "completion_tokens": str(request.completion_tokens),
            "ending": request.ending(),
            "first_token_s": "" if first_token_s is None else f"{first_token_s:.3f}",
            "tokens_per_s": "" if tokens_per_s is None else f"{tokens_per_s:.1f}",
        }
    fields["seconds"] = f"{time.monotonic() - request.started_s:.3f}"
    error = request.error
    if error is not None:
        fields["error"] = error_code(error)
        if is_verbose():    # since it may quote the request
            fields["message"] = quoted(error.message, limit=2048)
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value)
    kind = (status, fields.get("error"))
    log.log(level, "%s %s %s %s", quoted(client), call, status, text, extra={"kind": kind})


def log_http(request: LoggedRequest, scope: Scope, *, status: int) -> None:
    """Write the line of an HTTP request that ended with a status."""
    path: str = scope["path"]
    if status == 200 and path.endswith("/infer") and not (request.error or request.answers or is_verbose()):
        return
    # The failures of health checks while models load are expected.
    if path in PROBES or (path.startswith("/v2/models/") and path.endswith("/ready")):
        failed = as_info = False
    else:
        left = status == CLIENT_CLOSED_REQUEST
        failed = (status >= 400 and not left) or request.error is not None
        as_info = left or not _is_verbose(path, method=scope["method"])
    if failed or as_info or request.answers or is_verbose():
        client = scope.get("client")
        address = "-" if client is None else f"{client[0]}:{client[1]}"
        call = f"{scope['method']} {quoted(path)}"
        log_request(request, client=address, call=call, status=str(status), failed=failed, as_info=as_info)


def _is_verbose(path: str, *, method: str) -> bool:
    """Whether a success is logged only at the verbose level: inferences, polling and files of pages."""
    if path in ("/", "/dashboard") or path.startswith(PAGE_FILES):
        return method in ("GET", "HEAD")
    if path.startswith("/v2"):
        return method in ("GET", "HEAD") or path.endswith(("/infer", "/generate", "/generate_stream"))
    return path == "/metrics"
