"""Failure: any exception as an error that a client can be told of."""

from __future__ import annotations

import logging

from genserve.errors import GenserveError, InferenceError, Status

__all__ = ["failure", "text_of"]

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
