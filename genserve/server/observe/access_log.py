"""Access log: one line for each request that has ended, with its id.

Requests that are rejected or fail are logged as warnings, generations and changes of the server as
information, and any other success at the level of its route. No line quotes a request or an answer.
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
from genserve.log import AUDIT, quoted
from genserve.request_context import CURRENT_REQUEST, RequestContext
from genserve.server.error_statuses import error_code
from genserve.server.http.sse_response import ClientLeft
from genserve.server.observe.request_spans import RequestSpan, RequestSpans

logger = logging.getLogger(__name__)
audit = logging.getLogger(AUDIT)
audit.setLevel(logging.INFO)    # whatever the level of the log is

# Any other id is replaced by one of ours.
_ID = re.compile(rb"[!-~]{1,128}")
_ID_NAME = b"x-request-id"
_SERVER_ID = secrets.token_hex(10)      # made by each process, so that ids differ between servers
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
            await answer_logged(begin_request(scope, receive, self._spans), self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)


def begin_request(scope: Scope, receive: Receive, spans: RequestSpans | None) -> RequestContext:
    """Return the log's record of a request, and make it the current one; call `log_http` when it has ended.

    Its id is the caller's or a new one, and is in each line that is logged for the request. It has a span if
    the server has `spans`.
    """
    request = RequestContext(id=_given_id(scope) or _new_id(), receive=receive)
    if spans is not None:
        request.span = RequestSpan(spans, scope["headers"])
    CURRENT_REQUEST.set(request)
    return request


async def answer_logged(
    request: RequestContext, app: ASGIApp, scope: Scope, receive: Receive, send: Send
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


def id_header(request: RequestContext) -> tuple[bytes, bytes]:
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


def level_of(request: RequestContext, *, failed: bool) -> int:
    """Return the level of the line of a request that was rejected or failed, or succeeded."""
    if failed:
        return request.levels.failure
    return logging.INFO if request.answers or request.controls else request.levels.success


def log_request(request: RequestContext, *, client: str, call: str, status: str, level: int) -> None:
    """Write the line of a request that has ended.

    Args:
        request: the request's record.
        client: the client's address.
        call: the method and path of HTTP, or the method of gRPC.
        status: the number or word that the client received.
        level: see `level_of`.
    """
    if request.span is not None:
        request.span.end(request)
    log = audit if request.controls else logger
    if not log.isEnabledFor(level):
        return
    fields = {
        "model": quoted(request.model) if request.model else "",
        "key": request.key.name,
        "change": quoted(request.change) if request.change else "",
    }
    if request.answers:
        first_token_s, tokens_per_s = request.first_token_s(), request.tokens_per_s()
        fields |= {
            "prompt_tokens": str(request.prompt_tokens),
            "cached_tokens": str(request.cached_tokens),
            "completion_tokens": str(request.completion_tokens),
            "finish_reason": ",".join(dict.fromkeys(request.finish_reasons())),
            **_timing_fields(request),
            "first_token_s": "" if first_token_s is None else f"{first_token_s:.3f}",
            "tokens_per_s": "" if tokens_per_s is None else f"{tokens_per_s:.1f}",
        }
    fields["left_out"] = quoted(request.left_out) if request.left_out else ""
    fields["seconds"] = f"{time.monotonic() - request.started_s:.3f}"
    error = request.error
    if error is not None:
        fields["error"] = error_code(error)
        fields["field"] = request.field
        if is_verbose():    # since it may quote the request
            fields["message"] = quoted(error.message, limit=2048)
    text = " ".join([f"{name}={value}" for name, value in fields.items() if value])
    line, extra = (quoted(client), call, status, text), {"kind": (status, fields.get("error"))}
    # `log.log` would look for the caller, a tenth of what the line costs.
    log.handle(log.makeRecord(log.name, level, __file__, 0, "%s %s %s %s", line, None, extra=extra))


def _timing_fields(request: RequestContext) -> dict[str, str]:
    timings = request.timings()
    if timings is None:
        return {}
    drafts = {"drafted_tokens": timings.drafted_tokens, "accepted_tokens": timings.accepted_tokens}
    return {
        "queue_s": f"{timings.queue_s:.3f}",
        "prefill_s": f"{timings.prefill_s:.3f}",
        **({name: str(count) for name, count in drafts.items()} if timings.drafted_tokens else {}),
    }


def log_http(request: RequestContext, scope: Scope, *, status: int) -> None:
    """Write the line of an HTTP request that ended with a status."""
    left = status == CLIENT_CLOSED_REQUEST
    level = level_of(request, failed=(status >= 400 and not left) or request.error is not None)
    if left:
        level = max(level, min(logging.INFO, request.levels.failure))
    if level > logging.DEBUG or is_verbose():
        client = scope.get("client")
        address = "-" if client is None else f"{client[0]}:{client[1]}"
        call = f"{scope['method']} {quoted(scope['path'])}"
        log_request(request, client=address, call=call, status=str(status), level=level)
