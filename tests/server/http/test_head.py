"""HEAD: the status and the headers of GET, without its body, on every route."""

from __future__ import annotations

import re

import pytest

from genserve.server.kserve.routes import ROUTES

_VALUES = {"model": "tiny", "name": "tiny", "version": "1"}


def paths(http) -> set[str]:
    """One path for each route that answers GET, and for the pages, which the OpenAPI document leaves out."""
    found = {path for path, methods in http.get("/openapi.json").json()["paths"].items() if "get" in methods}
    found |= {route.path for route in ROUTES if route.method == "GET"}
    found |= {"/", "/docs", "/openapi.json", "/nowhere"}
    whole = {re.sub(r"\[(.*?)\]", r"\1", path) for path in found}
    return {re.sub(r"{(\w+)}", lambda name: _VALUES.get(name[1], "none"), path) for path in whole}


def headers_of(response) -> dict[str, str]:
    # The text of the metrics and the duration of a statistic change between two requests.
    changing = {"date", "x-request-id"}
    if response.url.path == "/metrics" or response.url.path.endswith("/stats"):
        changing.add("content-length")
    return {name: value for name, value in response.headers.items() if name not in changing}


def test_head_answers_as_get_without_the_body(http):
    wrong = []
    for path in sorted(paths(http)):
        get, head = http.get(path), http.head(path)
        if (head.status_code, headers_of(head), head.content) != (get.status_code, headers_of(get), b""):
            wrong.append((path, get.status_code, head.status_code))
    assert wrong == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v2/models/tiny/infer", "/v2/repository/index"])
def test_head_of_a_route_that_only_posts_is_rejected(http, path):
    assert http.head(path).status_code == http.get(path).status_code == 405


def test_a_connection_goes_on_after_head(http):
    for _ in range(3):
        assert http.head("/v2").headers["content-length"] == str(len(http.get("/v2").content))
