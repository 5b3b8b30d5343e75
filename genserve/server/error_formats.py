"""Error formats: the body and headers of an error in each dialect, and its field by the dialect's names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Response

from genserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GenserveError,
    InvalidRequest,
    ModelNotReady,
    Overloaded,
    ReplicaLost,
    Unauthenticated,
)
from genserve.redaction import redacted_error
from genserve.request_context import current_request
from genserve.server.error_statuses import http_status, tgi_status, tgi_type

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    **dict.fromkeys((405, 408, 413, 414, 415, 431), "invalid_request_error"),
    429: "rate_limit_error",
}
# While a model loads or the server stops, of which the duration is unknown.
_UNAVAILABLE_RETRY_S = 5


def openai_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of OpenAI's dialect, with our remedy; its clients show only the message."""
    error = redacted_error(error)
    return {
        "error": {
            "message": full_message(error),
            "type": _OPENAI_TYPES.get(http_status(error), "server_error"),
            "param": error.field,
            "code": error.code,
            "remedy": error.remedy,
        }
    }


def full_message(error: GenserveError) -> str:
    """Return the message of an error with its remedy, for clients that show only the message.

    Some clients look for OpenAI's code in this text, to shorten a chat that is too long.
    """
    message = error.message
    if error.remedy and message.endswith("."):
        message = f"{message} {error.remedy[0].upper()}{error.remedy[1:]}."
    elif error.remedy:
        message = f"{message}; {error.remedy}"
    return f"{message} ({error.code})" if isinstance(error, ContextLengthExceeded) else message


def tgi_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of TGI's dialect, with our code, field and remedy."""
    error = redacted_error(error)
    message = error.message
    if isinstance(error, ContextLengthExceeded) and error.num_tokens is not None:
        message = f"`inputs` must have less than {error.max_length} tokens. Given: {error.num_tokens}"
    return {
        "error": message,
        "error_type": tgi_type(error),
        "code": error.code,
        "field": error.field,
        "remedy": error.remedy,
    }


def kserve_error(error: GenserveError) -> dict[str, str]:
    """Return the error body of KServe's protocol, with our remedy."""
    error = redacted_error(error)
    return {"error": message_of(error), **({"remedy": error.remedy} if error.remedy else {})}


def message_of(error: GenserveError) -> str:
    """Return the message of an error as valid UTF-8: a Python string may hold a lone surrogate."""
    return error.message.encode(errors="replace").decode()


def error_headers(error: GenserveError) -> dict[str, str]:
    """Return the headers that an error has in every dialect.

    When to retry is HTTP's header, in whole seconds, and OpenAI's, in milliseconds; `error_response`
    adds them to any other 503.
    """
    if isinstance(error, Overloaded) or (isinstance(error, ModelNotReady) and error.retry_after_s):
        return _retry_headers(error.retry_after_s)
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    # Official clients would send it again: maybe it has ended the replica, and it has had its time.
    if isinstance(error, ReplicaLost | DeadlineExceeded):
        return {"x-should-retry": "false"}
    return {}


def _retry_headers(retry_after_s: float) -> dict[str, str]:
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(math.ceil(retry_after_s * 1000)),
    }


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error with its field, and the mention of it in the message, in a dialect's own names.

    Args:
        error: the error that the answer reports.
        names: the dialect's names by ours. The key is a whole field, also with an index (`tools[1]`), or the
            part of it behind an index, with a dot before it.
    """
    field = error.field or ""
    name = re.split(r"[.\[]", field, maxsplit=1)[0]
    indexed = field.partition("]")[0] + "]"
    name = indexed if indexed in names else name
    own = names[name] + field.removeprefix(name) if name in names else field
    for part, theirs in names.items():
        if part.startswith("."):
            own = own.replace(part, theirs)
    if own == field:
        return error
    message = error.message
    if message.startswith(field):
        message = own + message.removeprefix(field)
    elif message.startswith(name):
        message = names.get(name, name) + message.removeprefix(name)
    changed = copy(error)
    changed.message, changed.field = message, own
    return changed


@contextmanager
def named_as(names: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Have an InvalidRequest that is raised within name its field as a dialect does; see `renamed`."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, names()) from None


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes an error: its JSON body and its HTTP status."""

    body: Callable[[GenserveError], dict[str, Any]]
    status: Callable[[GenserveError], int]


OPENAI_ERRORS = ErrorFormat(openai_error, http_status)
TGI_ERRORS = ErrorFormat(tgi_error, tgi_status)


def error_response(error: GenserveError, written: ErrorFormat) -> Response:
    """Return the response to a failed request in a dialect's format, and note the error for the log."""
    current_request().fail(error)
    status = written.status(error)
    headers = error_headers(error)
    if status == 503 and not headers:
        headers = _retry_headers(_UNAVAILABLE_RETRY_S)
    elif isinstance(error, InvalidRequest):
        headers = {"x-should-retry": "false"}
    body = orjson.dumps(written.body(error))  # a third of what JSONResponse costs
    return Response(body, status_code=status, headers=headers, media_type="application/json")
