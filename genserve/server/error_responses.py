"""Error responses: the status, body and headers of every error, in the dialect of the route."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from genserve.errors import (
    Closed,
    Forbidden,
    GenserveError,
    InferenceError,
    InvalidRequest,
    MissingDependency,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    RepositoryError,
    Status,
    Unauthenticated,
    UnsupportedMediaType,
)
from genserve.log import fail_request
from genserve.redaction import redacted_error
from genserve.server.request_body import BodyTooLarge

__all__ = [
    "add_error_handlers",
    "error_response",
    "failure",
    "http_status",
    "openai_error",
    "renamed",
    "retry_headers",
    "text_of",
    "tgi_error",
]


logger = logging.getLogger(__name__)


def failure(error: Exception, *, doing: str) -> GenserveError:
    """Return the error for the client; one that nobody raised on purpose is logged, and not told in full.

    Args:
        error: what was caught.
        doing: what failed: "a request to /v2".
    """
    if isinstance(error, GenserveError):
        return error
    logger.error("%s failed", doing, exc_info=error)
    return InferenceError("the server failed; its log has the reason", status=Status.INTERNAL)


def text_of(error: GenserveError) -> str:
    """Return the message of an error as UTF-8 can have it: a text of Python may hold half a character."""
    return error.message.encode(errors="replace").decode()




# By class, nearest ancestor first.
_STATUS: Mapping[type[GenserveError], int] = {
    BodyTooLarge: 413,
    InvalidRequest: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    UnsupportedMediaType: 415,
    ModelNotFound: 404,
    ModelNotReady: 503,
    Overloaded: 429,
    Closed: 503,
    ModelFailed: 500,
    RepositoryError: 500,
    MissingDependency: 500,
    GenserveError: 500,
}
# TGI's own statuses and words, which its clients compare.
_TGI: Mapping[type[GenserveError], tuple[int, str]] = {
    BodyTooLarge: (413, "validation"),
    InvalidRequest: (422, "validation"),
    Unauthenticated: (401, "authentication"),
    Forbidden: (403, "authentication"),
    UnsupportedMediaType: (415, "validation"),
    ModelNotFound: (404, "validation"),
    ModelNotReady: (503, "overloaded"),
    Overloaded: (429, "overloaded"),
    Closed: (503, "overloaded"),
    ModelFailed: (424, "generation"),
    GenserveError: (500, "incomplete_generation"),
}
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
# While a model loads, or the server stops: nothing tells how long that takes.
_UNAVAILABLE_S = 5


def http_status(error: GenserveError) -> int:
    """Return the status of an error where a dialect has none of its own."""
    status: int = _lookup(_STATUS, error)
    return status


def openai_error(error: GenserveError) -> dict[str, Any]:
    """Return the body of OpenAI's dialect, with the remedy beside."""
    error = redacted_error(error)
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES.get(http_status(error), "server_error"),
            "param": error.field,
            "code": error.code,
            "remedy": error.remedy,
        }
    }


def tgi_error(error: GenserveError) -> dict[str, Any]:
    """Return the body of TGI's dialect, with code, field and remedy beside."""
    error = redacted_error(error)
    return {
        "error": error.message,
        "error_type": _lookup(_TGI, error)[1],
        "code": error.code,
        "field": error.field,
        "remedy": error.remedy,
    }


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """Return the headers that say when to come back: HTTP's in whole seconds, and OpenAI's exact one."""
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(math.ceil(retry_after_s * 1000)),
    }


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error with its field, and the message's mention of it, in a dialect's own names."""
    field = error.field or ""
    name = re.split(r"[.\[]", field, maxsplit=1)[0]
    if name not in names:
        return error
    message = error.message
    if message.startswith(name):
        message = names[name] + message.removeprefix(name)
    return type(error)(message, remedy=error.remedy, field=names[name] + field.removeprefix(name))


def add_error_handlers(app: FastAPI) -> None:
    """Make every failure of `app` an answer of the route's dialect; none quotes what the client sent."""
    app.add_exception_handler(GenserveError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


def _lookup(table: Mapping[type[GenserveError], Any], error: GenserveError) -> Any:
    return next(table[kind] for kind in type(error).__mro__ if kind in table)


def error_response(error: GenserveError, *, path: str) -> JSONResponse:
    """Return the answer to a request for `path` that failed, in the dialect of the path, not below `/v2`."""
    headers = {}
    body, status = _in_dialect(error, path=path)
    if isinstance(error, Overloaded):
        headers = retry_headers(error.retry_after_s)
    elif status == 503:
        headers = retry_headers(_UNAVAILABLE_S)
    elif isinstance(error, InvalidRequest):
        headers = {"x-should-retry": "false"}
    elif isinstance(error, Unauthenticated):
        headers = {"www-authenticate": "Bearer"}
    return JSONResponse(body, status_code=status, headers=headers)


def _answer(request: Request, error: GenserveError) -> JSONResponse:
    # Not `request.url`: that is made of the Host header, too.
    return error_response(error, path=request.scope["path"])


def _in_dialect(error: GenserveError, *, path: str) -> tuple[dict[str, Any], int]:
    """Return the body and the status of the path's dialect; the log is told."""
    fail_request(error)
    if path.startswith("/v1/"):
        return openai_error(error), http_status(error)
    return tgi_error(error), _lookup(_TGI, error)[0]


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GenserveError)
    return _answer(request, error)


async def _on_invalid_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # FastAPI hands over the parsed body, or the raw one where it was not said to be JSON.
    if error.body is None:
        return _answer(request, InvalidRequest("the body is empty", remedy="send a JSON object"))
    if isinstance(error.body, bytes):
        return _answer(request, InvalidRequest("the body is not declared as JSON", remedy=_CONTENT_TYPE))
    problem = error.errors()[0]
    return _answer(request, _invalid(_path(problem["loc"][1:]), problem))


_CONTENT_TYPE = "send the header `Content-Type: application/json`"


def _invalid(field: str, problem: Mapping[str, Any]) -> InvalidRequest:
    if problem["type"] == "extra_forbidden":
        return InvalidRequest(f"there is no field {field[:128]!r}", field=field[:128])
    return InvalidRequest(f"{field}: {problem['msg'].removeprefix('Value error, ')[:200]}", field=field)


def _path(parts: tuple[int | str, ...]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "another method")
    known = {404: "there is no such route", 405: f"this route takes {allowed}, and no other method"}
    message = known.get(error.status_code, str(error.detail))
    error_there = InvalidRequest(message, remedy="GET /docs lists the routes")
    body, _ = _in_dialect(error_there, path=request.scope["path"])
    return JSONResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("request failed", exc_info=error)
    return _answer(request, ModelFailed("the server failed; its log has the reason"))
