from __future__ import annotations

import json

import pytest

from genserve.client.reply_errors import error_of_event, error_of_reply
from genserve.errors import (
    ContextLengthExceeded,
    Forbidden,
    GenserveError,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    RateLimited,
    Unauthenticated,
    Unreachable,
)


def error_of(body: object, *, status: int, headers: dict[str, str] | None = None) -> GenserveError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return error_of_reply(status=status, headers=headers or {}, body=raw, url="http://host/generate")


def test_an_error_in_tgis_dialect_keeps_field_and_remedy() -> None:
    error = error_of(
        {"error": "top_k must be 0 or more", "error_type": "validation", "code": "invalid_request",
         "field": "top_k", "remedy": "leave it out"},
        status=422,
    )
    assert type(error) is InvalidRequest
    assert (error.message, error.field, error.remedy) == ("top_k must be 0 or more", "top_k", "leave it out")


def test_an_error_in_openais_dialect_keeps_field_and_remedy() -> None:
    error = error_of(
        {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages",
                   "code": "context_length_exceeded", "remedy": "send less"}},
        status=400,
    )
    assert type(error) is ContextLengthExceeded
    assert (error.message, error.field, error.remedy) == ("too long", "messages", "send less")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, {"error": "?", "error_type": "validation", "code": "model_not_found"}, ModelNotFound),
        (503, {"error": "?", "error_type": "overloaded", "code": "model_not_ready"}, ModelNotReady),
        (422, {"error": "?", "error_type": "validation"}, InvalidRequest),
        (424, {"error": "?", "error_type": "generation"}, ModelFailed),
        (429, {"error": "?", "error_type": "overloaded"}, Overloaded),
        (500, {"error": "?", "error_type": "incomplete_generation"}, ModelFailed),
        (503, {"error": {"message": "?", "code": "server_is_overloaded"}}, Overloaded),
        (401, {"error": {"message": "?", "type": "authentication_error", "code": None}}, Unauthenticated),
        (401, b"", Unauthenticated),
        (403, {"error": {"message": "?", "type": "permission_error", "code": "forbidden"}}, Forbidden),
        (429, {"error": {"message": "?", "type": "requests", "code": "rate_limited"}}, RateLimited),
        (400, {"error": {"message": "?", "code": 400}}, InvalidRequest),
        (503, b"<html>Service Unavailable</html>", Overloaded),
        (502, b"", Unreachable),
        (404, b'"not found"', Unreachable),
        (301, b"", Unreachable),
        (500, b"[]", ModelFailed),
    ],
)
def test_code_type_and_status_determine_the_error_in_this_order(
    status: int, body: object, kind: type[GenserveError]
) -> None:
    assert type(error_of(body, status=status)) is kind


def test_a_missing_key_has_a_remedy_for_users_of_the_client() -> None:
    details = {"message": "the key is missing", "code": "unauthenticated", "remedy": "send the header X"}
    error = error_of({"error": details}, status=401)
    assert error.code == "unauthenticated"
    assert "GENSERVE_API_KEY" in error.remedy


def test_an_empty_reply_is_named_by_its_url_and_status() -> None:
    message = error_of(b"", status=500).message
    assert "http://host/generate" in message
    assert "500" in message


def test_the_header_in_milliseconds_precedes_the_one_in_seconds() -> None:
    headers = {"retry-after": "1", "retry-after-ms": "250"}
    error = error_of({"error": "full", "error_type": "overloaded"}, status=429, headers=headers)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == pytest.approx(0.25)


def test_a_model_that_is_not_ready_has_the_retry_after_of_the_reply() -> None:
    error = error_of({"error": "?", "code": "model_not_ready"}, status=503, headers={"retry-after": "5"})
    assert isinstance(error, ModelNotReady)
    assert error.retry_after_s == 5


@pytest.mark.parametrize(("header", "seconds"), [("7", 7), ("0", 1), ("Wed, 21 Oct 2026", 1), ("", 1)])
def test_an_overload_has_the_retry_after_of_the_reply(header: str, seconds: int) -> None:
    body = {"error": "full", "error_type": "overloaded"}
    error = error_of(body, status=429, headers={"retry-after": header})
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == seconds


def test_an_event_with_an_error_is_read_like_a_reply() -> None:
    assert isinstance(error_of_event({"error": "nan", "error_type": "generation"}), ModelFailed)
    assert isinstance(error_of_event({"error": {"message": "nan", "code": "model_failed"}}), ModelFailed)
