"""Codes: errors as gRPC statuses."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from genserve.errors import GenserveError, Overloaded, Status, status_of

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

def status_code(error: GenserveError) -> grpc.StatusCode:
    """Return the code that says what kind of failure it is.

    A full queue of a generation model is RESOURCE_EXHAUSTED, gRPC's word for HTTP's 429. UNAVAILABLE is a
    server that stops, a model that loads, and the full queue of any other model, as Triton has it.
    """
    if isinstance(error, Overloaded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return _CODES[status_of(error)]
