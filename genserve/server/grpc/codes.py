"""Codes: errors as gRPC statuses."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from genserve.errors import (
    Closed,
    GenserveError,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    Status,
)

__all__ = ["status_code"]

_CODES: Mapping[Status, grpc.StatusCode] = {
    Status.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Status.INTERNAL: grpc.StatusCode.INTERNAL,
    Status.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Status.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    Status.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Status.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Status.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Status.CANCELLED: grpc.StatusCode.CANCELLED,
}
# By class, nearest ancestor first.
_OTHERS: Mapping[type[GenserveError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    Overloaded: grpc.StatusCode.UNAVAILABLE,
    Closed: grpc.StatusCode.UNAVAILABLE,
    GenserveError: grpc.StatusCode.INTERNAL,
}


def status_code(error: GenserveError) -> grpc.StatusCode:
    """Return the code that says what kind of failure it is."""
    if isinstance(error, InferenceError):
        return _CODES[error.status]
    return next(_OTHERS[kind] for kind in type(error).__mro__ if kind in _OTHERS)
