"""Errors that a model.py raises or responds with, and the text arguments that it passes."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from genserve.errors import GenserveError, InferenceError, Status, status_of

__all__ = ["ErrorCode", "TritonError", "TritonModelException", "error_of", "inference_error", "text_argument"]


def text_argument(given: str | bytes | bytearray, what: str) -> str:
    """Return it as a str; what is no UTF-8 becomes U+FFFD.

    Triton takes both wherever it takes a text, and its own BLS example hands an element of a string tensor on
    as the model's name.

    Args:
        given: the text.
        what: what the message calls it, such as "a model name".

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, (bytes, bytearray)):
        return given.decode(errors="replace")
    raise TypeError(f"{what} is a str or bytes, got {type(given)}")


class TritonModelException(Exception):
    """Raised by a model, and by what it calls here."""


class ErrorCode(IntEnum):
    """Triton's error codes."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """An error to answer with: a message and a code, by which clients get their status."""

    UNKNOWN: ClassVar = ErrorCode.UNKNOWN
    INTERNAL: ClassVar = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar = ErrorCode.CANCELLED

    def __init__(self, message: str | bytes, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        if not isinstance(code, ErrorCode):
            raise TypeError("TritonError(message: str, code: one of TritonError's)")
        self._message = text_argument(message, "the message of a TritonError")
        self._code = code

    def message(self) -> str:
        """What went wrong."""
        return self._message

    def code(self) -> ErrorCode:
        """Of which kind it is."""
        return self._code


def error_of(error: GenserveError) -> TritonError:
    """Return what a model is shown of an error of genserve's."""
    return TritonError(error.message, ErrorCode[status_of(error)])


def inference_error(error: TritonError) -> InferenceError:
    """Return the error that a model answers with."""
    return InferenceError(error.message(), status=Status[error.code().name])
