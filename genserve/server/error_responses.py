"""Error responses: the status, body and headers of every error, in the dialect of the route."""

from __future__ import annotations

import errno
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from genserve.errors import (
    Closed,
    ControlForbidden,
    Forbidden,
    GenserveError,
    InferenceError,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ReplicaLost,
    Status,
    Unauthenticated,
    UnsupportedMediaType,
    closest,
)
from genserve.log import fail_request
from genserve.redaction import redacted_error
from genserve.server.connection_errors import (
    BodyTooLarge,
    HeadTooLarge,
    MalformedRequest,
    RequestTimeout,
    TooManyConnections,
    UriTooLong,
)
from genserve.server.response_store import ResponseNotFound

logger = logging.getLogger(__name__)


class _Statuses(NamedTuple):
    openai: int         # and the other routes without a dialect
    tgi: int            # TGI's own statuses and error types, which its clients compare
    tgi_type: str
    kserve: int
    grpc: str           # the name of a `grpc.StatusCode`


# By class, nearest ancestor first. The full queue of a text model is 429 in every dialect.
_STATUSES: Mapping[type[GenserveError], _Statuses] = {
    MalformedRequest: _Statuses(400, 400, "validation", 400, "INVALID_ARGUMENT"),
    UriTooLong: _Statuses(414, 414, "validation", 414, "INVALID_ARGUMENT"),
    HeadTooLarge: _Statuses(431, 431, "validation", 431, "RESOURCE_EXHAUSTED"),
    RequestTimeout: _Statuses(408, 408, "validation", 408, "DEADLINE_EXCEEDED"),
    TooManyConnections: _Statuses(503, 503, "overloaded", 503, "UNAVAILABLE"),
    BodyTooLarge: _Statuses(413, 413, "validation", 413, "RESOURCE_EXHAUSTED"),
    InvalidRequest: _Statuses(400, 422, "validation", 400, "INVALID_ARGUMENT"),
    Unauthenticated: _Statuses(401, 401, "authentication", 401, "UNAUTHENTICATED"),
    ControlForbidden: _Statuses(403, 403, "authentication", 403, "PERMISSION_DENIED"),
    Forbidden: _Statuses(403, 403, "authentication", 403, "UNAVAILABLE"),
    UnsupportedMediaType: _Statuses(415, 415, "validation", 415, "INVALID_ARGUMENT"),
    ResponseNotFound: _Statuses(404, 404, "validation", 404, "NOT_FOUND"),
    ModelNotFound: _Statuses(404, 404, "validation", 404, "NOT_FOUND"),
    ModelNotReady: _Statuses(503, 503, "overloaded", 503, "UNAVAILABLE"),
    Overloaded: _Statuses(429, 429, "overloaded", 429, "RESOURCE_EXHAUSTED"),
    Closed: _Statuses(503, 503, "overloaded", 503, "UNAVAILABLE"),
    ModelFailed: _Statuses(500, 424, "generation", 500, "INTERNAL"),
    GenserveError: _Statuses(500, 500, "incomplete_generation", 500, "INTERNAL"),
}
# KServe and gRPC have a status for each of Triton's codes, which an `InferenceError` has. The full queue of a
# model that does not generate text is UNAVAILABLE, as in Triton.
_TRITON_STATUSES: Mapping[Status, tuple[int, str]] = {
    Status.UNKNOWN: (400, "UNKNOWN"),
    Status.INTERNAL: (500, "INTERNAL"),
    Status.NOT_FOUND: (404, "NOT_FOUND"),
    Status.INVALID_ARG: (400, "INVALID_ARGUMENT"),
    Status.UNAVAILABLE: (503, "UNAVAILABLE"),
    Status.UNSUPPORTED: (501, "UNIMPLEMENTED"),
    Status.ALREADY_EXISTS: (400, "ALREADY_EXISTS"),
    Status.CANCELLED: (400, "CANCELLED"),
}
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    **dict.fromkeys((405, 408, 413, 414, 415, 431), "invalid_request_error"),
    429: "rate_limit_error",
}
# The statuses of a route that exists, for the OpenAPI document: an example of each, and what it means.
_DOCUMENTED: tuple[tuple[GenserveError, str], ...] = (
    (InvalidRequest("an example", field="field"), "The request is invalid."),
    (Unauthenticated("an example"), "The API key is missing or wrong."),
    (Forbidden("an example"), "The host, the origin or a required header is not allowed."),
    (ModelNotFound("an example"), "There is no such model, or no such object."),
    (RequestTimeout("an example"), "The request arrives too slowly."),
    (BodyTooLarge("an example"), "The body is too large."),
    (UriTooLong("an example"), "The URI is too long."),
    (UnsupportedMediaType("an example"), "The content type, encoding or charset is not supported."),
    (HeadTooLarge("an example"), "The head is too large."),
    (Overloaded("an example", retry_after_s=1), "The queue is full, or the key has reached a limit."),
    (ModelFailed("an example"), "The model failed."),
    (ModelNotReady("an example"), "The model is not ready, or the server is stopping."),
)
_MAX_SHOWN = 128    # characters of the path of a field, which the client chose
# While a model loads or the server stops, of which the duration is unknown.
_UNAVAILABLE_RETRY_S = 5
# While the process has no more threads, files or memory; other requests end soon.
_EXHAUSTED_RETRY_S = 1


def as_genserve_error(error: Exception, *, doing: str) -> GenserveError:
    """Return the error to report to the client; an unexpected exception is logged, and its text withheld.

    Args:
        error: any exception.
        doing: what failed, for the log: "a request to /v2".
    """
    if isinstance(error, GenserveError):
        return error
    logger.error("%s failed", doing, exc_info=error)
    if _is_exhaustion(error):
        return _exhausted()
    return InferenceError("the server failed; its log has the reason", status=Status.INTERNAL)


def _is_exhaustion(error: Exception) -> bool:
    """Whether the system has no thread, file descriptor or memory left for a request; others may end."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"


def _exhausted() -> GenserveError:
    return ModelNotReady(
        "the server has no threads, files or memory left for this request",
        remedy="try again later",
        retry_after_s=_EXHAUSTED_RETRY_S,
    )


def http_status(error: GenserveError) -> int:
    """Return the HTTP status of an error where the dialect has none of its own."""
    return _statuses(error).openai


def kserve_status(error: GenserveError) -> int:
    """Return the HTTP status of an error in KServe's protocol."""
    if isinstance(error, InferenceError):
        return _TRITON_STATUSES[error.status][0]
    return _statuses(error).kserve


def grpc_status(error: GenserveError) -> str:
    """Return the name of the `grpc.StatusCode` of an error."""
    if isinstance(error, InferenceError):
        return _TRITON_STATUSES[error.status][1]
    return _statuses(error).grpc


def error_code(error: GenserveError) -> str:
    """Return the code of an error, as the log shows it."""
    return error.status.lower() if isinstance(error, InferenceError) else error.code


def _statuses(error: GenserveError) -> _Statuses:
    return next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)


def openai_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of OpenAI's dialect, with our remedy."""
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
    """Return the error body of TGI's dialect, with our code, field and remedy."""
    error = redacted_error(error)
    return {
        "error": error.message,
        "error_type": _statuses(error).tgi_type,
        "code": error.code,
        "field": error.field,
        "remedy": error.remedy,
    }


def kserve_error(error: GenserveError) -> dict[str, str]:
    """Return the error body of KServe's protocol, with our remedy."""
    error = redacted_error(error)
    return {"error": message_of(error), **({"remedy": error.remedy} if error.remedy else {})}


def message_of(error: GenserveError) -> str:
    """Return the message of an error as valid UTF-8: a Python string may hold a lone surrogate."""
    return error.message.encode(errors="replace").decode()


def error_headers(error: GenserveError) -> dict[str, str]:
    """Return the headers that an error has in every dialect.

    When to retry is HTTP's header, in whole seconds, and OpenAI's, in milliseconds; `ErrorResponses.response`
    adds them to any other 503.
    """
    if isinstance(error, Overloaded) or (isinstance(error, ModelNotReady) and error.retry_after_s):
        return _retry_headers(error.retry_after_s)
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, ReplicaLost):  # maybe by this request: official clients would send it again
        return {"x-should-retry": "false"}
    return {}


def _retry_headers(retry_after_s: float) -> dict[str, str]:
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(math.ceil(retry_after_s * 1000)),
    }


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error with its field, and the mention of it in the message, in a dialect's own names."""
    field = error.field or ""
    name = re.split(r"[.\[]", field, maxsplit=1)[0]
    if name not in names:
        return error
    message = error.message
    if message.startswith(name):
        message = names[name] + message.removeprefix(name)
    return type(error)(message, remedy=error.remedy, field=names[name] + field.removeprefix(name))


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes an error: its JSON body and its HTTP status."""

    body: Callable[[GenserveError], dict[str, Any]]
    status: Callable[[GenserveError], int]


OPENAI_ERRORS = ErrorFormat(openai_error, http_status)
TGI_ERRORS = ErrorFormat(tgi_error, lambda error: _statuses(error).tgi)

# By the prefix of the path; of several that fit, the longest. Each dialect has an `ERRORS` of this kind.
ErrorFormats: TypeAlias = Mapping[str, ErrorFormat]


class ErrorResponses:
    """Turns every failure into a response of the route's dialect; none quotes the client's text.

    Args:
        formats: of the dialects; that of `/`, TGI's, is the format of all other paths.
    """

    def __init__(self, formats: ErrorFormats) -> None:
        self._formats = sorted(formats.items(), key=lambda item: -len(item[0]))     # the longest first

    def format_of(self, path: str) -> ErrorFormat:
        """Return the format of the errors of a path."""
        fitting = (form for prefix, form in self._formats if path.startswith(prefix))
        return next(fitting, self._formats[-1][1])      # `OPTIONS *` has no path

    def response(self, error: GenserveError, *, path: str, status: int | None = None) -> JSONResponse:
        """Return the response to a failed request, and note the error for the log.

        Args:
            error: why it failed.
            path: of the request, which is not below `/v2`.
            status: of the response; None: that of the error.
        """
        fail_request(error)
        written = self.format_of(path)
        status = status or written.status(error)
        headers = error_headers(error)
        if status == 503 and not headers:
            headers = _retry_headers(_UNAVAILABLE_RETRY_S)
        elif isinstance(error, InvalidRequest):
            headers = {"x-should-retry": "false"}
        return JSONResponse(written.body(error), status_code=status, headers=headers)

    def install(self, app: FastAPI) -> None:
        """Handle all exceptions of `app`."""
        app.add_exception_handler(GenserveError, self._on_error)
        app.add_exception_handler(RequestValidationError, self._on_invalid_body)
        app.add_exception_handler(HTTPException, self._on_http_error)
        for kind in (RuntimeError, OSError, MemoryError):
            app.add_exception_handler(kind, self._on_system_error)
        app.add_exception_handler(Exception, self._on_bug)

    def _respond(self, request: Request, error: GenserveError, *, status: int | None = None) -> JSONResponse:
        # `request.url` depends on the Host header too.
        return self.response(error, path=request.scope["path"], status=status)

    async def _on_error(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, GenserveError)
        return self._respond(request, error)

    async def _on_invalid_body(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        route = getattr(request.scope.get("route"), "body_field", None)
        body = route.field_info.annotation if route is not None else None
        return self._respond(request, _invalid_body(error, body))

    async def _on_http_error(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            error = HTTPException(405, headers={"Allow": _allowed_methods(request)})
        allowed = (error.headers or {}).get("Allow")
        messages = {404: "no such route", 405: f"this route supports only {allowed}"}
        message = messages.get(error.status_code, str(error.detail))
        invalid = InvalidRequest(message, remedy="GET /docs lists the routes")
        response = self._respond(request, invalid, status=error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def _on_system_error(self, request: Request, error: Exception) -> JSONResponse:
        if not _is_exhaustion(error):
            raise error     # for `_on_bug`
        return self._respond(request, as_genserve_error(error, doing="a request"))

    async def _on_bug(self, request: Request, error: Exception) -> JSONResponse:
        logger.error("request failed", exc_info=error)
        return self._respond(request, ModelFailed("the server failed; its log has the reason"))


def _allowed_methods(request: Request) -> str:
    """Return the methods of all routes with the path of a request; Starlette knows those of the first."""
    scope = {"type": "http", "path": request.scope["path"], "headers": []}
    return ", ".join(
        method
        for method in ("DELETE", "GET", "POST")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    )


def _invalid_body(error: RequestValidationError, body: type[BaseModel] | None) -> InvalidRequest:
    problem = error.errors()[0]
    if error.body is None and problem["loc"][0] == "body":
        return InvalidRequest("the body is empty", remedy="send a JSON object")
    field = _path(problem["loc"][1:])[:_MAX_SHOWN]
    if problem["type"] == "extra_forbidden":
        known = _field_names(body) if body is not None else ()
        meant = closest(str(problem["loc"][-1]), known=known)
        remedy = f"did you mean {meant}?" if meant else "GET /docs lists the fields"
        return InvalidRequest(f"unknown field {field!r}", field=field, remedy=remedy)
    return InvalidRequest(f"{field}: {problem['msg'].removeprefix('Value error, ')[:200]}", field=field)


@cache
def _field_names(body: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of all fields of a body and of the objects in it."""
    schema = body.model_json_schema()
    objects = (schema, *schema.get("$defs", {}).values())
    return tuple(dict.fromkeys(name for fields in objects for name in fields.get("properties", ())))


def _path(parts: tuple[int | str, ...]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def document_errors(document: dict[str, Any], errors: ErrorResponses) -> None:
    """Replace the errors of an OpenAPI document, which are FastAPI's, by those of each route's dialect."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    for path, operations in document["paths"].items():
        written = errors.format_of(path)
        name = f"{_dialect(written)}Error"
        schemas[name] = _schema_of(written.body(_DOCUMENTED[0][0]))
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= _responses(written, {"$ref": f"#/components/schemas/{name}"})


def _dialect(written: ErrorFormat) -> str:
    """Return the name of a dialect from that of its function: `anthropic_error`."""
    return written.body.__name__.removesuffix("_error").title()


def _responses(written: ErrorFormat, schema: dict[str, Any]) -> dict[str, Any]:
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for error, text in _DOCUMENTED:
        texts[str(written.status(error))].append(text)
    content = {"application/json": {"schema": schema}}
    return {status: {"description": " ".join(of), "content": content} for status, of in texts.items()}


def _schema_of(value: Any) -> dict[str, Any]:
    """Return a JSON schema that fits a body, and those of other errors."""
    match value:
        case dict():
            properties = {key: _schema_of(inner) for key, inner in value.items()}
            return {"type": "object", "properties": properties, "required": list(properties)}
        case None:
            return {}
        case _:
            return {"type": ["string", "null"]}
