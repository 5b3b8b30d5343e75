"""Errors that a model.py raises or responds with, and the text arguments that it passes."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from genserve.errors import GenserveError, InferenceError, Status, status_of


def text_argument(value: str | bytes | bytearray, name: str) -> str:
    """Return a text argument as str; bytes that are not UTF-8 become U+FFFD.

    Triton accepts str and bytes for every text: its own BLS example passes an element of a string tensor as
    the name of a model.

    Args:
        value: the text.
        name: a noun for the argument in the error: "a model name".

    Raises:
        TypeError: it is neither str nor bytes.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="replace")
    raise TypeError(f"{name} is a str or bytes, got {type(value)}")


class TritonModelException(Exception):
    """Raised by models, and by the functions of pb_utils."""


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
    """An error to respond with: a message, and a code that determines the client's status."""

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
            raise TypeError("TritonError(message: str, code: a constant of TritonError)")
        self._message = text_argument(message, "the message of a TritonError")
        self._code = code

    def message(self) -> str:
        """Return the message."""
        return self._message

    def code(self) -> ErrorCode:
        """Return the code."""
        return self._code


def error_of(error: GenserveError) -> TritonError:
    """Return an error of genserve as a model sees it."""
    return TritonError(error.message, ErrorCode[status_of(error)])


def inference_error(error: TritonError) -> InferenceError:
    """Return an error of a model as genserve sends it."""
    return InferenceError(error.message(), status=Status[error.code().name])
