from __future__ import annotations

import re
from html.parser import HTMLParser

import httpx2
import pytest

from genserve.server.routes.kserve import route_table

# What makes a browser fetch something.
LOADS = {"link", "script", "img", "iframe", "source"}


class Page(HTMLParser):
    """The parsed page: the resources that it loads, its text, and the forms that call routes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.words = ""
        self.forms: list[dict[str, str]] = []
        self._in_body = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag in LOADS:
            self.loaded += [given[name] for name in ("src", "href") if name in given]
        if tag == "form":
            self.forms.append({"method": given["data-method"], "path": given["data-path"], "body": ""})
        self._in_body = tag == "textarea"

    def handle_endtag(self, tag: str) -> None:
        self._in_body = False

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._in_body:
            self.forms[-1]["body"] += data


@pytest.fixture
def http(tiny_server):
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


def test_the_docs_page_shows_every_route_and_loads_nothing_from_elsewhere(http):
    response = http.get("/", headers={"accept": "text/html"}, follow_redirects=True)
    page = Page(response.text)
    assert response.url.path == "/docs"
    assert all(url.startswith("data:") for url in page.loaded)
    policy = response.headers["content-security-policy"].split("; ")
    # The last two have no default.
    assert {"default-src 'none'", "base-uri 'none'", "form-action 'none'"} <= {*policy}
    paths = [*http.get("/openapi.json").json()["paths"], *(route.path for route in route_table())]
    assert [path for path in paths if path not in page.words] == []


def test_every_example_of_the_docs_page_is_answered(http):
    forms = Page(http.get("/docs").text).forms
    assert {form["path"] for form in forms if form["body"]} == {
        "/v1/chat/completions", "/v1/completions", "/generate", "/generate_stream", "/"
    }
    for form in forms:
        headers = {"content-type": "application/json"} if form["body"] else {}
        answer = http.request(form["method"], form["path"], content=form["body"] or None, headers=headers)
        assert answer.status_code == 200, form


def test_kserve_routes_are_shown_in_readable_form():
    shown = {(route.method, route.path): route.text for route in route_table()}
    assert ("POST", "/v2/models/{model}[/versions/{version}]/infer") in shown
    assert ("GET", "/v2/health/ready") in shown
    assert not any(re.search(r"[?()\\]", path) for _, path in shown)
    assert all(shown.values())
