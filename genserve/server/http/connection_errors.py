"""Connection errors: errors of a request that its connection finds; the route of the request answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genserve.errors import GenserveError, InvalidRequest

_KEY = "connection_error"


class MalformedRequest(GenserveError):
    """The request is not valid HTTP/1.1, or uses a part of it that the server does not support."""

    code = "malformed_request"


class UriTooLong(GenserveError):
    """The target of the request is too long."""

    code = "uri_too_long"


class HeadTooLarge(GenserveError):
    """The request has too many header fields, or too large ones."""

    code = "headers_too_large"


class BodyTooLarge(InvalidRequest):
    """The body is larger than the server accepts, or has too many chunks."""

    code = "body_too_large"


class RequestTimeout(GenserveError):
    """The head or the body of the request arrives too slowly."""

    code = "request_timeout"


class TooManyConnections(GenserveError):
    """The server has as many connections as it accepts; one more is for a probe."""

    code = "too_many_connections"


def set_connection_error(scope: Mapping[str, Any], error: GenserveError) -> None:
    """Let the request fail with an error that its connection has found."""
    # Middleware may copy the scope, and would not see a new key of it.
    scope["state"][_KEY] = error


def raise_connection_error(scope: Mapping[str, Any], *, is_probe: bool = False) -> None:
    """Raise the error that the connection has found in a request, if there is one."""
    error = scope.get("state", {}).get(_KEY)
    if error is not None and not (is_probe and isinstance(error, TooManyConnections)):
        raise error
