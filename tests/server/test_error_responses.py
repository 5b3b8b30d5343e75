"""The table of statuses: one error in the words of every dialect."""

from __future__ import annotations

import grpc
import pytest

from genserve import errors
from genserve.errors import (
    ContextLengthExceeded,
    GenserveError,
    InferenceError,
    ModelFailed,
    Overloaded,
    Status,
    Unauthenticated,
)
from genserve.server.error_responses import (
    TGI_ERRORS,
    ErrorResponses,
    error_headers,
    grpc_status,
    http_status,
    kserve_status,
    renamed,
)

FULL = Overloaded("full", retry_after_s=1.5)


def statuses(error: GenserveError) -> tuple[int, int, int, str]:
    """The statuses of OpenAI, TGI, KServe and gRPC."""
    tgi = ErrorResponses({"/": TGI_ERRORS}).response(error, path="/generate").status_code
    return http_status(error), tgi, kserve_status(error), grpc_status(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FULL, (429, 429, 429, "RESOURCE_EXHAUSTED")),
        (ContextLengthExceeded("long"), (400, 422, 400, "INVALID_ARGUMENT")),
        (Unauthenticated("key"), (401, 401, 401, "UNAUTHENTICATED")),
        (ModelFailed("nan"), (500, 424, 500, "INTERNAL")),
        (InferenceError("queue", status=Status.UNAVAILABLE), (500, 500, 503, "UNAVAILABLE")),
        (InferenceError("type", status=Status.UNSUPPORTED), (500, 500, 501, "UNIMPLEMENTED")),
    ],
)
def test_an_error_has_the_status_of_its_class_in_every_dialect(error, expected):
    assert statuses(error) == expected


@pytest.mark.parametrize("status", Status)
def test_every_status_of_triton_has_one_in_http_and_grpc(status):
    error = InferenceError("x", status=status)
    assert kserve_status(error) >= 400
    assert grpc_status(error) in grpc.StatusCode.__members__


def test_a_full_queue_has_the_time_to_retry_in_seconds_and_milliseconds():
    assert error_headers(FULL) == {"retry-after": "2", "retry-after-ms": "1500"}


def test_a_renamed_error_has_the_dialects_name_in_field_and_message():
    error = renamed(errors.InvalidRequest("prompt[1] is empty", field="prompt[1]"), {"prompt": "inputs"})
    assert (error.message, error.field) == ("inputs[1] is empty", "inputs[1]")
