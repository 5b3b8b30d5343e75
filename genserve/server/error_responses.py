"""Error responses: the status, body and headers of every error, in the dialect of the route."""

from __future__ import annotations

import errno
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from genserve.errors import (
    Closed,
    ContextLengthExceeded,
    ControlForbidden,
    DeadlineExceeded,
    Forbidden,
    GenserveError,
    InferenceError,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ReplicaLost,
    ResponseNotFound,
    Status,
    Unauthenticated,
    UnsupportedMediaType,
    closest,
    validation_message,
)
from genserve.redaction import redacted_error
from genserve.request_context import current_request
from genserve.server.http.connection_errors import (
    BodyTooLarge,
    HeadTooLarge,
    MalformedRequest,
    RequestTimeout,
    TooManyConnections,
    UriTooLong,
)
from genserve.server.http.request_body import empty_body

logger = logging.getLogger(__name__)


class _RouteNotFound(InvalidRequest):
    """No route has the path of the request."""


class _MethodNotAllowed(InvalidRequest):
    """The routes with the path of the request have other methods."""


class _Statuses(NamedTuple):
    openai: int  # and of every dialect without statuses of its own
    tgi: int  # TGI's own statuses and error types, which its clients compare
    tgi_type: str
    kserve: int
    grpc: str  # the name of a `grpc.StatusCode`


# By class, nearest ancestor first. The full queue of a text model is 429 in every dialect.
_STATUSES: Mapping[type[GenserveError], _Statuses] = {
    MalformedRequest: _Statuses(400, 400, "validation", 400, "INVALID_ARGUMENT"),
    UriTooLong: _Statuses(414, 414, "validation", 414, "INVALID_ARGUMENT"),
    HeadTooLarge: _Statuses(431, 431, "validation", 431, "RESOURCE_EXHAUSTED"),
    RequestTimeout: _Statuses(408, 408, "validation", 408, "DEADLINE_EXCEEDED"),
    TooManyConnections: _Statuses(503, 503, "overloaded", 503, "UNAVAILABLE"),
    BodyTooLarge: _Statuses(413, 413, "validation", 413, "RESOURCE_EXHAUSTED"),
    _RouteNotFound: _Statuses(404, 404, "validation", 404, "NOT_FOUND"),
    _MethodNotAllowed: _Statuses(405, 405, "validation", 405, "UNIMPLEMENTED"),
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
    DeadlineExceeded: _Statuses(504, 504, "incomplete_generation", 504, "DEADLINE_EXCEEDED"),
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
# The HTTP status of OpenAI's dialect, by class.
ERROR_STATUSES = {kind: statuses.openai for kind, statuses in _STATUSES.items()}
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
    (DeadlineExceeded("an example"), "The request's deadline passed before its first token."),
    (ModelNotReady("an example"), "The model is not ready, or the server is stopping."),
)
_MAX_SHOWN = 128  # characters of the path of a field, which the client chose
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
        return ModelNotReady(
            "the server has no threads, files or memory left for this request",
            remedy="try again later",
            retry_after_s=_EXHAUSTED_RETRY_S,
        )
    return InferenceError("the server failed; its log has the reason", status=Status.INTERNAL)


def _is_exhaustion(error: Exception) -> bool:
    """Whether the system has no thread, file descriptor or memory left for a request; others may end."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"


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
    return _statuses_of(type(error))  # type: ignore[arg-type]  # mypy takes the hash of an error for its class's


@cache
def _statuses_of(kind: type[GenserveError]) -> _Statuses:
    return next(_STATUSES[base] for base in kind.__mro__ if base in _STATUSES)


def openai_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of OpenAI's dialect, with our remedy; its clients show only the message."""
    error = redacted_error(error)
    return {
        "error": {
            "message": full_message(error),
            "type": _OPENAI_TYPES.get(http_status(error), "server_error"),
            "param": error.field,
            "code": error.code,
            "remedy": error.remedy,
        }
    }


def full_message(error: GenserveError) -> str:
    """Return the message of an error with its remedy, for clients that show only the message.

    Some clients look for OpenAI's code in this text, to shorten a chat that is too long.
    """
    message = error.message
    if error.remedy and message.endswith("."):
        message = f"{message} {error.remedy[0].upper()}{error.remedy[1:]}."
    elif error.remedy:
        message = f"{message}; {error.remedy}"
    return f"{message} ({error.code})" if isinstance(error, ContextLengthExceeded) else message


def tgi_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of TGI's dialect, with our code, field and remedy."""
    error = redacted_error(error)
    message = error.message
    if isinstance(error, ContextLengthExceeded) and error.num_tokens is not None:
        message = f"`inputs` must have less than {error.max_length} tokens. Given: {error.num_tokens}"
    return {
        "error": message,
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

    When to retry is HTTP's header, in whole seconds, and OpenAI's, in milliseconds; `error_response`
    adds them to any other 503.
    """
    if isinstance(error, Overloaded) or (isinstance(error, ModelNotReady) and error.retry_after_s):
        return _retry_headers(error.retry_after_s)
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    # Official clients would send it again: maybe it has ended the replica, and it has had its time.
    if isinstance(error, ReplicaLost | DeadlineExceeded):
        return {"x-should-retry": "false"}
    return {}


def _retry_headers(retry_after_s: float) -> dict[str, str]:
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(math.ceil(retry_after_s * 1000)),
    }


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error with its field, and the mention of it in the message, in a dialect's own names.

    Args:
        error: what is wrong with a request.
        names: the dialect's names by ours. The key is a whole field, also with an index (`tools[1]`), or the
            part of it behind an index, with a dot before it.
    """
    field = error.field or ""
    name = re.split(r"[.\[]", field, maxsplit=1)[0]
    indexed = field.partition("]")[0] + "]"
    name = indexed if indexed in names else name
    own = names[name] + field.removeprefix(name) if name in names else field
    for part, theirs in names.items():
        if part.startswith("."):
            own = own.replace(part, theirs)
    if own == field:
        return error
    message = error.message
    if message.startswith(field):
        message = own + message.removeprefix(field)
    elif message.startswith(name):
        message = names.get(name, name) + message.removeprefix(name)
    changed = copy(error)
    changed.message, changed.field = message, own
    return changed


@contextmanager
def named_as(names: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Have an InvalidRequest that is raised within name its field as a dialect does; see `renamed`."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, names()) from None


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes an error: its JSON body and its HTTP status."""

    body: Callable[[GenserveError], dict[str, Any]]
    status: Callable[[GenserveError], int]


OPENAI_ERRORS = ErrorFormat(openai_error, http_status)
TGI_ERRORS = ErrorFormat(tgi_error, lambda error: _statuses(error).tgi)


def error_response(error: GenserveError, written: ErrorFormat) -> Response:
    """Return the response to a failed request in a dialect's format, and note the error for the log."""
    current_request().fail(error)
    status = written.status(error)
    headers = error_headers(error)
    if status == 503 and not headers:
        headers = _retry_headers(_UNAVAILABLE_RETRY_S)
    elif isinstance(error, InvalidRequest):
        headers = {"x-should-retry": "false"}
    body = orjson.dumps(written.body(error))  # a third of what JSONResponse costs
    return Response(body, status_code=status, headers=headers, media_type="application/json")


class Dialect(Protocol):
    """Routes whose errors have one format: `Router`."""

    prefix: str
    errors: ErrorFormat
    routes: list[Any]


class ErrorResponses:
    """Turns every failure into a response of the route's dialect; none quotes the client's text."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        """Take the formats of the dialects.

        A path that no route has gets the format of the dialect with the longest prefix that it begins with;
        of several such dialects, that of the first.
        """
        self._by_path = _formats(dialects)
        self._dialects = sorted(dialects, key=lambda dialect: -len(dialect.prefix))

    def format_of(self, scope: Scope) -> ErrorFormat:
        """Return the format of the errors of a request."""
        if (route := scope.get("route")) is not None:
            return self._by_path[route.path_format]
        path = f"/{scope['path'].lstrip('/')}"  # `OPTIONS *` has no path
        return next(each.errors for each in self._dialects if path.startswith(f"{each.prefix}/"))

    def install(self, app: FastAPI) -> None:
        """Handle all exceptions of `app`."""
        app.add_exception_handler(GenserveError, self._on_error)
        app.add_exception_handler(RequestValidationError, self._on_invalid_body)
        app.add_exception_handler(HTTPException, self._on_http_error)
        for kind in (RuntimeError, OSError, MemoryError):
            app.add_exception_handler(kind, self._on_system_error)
        app.add_exception_handler(Exception, self._on_bug)

    def response(self, scope: Scope, error: GenserveError) -> Response:
        """Return the response to a request that failed, and note the error and its field for the log."""
        if error.field and isinstance(error, InvalidRequest):
            current_request().field = _own_part(error.field, _body_of(scope))
        return error_response(error, self.format_of(scope))

    def unexpected(self, scope: Scope, error: Exception) -> Response:
        """Return the response to a request that ended with an error which is none of ours, and log it."""
        if _is_exhaustion(error):
            return self.response(scope, as_genserve_error(error, doing="a request"))
        logger.error("request failed", exc_info=error)
        return self.response(scope, ModelFailed("the server failed; its log has the reason"))

    async def _on_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, GenserveError)
        return self.response(request.scope, error)

    async def _on_invalid_body(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problem = error.errors()[0]
        if error.body is None and problem["loc"][0] == "body":
            return self.response(request.scope, empty_body())
        invalid = invalid_field(problem, problem["loc"][1:], _body_of(request.scope))
        return self.response(request.scope, invalid)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        remedy = "GET /docs lists the routes"
        if error.status_code == 405:
            allowed = _allowed_methods(request)
            not_allowed = _MethodNotAllowed(f"this route supports only {allowed}", remedy=remedy)
            response = self.response(request.scope, not_allowed)
            response.headers["Allow"] = allowed
            return response
        if error.status_code != 404:
            return self.response(request.scope, InvalidRequest(str(error.detail), remedy=remedy))
        return self.response(request.scope, _RouteNotFound("no such route", remedy=remedy))

    async def _on_system_error(self, request: Request, error: Exception) -> Response:
        if not _is_exhaustion(error):
            raise error  # for `_on_bug`
        return self.unexpected(request.scope, error)

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        return self.unexpected(request.scope, error)


def _allowed_methods(request: Request) -> str:
    """Return the methods of all routes with the path of a request; Starlette knows those of the first."""
    scope = {"type": "http", "path": request.scope["path"], "headers": []}
    return ", ".join(
        method
        for method in ("DELETE", "GET", "POST")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    )


def invalid_field(
    problem: Mapping[str, Any], place: tuple[int | str, ...], body: type[BaseModel] | None
) -> InvalidRequest:
    """Return the error of a field.

    Args:
        problem: what pydantic says is wrong.
        place: the names and indices that lead to the field.
        body: the model of the body; None: the field is none of a body.
    """
    field = _path(place)[:_MAX_SHOWN]
    if problem["type"] == "extra_forbidden":
        known = _field_names(body) if body is not None else ()
        meant = closest(str(place[-1]), known=known)
        remedy = f"did you mean {meant}?" if meant else "GET /docs lists the fields"
        return InvalidRequest(f"unknown field {field!r}", field=field, remedy=remedy)
    return InvalidRequest(f"{field}: {validation_message(problem)}", field=field)


def _body_of(scope: Scope) -> type[BaseModel] | None:
    """Return the model of the bodies of a request's route; None: it has none, or there is no such route."""
    field = getattr(scope.get("route"), "body_field", None)
    return None if field is None else field.field_info.annotation


def _own_part(field: str, body: type[BaseModel] | None) -> str:
    """Return the path of a field up to the first name that is not the server's own, but the client's."""
    names = () if body is None else _field_names(body)
    own = takewhile(lambda part: re.sub(r"(\[\d+\])+$", "", part) in names, field.split("."))
    return ".".join(own)


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


def document_errors(document: dict[str, Any], dialects: Iterable[Dialect]) -> None:
    """Replace the errors of an OpenAPI document, which are FastAPI's, by those of each route's dialect."""
    formats = _formats(dialects)
    schemas: dict[str, Any] = document["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    for path, operations in document["paths"].items():
        written = formats[path]
        name = f"{_dialect(written)}Error"
        schemas[name] = _schema_of(written.body(_DOCUMENTED[0][0]))
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= _responses(written, {"$ref": f"#/components/schemas/{name}"})


def _formats(dialects: Iterable[Dialect]) -> dict[str, ErrorFormat]:
    """Return the formats by the path of the route."""
    return {route.path_format: dialect.errors for dialect in dialects for route in dialect.routes}


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
        case int():
            return {"type": ["integer", "null"]}
        case _:
            return {"type": ["string", "null"]}
