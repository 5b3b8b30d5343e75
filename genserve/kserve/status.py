"""Status: Triton's code of every error that genserve raises."""

from __future__ import annotations

from collections.abc import Mapping

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

__all__ = ["status_of"]

# By class, nearest ancestor first.
_STATUS: Mapping[type[GenserveError], Status] = {
    InvalidRequest: Status.INVALID_ARG,
    ModelNotFound: Status.NOT_FOUND,
    ModelNotReady: Status.UNAVAILABLE,
    Overloaded: Status.UNAVAILABLE,
    Closed: Status.UNAVAILABLE,
    GenserveError: Status.INTERNAL,
}


def status_of(error: GenserveError) -> Status:
    """Return the code by which both protocols report an error."""
    if isinstance(error, InferenceError):
        return error.status
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
