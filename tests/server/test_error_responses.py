"""The table of statuses: one error in the words of every dialect."""

from __future__ import annotations

import grpc
import openai
import pytest

from genserve import Client, errors
from genserve.errors import (
    ContextLengthExceeded,
    GenserveError,
    InferenceError,
    ModelFailed,
    Overloaded,
    Status,
    Unauthenticated,
)
from genserve.server.error_formats import TGI_ERRORS, error_headers, error_response, renamed
from genserve.server.error_statuses import grpc_status, http_status, kserve_status

FULL = Overloaded("full", retry_after_s=1.5)


def statuses(error: GenserveError) -> tuple[int, int, int, str]:
    """The statuses of OpenAI, TGI, KServe and gRPC."""
    tgi = error_response(error, TGI_ERRORS).status_code
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


# By an unknown path of each dialect: a path with other methods, and what the bodies of 404 and 405 say.
WRONG_ROUTES = {
    "/v1/nowhere": ("/v1/models", {"type": "not_found_error"}, {"type": "invalid_request_error"}),
    "/v1/messages/nowhere": ("/v1/messages", {"type": "not_found_error"}, {"type": "invalid_request_error"}),
    "/v1beta/nowhere": (
        "/v1beta/models",
        {"code": 404, "status": "NOT_FOUND"},
        {"code": 405, "status": "INVALID_ARGUMENT"},
    ),
    "/api/nowhere": ("/api/tags", {}, {}),      # the last two have no words for a status
    "/nowhere": ("/info", {}, {}),
}


@pytest.mark.parametrize("path", WRONG_ROUTES)
def test_the_body_for_an_unknown_path_or_method_agrees_with_its_status(http, path):
    known, of_404, of_405 = WRONG_ROUTES[path]
    for response, status, words in ((http.get(path), 404, of_404), (http.put(known), 405, of_405)):
        assert (response.status_code, response.headers["x-should-retry"]) == (status, "false")
        error = response.json()["error"]
        assert words == {name: error[name] for name in words}


def test_openais_clients_print_the_remedy_and_ours_has_it_apart(tiny_server):
    messages = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match=r"'tini'.*; did you mean tiny"):
            client.chat.completions.create(model="tini", messages=messages)
        with pytest.raises(openai.NotFoundError, match=r"; .*encoder"):
            client.embeddings.create(model="tiny", input="a")
    with Client(tiny_server.url) as client, pytest.raises(errors.ModelNotFound) as raised:
        client.chat("hi", model="tini")
    assert "did you mean tiny" in raised.value.remedy
    assert "did you mean" not in raised.value.message
