"""Documented errors: adds to the OpenAPI document what each route answers when it does not succeed.

FastAPI documents one error, its own, which no route gives.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from genserve.errors import (
    Forbidden,
    GenserveError,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    Unauthenticated,
    UnsupportedMediaType,
)
from genserve.server.connection_errors import BodyTooLarge, HeadTooLarge, RequestTimeout, UriTooLong
from genserve.server.error_responses import ErrorFormat, ErrorResponses

# Every status of a route that exists: an example of each, and what it means.
_ERRORS: tuple[tuple[GenserveError, str], ...] = (
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


def document_errors(document: dict[str, Any], errors: ErrorResponses) -> None:
    """Replace the errors of an OpenAPI document by those of each route's dialect, in place."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    for path, operations in document["paths"].items():
        written = errors.format_of(path)
        name = f"{_dialect(written)}Error"
        schemas[name] = _schema_of(written.body(_ERRORS[0][0]))
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= _responses(written, {"$ref": f"#/components/schemas/{name}"})


def _dialect(written: ErrorFormat) -> str:
    """Return the name of a dialect from that of its function: `anthropic_error`."""
    return written.body.__name__.removesuffix("_error").title()


def _responses(written: ErrorFormat, schema: dict[str, Any]) -> dict[str, Any]:
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for error, text in _ERRORS:
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
