"""Access log: one line for each request that has ended, and the id by which it went.

What is refused or fails is a warning. Of what succeeds, generated text and what changes the server is
information; inferences of other models and what is looked at over and over are told at a verbose level.
No line has what was sent or answered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genserve.errors import GenserveError, InferenceError, ModelFailed
from genserve.log import CURRENT_REQUEST, LoggedRequest, quoted
from genserve.server.sse_response import ClientLeft

__all__ = [
    "CLIENT_CLOSED_REQUEST",
    "AccessLog",
    "answer_logged",
    "begin_request",
    "id_header",
    "is_verbose",
    "log_http",
    "log_request",
]

logger = logging.getLogger(__name__)

# Anything else is not given back.
_ID = re.compile(rb"[!-~]{1,128}")
_ID_NAME = b"x-request-id"
_SERVER_ID = secrets.token_hex(10)      # of this process: no two make the same ids up
_numbers = itertools.count()
# Health checks, which fail as long as models are loaded, and say so to whoever asks.
_PROBES = frozenset({"/health", "/v2/health/live", "/v2/health/ready"})
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; proxies' logs use this number


class AccessLog:
    """ASGI middleware that logs each request, and tells the caller by which id it went: `X-Request-Id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, and write the header into its answer."""
        if scope["type"] == "http":
            await answer_logged(begin_request(scope), self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)


def begin_request(scope: Scope) -> LoggedRequest:
    """Return the request that the log tells of from here on; `log_http` is to be called at its end.

    Its id is the caller's own or made up, and stands in each line that is logged on the request's way.
    """
    request = LoggedRequest(id=_given_id(scope) or _made_up_id())
    CURRENT_REQUEST.set(request)
    return request


async def answer_logged(
    request: LoggedRequest, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Have an application answer, write the id into its headers, and log how it ended."""
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
            request.error = ModelFailed("the answer broke off")
        log_http(request, scope, status=status or 500)
        raise
    log_http(request, scope, status=status or CLIENT_CLOSED_REQUEST)


def id_header(request: LoggedRequest) -> tuple[bytes, bytes]:
    """Return the header that tells the caller the id of a request."""
    return _ID_NAME, request.id.encode()


def _given_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _ID_NAME:
            return value.decode() if _ID.fullmatch(value) else ""
    return ""


def _made_up_id() -> str:
    # A random number for each would be the largest part of what the log costs `infer`.
    return f"{_SERVER_ID}{next(_numbers):012x}"


def is_verbose() -> bool:
    """Whether what is no news is logged too."""
    return logger.isEnabledFor(logging.DEBUG)


def log_request(
    request: LoggedRequest, *, client: str, call: str, status: str, failed: bool, as_info: bool
) -> None:
    """Write the line of a request that has ended.

    Args:
        request: with what is known of it.
        client: its address.
        call: the method and the path, or the method of gRPC.
        status: the number or the word that the client was told.
        failed: whether it was refused, or failed.
        as_info: whether a success of its kind is told at the default level; generated text is.
    """
    if failed:
        level = logging.WARNING
    elif as_info or request.answers:
        level = logging.INFO
    else:
        level = logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    fields = {"model": quoted(request.model) if request.model else ""}
    if request.answers:
        first_token_s = request.first_token_s()
        fields |= {
            "prompt_tokens": str(request.prompt_tokens),
            "completion_tokens": str(sum(answer.num_new_tokens for answer in request.answers)),
            "ending": request.ending(),
            "first_token_s": "" if first_token_s is None else f"{first_token_s:.3f}",
        }
    fields["seconds"] = f"{time.monotonic() - request.started_s:.3f}"
    error = request.error
    if error is not None:
        fields["error"] = _code(error)
        if is_verbose():    # it may quote what was sent
            fields["message"] = quoted(error.message, limit=2048)
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value)
    kind = (status, fields.get("error"))
    logger.log(level, "%s %s %s %s", quoted(client), call, status, text, extra={"kind": kind})


def log_http(request: LoggedRequest, scope: Scope, *, status: int) -> None:
    """Write the line of an HTTP request that was answered with a status."""
    path: str = scope["path"]
    if status == 200 and path.endswith("/infer") and not (request.error or request.answers or is_verbose()):
        return
    if path in _PROBES or (path.startswith("/v2/models/") and path.endswith("/ready")):
        failed = as_info = False
    else:
        left = status == CLIENT_CLOSED_REQUEST
        failed = (status >= 400 and not left) or request.error is not None
        as_info = left or not _is_quiet(path, method=scope["method"])
    if failed or as_info or request.answers or is_verbose():
        client = scope.get("client")
        address = "-" if client is None else f"{client[0]}:{client[1]}"
        call = f"{scope['method']} {quoted(path)}"
        log_request(request, client=address, call=call, status=str(status), failed=failed, as_info=as_info)


def _is_quiet(path: str, *, method: str) -> bool:
    """Whether a success is told at a verbose level alone: inferences, and what is looked at over and over."""
    if path.startswith("/v2"):
        return method == "GET" or path.endswith(("/infer", "/generate", "/generate_stream"))
    return path == "/metrics"


def _code(error: GenserveError) -> str:
    return error.status.lower() if isinstance(error, InferenceError) else error.code
