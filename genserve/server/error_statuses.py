"""Error statuses: the status of every error over HTTP, in KServe's protocol and over gRPC."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from genserve.errors import (
    Closed,
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
    ResponseNotFound,
    Status,
    Unauthenticated,
    UnsupportedMediaType,
)
from genserve.server.http.connection_errors import (
    BodyTooLarge,
    HeadTooLarge,
    MalformedRequest,
    RequestTimeout,
    TooManyConnections,
    UriTooLong,
)

logger = logging.getLogger(__name__)


class RouteNotFound(InvalidRequest):
    """No route has the path of the request."""


class MethodNotAllowed(InvalidRequest):
    """The routes with the path of the request have other methods."""


class _Statuses(NamedTuple):
    http: int  # of all dialects but TGI's, and of KServe
    grpc: str  # the name of a `grpc.StatusCode`
    tgi_type: str  # TGI's own error type and status, which its clients compare
    tgi: int | None = None  # None: as `http`


# By class; that of the nearest ancestor counts. The full queue of a text model is 429 in every dialect.
_STATUSES: Mapping[type[GenserveError], _Statuses] = {
    MalformedRequest: _Statuses(400, "INVALID_ARGUMENT", "validation"),
    UriTooLong: _Statuses(414, "INVALID_ARGUMENT", "validation"),
    HeadTooLarge: _Statuses(431, "RESOURCE_EXHAUSTED", "validation"),
    RequestTimeout: _Statuses(408, "DEADLINE_EXCEEDED", "validation"),
    TooManyConnections: _Statuses(503, "UNAVAILABLE", "overloaded"),
    BodyTooLarge: _Statuses(413, "RESOURCE_EXHAUSTED", "validation"),
    RouteNotFound: _Statuses(404, "NOT_FOUND", "validation"),
    MethodNotAllowed: _Statuses(405, "UNIMPLEMENTED", "validation"),
    InvalidRequest: _Statuses(400, "INVALID_ARGUMENT", "validation", tgi=422),
    Unauthenticated: _Statuses(401, "UNAUTHENTICATED", "authentication"),
    ControlForbidden: _Statuses(403, "PERMISSION_DENIED", "authentication"),
    Forbidden: _Statuses(403, "UNAVAILABLE", "authentication"),
    UnsupportedMediaType: _Statuses(415, "INVALID_ARGUMENT", "validation"),
    ResponseNotFound: _Statuses(404, "NOT_FOUND", "validation"),
    ModelNotFound: _Statuses(404, "NOT_FOUND", "validation"),
    ModelNotReady: _Statuses(503, "UNAVAILABLE", "overloaded"),
    Overloaded: _Statuses(429, "RESOURCE_EXHAUSTED", "overloaded"),
    Closed: _Statuses(503, "UNAVAILABLE", "overloaded"),
    DeadlineExceeded: _Statuses(504, "DEADLINE_EXCEEDED", "incomplete_generation"),
    ModelFailed: _Statuses(500, "INTERNAL", "generation", tgi=424),
    GenserveError: _Statuses(500, "INTERNAL", "incomplete_generation"),
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
# The HTTP status by class, for the documentation.
ERROR_STATUSES = {kind: statuses.http for kind, statuses in _STATUSES.items()}
# While the process has no more threads, files or memory; other requests end soon.
_EXHAUSTED_RETRY_S = 1


def as_genserve_error(error: Exception, *, doing: str) -> GenserveError:
    """Return the error to report to the client; an unexpected exception is logged, and its text withheld.

    Args:
        error: any exception.
        doing: the task that failed, as the log names it: "a request to /v2".
    """
    if isinstance(error, GenserveError):
        return error
    logger.error("%s failed", doing, exc_info=error)
    if is_exhaustion(error):
        return ModelNotReady(
            "the server has no threads, files or memory left for this request",
            remedy="try again later",
            retry_after_s=_EXHAUSTED_RETRY_S,
        )
    return InferenceError("the server failed; its log has the reason", status=Status.INTERNAL)


def is_exhaustion(error: Exception) -> bool:
    """Whether the system has no thread, file descriptor or memory left for a request; others may end."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"


def http_status(error: GenserveError) -> int:
    """Return the HTTP status of an error where the dialect has none of its own."""
    return _statuses(error).http


def kserve_status(error: GenserveError) -> int:
    """Return the HTTP status of an error in KServe's protocol."""
    return _TRITON_STATUSES[error.status][0] if isinstance(error, InferenceError) else http_status(error)


def grpc_status(error: GenserveError) -> str:
    """Return the name of the `grpc.StatusCode` of an error."""
    return _TRITON_STATUSES[error.status][1] if isinstance(error, InferenceError) else _statuses(error).grpc


def error_code(error: GenserveError) -> str:
    """Return the code of an error, as the log shows it."""
    return error.status.lower() if isinstance(error, InferenceError) else error.code


def tgi_status(error: GenserveError) -> int:
    """Return the HTTP status of an error in TGI's dialect."""
    statuses = _statuses(error)
    return statuses.http if statuses.tgi is None else statuses.tgi


def tgi_type(error: GenserveError) -> str:
    """Return TGI's word for the type of an error."""
    return _statuses(error).tgi_type


def _statuses(error: GenserveError) -> _Statuses:
    return _of_kind(type(error))  # type: ignore[arg-type]  # mypy takes the hash of an error for its class's


@cache
def _of_kind(kind: type[GenserveError]) -> _Statuses:
    return next(_STATUSES[base] for base in kind.__mro__ if base in _STATUSES)
