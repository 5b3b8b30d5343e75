"""Error responses: turns every failure of a route into a response in its dialect, and documents them."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from genserve.errors import (
    DeadlineExceeded,
    Forbidden,
    GenserveError,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    Unauthenticated,
    UnsupportedMediaType,
    closest,
    validation_message,
)
from genserve.request_context import current_request
from genserve.server.error_formats import ErrorFormat, error_response
from genserve.server.error_statuses import (
    MethodNotAllowed,
    RouteNotFound,
    as_genserve_error,
    is_exhaustion,
)
from genserve.server.http.connection_errors import BodyTooLarge, HeadTooLarge, RequestTimeout, UriTooLong
from genserve.server.http.request_body import empty_body

logger = logging.getLogger(__name__)

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
        if is_exhaustion(error):
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
            not_allowed = MethodNotAllowed(f"this route supports only {allowed}", remedy=remedy)
            response = self.response(request.scope, not_allowed)
            response.headers["Allow"] = allowed
            return response
        if error.status_code != 404:
            return self.response(request.scope, InvalidRequest(str(error.detail), remedy=remedy))
        return self.response(request.scope, RouteNotFound("no such route", remedy=remedy))

    async def _on_system_error(self, request: Request, error: Exception) -> Response:
        if not is_exhaustion(error):
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
