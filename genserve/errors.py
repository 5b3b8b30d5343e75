"""Errors: every failure that a person may see, each with a code, a message and a remedy.

    GenserveError
    ├── InvalidRequest            the caller can mend it; `field` names the place
    │   └── ContextLengthExceeded the prompt does not fit into the model's context
    ├── Unauthenticated           the API key is missing or wrong
    ├── Forbidden                 a web page may not ask this, or the server was not asked by its name
    ├── UnsupportedMediaType      the body has a content type that is not taken
    ├── ModelNotFound             no such model, or no such version of it
    ├── ModelNotReady             the model is there and is not loaded, or its load failed
    ├── Overloaded                the queue of a generation model is full; try again later
    ├── ModelFailed               a model or a decoding loop raised, or answered nonsense
    ├── InferenceError            an inference by named tensors failed; Triton's code and text
    ├── RepositoryError           a model repository cannot be used as it stands
    │   └── ConfigError           one place of one config.pbtxt; file, line and column
    ├── ExportError               a checkpoint could not be turned into a repository model
    ├── MissingDependency         an optional package is not installed
    ├── Unreachable               client: no answer came from the server
    ├── StreamBroken              client: a stream ended before its last event
    └── Closed                    the object was used after `close()`
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

__all__ = [
    "SEE_LOG",
    "Closed",
    "ConfigError",
    "ContextLengthExceeded",
    "ExportError",
    "Forbidden",
    "GenserveError",
    "InferenceError",
    "InvalidRequest",
    "MissingDependency",
    "ModelFailed",
    "ModelNotFound",
    "ModelNotReady",
    "Overloaded",
    "RepositoryError",
    "Status",
    "StreamBroken",
    "Unauthenticated",
    "Unreachable",
    "UnsupportedMediaType",
    "status_of",
]

# The remedy of a failure whose reason is not for clients: it may hold paths, or the words of a program.
SEE_LOG = "the server's log has the reason"


class GenserveError(Exception):
    """The root of the tree: catch it to catch everything that genserve raises on purpose.

    Attributes:
        code: stable, lower_snake_case; what programs compare.
        message: one sentence that names the thing and the place.
        remedy: what to do about it; may be empty.
        field: the request field at fault, as a path (`messages[0].content`), or None.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, remedy: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.field = field

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class InvalidRequest(GenserveError):
    """The request is wrong and would be wrong again; `field` says where."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and answer together, are longer than the model's context."""

    code = "context_length_exceeded"


class Unauthenticated(GenserveError):
    """The server asks for an API key, and the request has none or another."""

    code = "unauthenticated"


class Forbidden(GenserveError):
    """A web page may not ask, the host is none of the server's, or a header that is needed is not there."""

    code = "forbidden"


class UnsupportedMediaType(GenserveError):
    """The body has a content type that the server does not take."""

    code = "unsupported_media_type"


class ModelNotFound(GenserveError):
    """No model of this name, or not this version of it."""

    code = "model_not_found"


class ModelNotReady(GenserveError):
    """The model is in the repository and cannot serve now.

    Attributes:
        retry_after_s: a guess of when to come back; 0: nobody knows.
    """

    code = "model_not_ready"

    def __init__(
        self, message: str, *, remedy: str = "", field: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message, remedy=remedy, field=field)
        self.retry_after_s = retry_after_s


class Overloaded(GenserveError):
    """The server refuses new work for the moment; nothing was done, a retry is safe.

    Attributes:
        retry_after_s: a guess of when to come back.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s


class ModelFailed(GenserveError):
    """A model's graph or its Python code raised, or its output is unusable (NaN, wrong shape)."""

    code = "model_failed"


class Status(StrEnum):
    """Triton's error codes; each protocol has its own number for them."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


class RepositoryError(GenserveError):
    """The model repository, or one model in it, cannot be used as it stands.

    Attributes:
        status: Triton's code for a load that fails so.
    """

    code = "repository_error"

    def __init__(
        self, message: str, *, status: Status = Status.INVALID_ARG, remedy: str = "", field: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy, field=field)
        self.status = status


class ConfigError(RepositoryError):
    """One place of one config.pbtxt is wrong; the message starts with file:line:column.

    Attributes:
        text: the message without the place.
    """

    code = "config_error"

    def __init__(
        self, text: str, *, where: str, status: Status = Status.INVALID_ARG, remedy: str = ""
    ) -> None:
        super().__init__(f"{where}: {text}", status=status, remedy=remedy)
        self.text = text


class InferenceError(GenserveError):
    """An inference failed; the message is Triton's literal text, which its clients compare.

    Attributes:
        status: Triton's code.
    """

    code = "inference_error"

    def __init__(
        self, message: str, *, status: Status = Status.INVALID_ARG, remedy: str = "", field: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy, field=field)
        self.status = status

    @classmethod
    def of(cls, error: BaseException) -> GenserveError:
        """Return what a requester is told of an exception: one of ours itself, any other as INTERNAL."""
        if isinstance(error, GenserveError):
            return error
        return cls(f"{type(error).__name__}: {error}", status=Status.INTERNAL)


class ExportError(GenserveError):
    """A checkpoint could not be read, converted, or verified."""

    code = "export_error"


class MissingDependency(GenserveError):
    """An optional package is needed; the remedy is the pip command that brings it."""

    code = "missing_dependency"


class Unreachable(GenserveError):
    """The client could not reach the server, or the answer never came."""

    code = "unreachable"


class StreamBroken(GenserveError):
    """The client saw a stream end without its last event: what came before is incomplete."""

    code = "stream_broken"


class Closed(GenserveError):
    """The object was closed before this call."""

    code = "closed"


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
    """Return Triton's code of an error, by which protocols and Python models tell it."""
    if isinstance(error, InferenceError):
        return error.status
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
