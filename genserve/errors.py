"""Errors: every failure that a user may see, with a code, a message and a remedy.

    GenserveError
    ├── InvalidRequest            the caller can correct it; `field` names the place
    │   └── ContextLengthExceeded the prompt does not fit into the model's context
    ├── Unauthenticated           the API key is missing or wrong
    ├── Forbidden                 the origin, the host name or a required header is not allowed
    │   └── ControlForbidden      the API key is right, but may not control the server
    ├── UnsupportedMediaType      the content type of the body is not accepted
    ├── ModelNotFound             no such model, or no such version of it
    ├── ResponseNotFound          no stored response, or item of one, has this id
    ├── ModelNotReady             the model exists and is not loaded, or its load failed
    │   └── VersionReplaced       the replicas of a deployment now serve another version of the model
    ├── Overloaded                the queue of a text model is full; try again later
    │   └── RateLimited           the API key has used up one of its limits
    ├── DeadlineExceeded          the request's own deadline passed before the first token of its answer
    ├── ModelFailed               a model or a decoding loop raised, or its output is unusable
    ├── ReplicaLost               the replica of a deployment that answered a request has died
    │   └── NotResumable          no other replica can continue the answer
    ├── InferenceError            an inference with named tensors failed; Triton's code and text
    ├── RepositoryError           a model repository, or a model in it, is invalid
    │   └── ConfigError           one place of one config.pbtxt; file, line and column
    ├── ExportError               a checkpoint could not be converted to a repository model
    ├── DeployFailed              a cluster could not start an application or a replica
    ├── MissingDependency         an optional package is not installed
    ├── Unreachable               client: the server did not answer
    ├── StreamBroken              client: a stream ended before its last event
    └── Closed                    the object was used after `close()`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

_MAX_LISTED = 12        # names in the remedy for an unknown name
_MAX_NAME = 128         # characters of a name that may be misspelt
_MAX_PROBLEM = 200      # characters of the text that says what is wrong with a value
# The remedy for a failure whose cause is not shown to clients: it may have paths, or the output of a program.
SEE_LOG = "the server's log has the reason"
# The remedy for an exception in a repository's own Python code, whose message is shown to clients.
SEE_TRACEBACK = "the server's log has the traceback"
_LONGEST_EXCEPTION = 8192   # characters of an exception's message


class GenserveError(Exception):
    """The base class of all errors that genserve raises on purpose.

    Attributes:
        code: a stable name in lower_snake_case, for programs to compare.
        message: one sentence that names the object and the place.
        remedy: how to correct the problem; may be empty.
        field: the path of the invalid request field (`messages[0].content`), or None.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, remedy: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.field = field

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[Callable[..., GenserveError], tuple[object, ...]]:
        """Pickle the attributes for another process, since most are keywords of `__init__`."""
        return restored, (type(self), self.args, self.__dict__)


def restored(
    kind: type[GenserveError], args: tuple[object, ...], attributes: Mapping[str, object]
) -> GenserveError:
    """Return a pickled error."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class InvalidRequest(GenserveError):
    """The request is invalid, and a retry would fail too; `field` names the place."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for an answer within the model's context length.

    Dialects write the numbers in their own words, by which clients recognise that they must shorten a chat.

    Attributes:
        num_tokens: the tokens of the prompt, or the least number that it certainly has; None: unknown.
        max_length: the context length, in tokens; None: unknown.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        field: str | None = None,
        num_tokens: int | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy, field=field)
        self.num_tokens = num_tokens
        self.max_length = max_length


class Unauthenticated(GenserveError):
    """The server requires an API key, and the request has none or a wrong one."""

    code = "unauthenticated"


class Forbidden(GenserveError):
    """The request's origin or host name is not allowed, or a required header is missing."""

    code = "forbidden"


class ControlForbidden(Forbidden):
    """The request would change the server, which its API key may not do."""


class UnsupportedMediaType(GenserveError):
    """The server does not accept the content type of the body."""

    code = "unsupported_media_type"


class ModelNotFound(GenserveError):
    """No model has this name, or the model has no such version."""

    code = "model_not_found"


class ResponseNotFound(GenserveError):
    """No stored response, or item of one, has this id."""

    code = "response_not_found"


class ModelNotReady(GenserveError):
    """The model is in the repository, but cannot serve now.

    Attributes:
        retry_after_s: estimated seconds until the model is ready; 0: unknown.
    """

    code = "model_not_ready"

    def __init__(self, message: str, *, remedy: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s


class VersionReplaced(ModelNotReady):
    """The replicas of a deployment serve another version of the model than the request was prepared for."""


class Overloaded(GenserveError):
    """The server rejects new requests at the moment. Nothing was computed, so a retry is safe.

    Attributes:
        retry_after_s: estimated seconds until the queue has room.
        reason: the limit that was reached, as a label of `genserve_admission_rejections_total`; or empty.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, remedy: str = "", reason: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s
        self.reason = reason


class RateLimited(Overloaded):
    """The API key of the request has used up one of its limits; requests of other keys are accepted."""

    code = "rate_limited"


class DeadlineExceeded(GenserveError):
    """The deadline that the request has set passed before the first token of its answer."""

    code = "deadline_exceeded"


class ModelFailed(GenserveError):
    """The graph or the Python code of a model raised, or its output is unusable (NaN, wrong shape)."""

    code = "model_failed"


class ReplicaLost(GenserveError):
    """The replica of a deployment that answered the request has died; a retry reaches another replica."""

    code = "replica_lost"


class NotResumable(ReplicaLost):
    """The replica that generated an answer has died, and no other replica can continue the answer."""

    code = "not_resumable"


class Status(StrEnum):
    """Triton's error codes, which each protocol maps to its own numbers."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


class RepositoryError(GenserveError):
    """The model repository, or one model in it, is invalid.

    Attributes:
        status: Triton's code for a load that fails with this error.
    """

    code = "repository_error"

    def __init__(
        self, message: str, *, status: Status = Status.INVALID_ARG, remedy: str = "", field: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy, field=field)
        self.status = status


class ConfigError(RepositoryError):
    """One place of one config.pbtxt is invalid; the message starts with file:line:column.

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
    """An inference failed. The message is Triton's literal text, which its clients compare.

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
        """Return the error that a client gets for an exception: INTERNAL unless it is one of genserve's."""
        if isinstance(error, GenserveError):
            return error
        return cls(f"{type(error).__name__}: {error}", status=Status.INTERNAL)


class ExportError(GenserveError):
    """A checkpoint could not be read, converted, or verified."""

    code = "export_error"


class DeployFailed(GenserveError):
    """A cluster rejects an application, or could not start it or one of its replicas."""

    code = "deploy_failed"


class MissingDependency(GenserveError):
    """An optional package is not installed; the remedy is the pip command that installs it."""

    code = "missing_dependency"


class Unreachable(GenserveError):
    """The client could not connect to the server, or got no answer."""

    code = "unreachable"


class StreamBroken(GenserveError):
    """A stream ended before its last event, so its text is incomplete."""

    code = "stream_broken"


class Closed(GenserveError):
    """The object was closed before or during this call."""

    code = "closed"


# Triton's codes by class of error; an error gets the code of its nearest ancestor.
_STATUS: Mapping[type[GenserveError], Status] = {
    InvalidRequest: Status.INVALID_ARG,
    ModelNotFound: Status.NOT_FOUND,
    ModelNotReady: Status.UNAVAILABLE,
    Overloaded: Status.UNAVAILABLE,
    DeadlineExceeded: Status.UNAVAILABLE,
    Closed: Status.UNAVAILABLE,
    GenserveError: Status.INTERNAL,
}


def status_of(error: GenserveError) -> Status:
    """Return Triton's code for an error, for protocols and Python models."""
    if isinstance(error, InferenceError):
        return error.status
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def exception_text(error: BaseException) -> str:
    """Return `ValueError: boom` for an exception of a repository's own Python code, for its clients.

    As in Triton, the message is the author's own. It is shortened, and made valid Unicode.
    """
    try:
        text = str(error) or "<EMPTY MESSAGE>"
    except Exception:
        text = "<its message cannot be read>"
    if len(text) > _LONGEST_EXCEPTION:
        text = f"{text[:_LONGEST_EXCEPTION]}... ({len(text) - _LONGEST_EXCEPTION} more characters)"
    return f"{type(error).__name__}: {text}".encode(errors="replace").decode()


def drop_frames(error: BaseException) -> None:
    """Delete the tracebacks of a stored error and of its causes.

    Their frames keep the variables of the failed calls alive, such as the body of a request or the weights of
    a model.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as a sentence
    """Raise InvalidRequest with the message `field rule`, if it does not hold."""
    if not holds:
        raise InvalidRequest(f"{field} {rule}", field=field)


# pydantic's words, and ours; the first match in a message is replaced.
_OF_PYDANTIC = (
    (re.compile(r"^(Value error|Assertion failed), "), ""),
    (re.compile(r"^Field required$"), "is missing"),
    (re.compile(r"^Extra inputs are not permitted$"), "is unknown"),
    (re.compile(r"^Input should be a valid integer.*"), "must be a whole number"),
    (re.compile(r"^Input should be a valid number.*"), "must be a number"),
    (re.compile(r"^Input should be a valid boolean.*"), "must be true or false"),
    (re.compile(r"^Input should be (a valid dictionary|an object).*"), "must be an object"),
    (re.compile(r"^Input should be greater than or equal to "), "must be at least "),
    (re.compile(r"^Input should be less than or equal to "), "must be at most "),
    (re.compile(r"^Input should be a valid "), "must be a "),
    (re.compile(r"^Input should be "), "must be "),
    (re.compile(r"^(String|List|Tuple|Set|Dictionary) should (.*?)( after validation.*)?$"), r"must \2"),
)


def validation_message(problem: Mapping[str, Any]) -> str:
    """Return the text of one of pydantic's errors, to follow the value's name and a colon."""
    message = str(problem["msg"])
    for words, ours in _OF_PYDANTIC:
        if words.search(message):
            return words.sub(ours, message)[:_MAX_PROBLEM]
    return message[:_MAX_PROBLEM]


def closest(name: str, *, known: Iterable[str]) -> str | None:
    """Return the known name of which `name` is probably a misspelling; None: it resembles no known name."""
    from difflib import get_close_matches  # only needed once something is wrong

    if len(name) > _MAX_NAME:
        return None     # a client may send megabytes, which take seconds to compare
    # Wrong case is the commonest misspelling, and difflib counts upper and lower case as different letters.
    by_lower_case = {each.lower(): each for each in known}
    return next((by_lower_case[each] for each in get_close_matches(name.lower(), by_lower_case, n=1)), None)


def suggestion(name: str, *, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the closest known name, or the list of known names."""
    names = list(known)
    if (close := closest(name, known=names)) is not None:
        return f"did you mean {close}?"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"known there: {', '.join(names[:_MAX_LISTED]) or 'none'}{more}"
