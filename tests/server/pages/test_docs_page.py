from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Literal

import httpx2
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, Field

from genserve.server.kserve.routes import ROUTES
from genserve.server.pages import docs_page

# What makes a browser fetch something.
LOADS = {"link", "script", "img", "iframe", "source"}


class Page(HTMLParser):
    """The parsed page: the resources that it loads, its text, its targets, and the forms that call routes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.words = ""
        self.ids: list[str] = []
        self.links: list[str] = []
        self.forms: list[dict[str, str]] = []
        self.unfolded = ""      # the words outside of `<details>`
        self._in_body = False
        self._depth = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag in LOADS:
            self.loaded += [given[name] for name in ("src", "href") if name in given]
        if tag == "form":
            self.forms.append({"method": given["data-method"], "path": given["data-path"], "body": ""})
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        self._in_body = tag == "textarea"
        self._depth += tag == "details"

    def handle_endtag(self, tag: str) -> None:
        self._in_body = False
        self._depth -= tag == "details"

    def handle_data(self, data: str) -> None:
        self.words += data
        self.unfolded += "" if self._depth else data
        if self._in_body:
            self.forms[-1]["body"] += data


@pytest.fixture(scope="module")
def http(tiny_server):
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def page(http):
    return Page(http.get("/docs").text)


def test_the_docs_page_shows_every_route_and_loads_nothing_from_elsewhere(http, page):
    policy = http.get("/docs").headers["content-security-policy"]
    assert all(url.startswith("data:") for url in page.loaded)
    assert "unsafe" not in policy
    # The last two have no default.
    assert {"default-src 'none'", "base-uri 'none'", "form-action 'none'"} <= {*policy.split("; ")}
    document = http.get("/openapi.json").json()
    assert {*document["paths"]} == {form["path"] for form in page.forms}
    assert [route.path for route in ROUTES if route.path not in page.words] == []


def test_the_contents_lead_to_every_route(page):
    targets = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert targets == {*page.ids} - {"key", "model"}
    assert len(targets) > len({form["path"] for form in page.forms})


def test_common_fields_are_shown_and_rare_ones_folded(page):
    chat = page.unfolded[page.unfolded.index("Answer a chat") : page.unfolded.index("List the models")]
    shown = re.sub(r"\s+", " ", chat)
    assert 'messages[].role required "system" or "developer" or "user" or "assistant"' in shown
    assert "temperature number between 0 and 100 default: 1.0 Divides the logits." in shown
    assert "top_p number between 0 and 1 default: 1.0" in shown
    assert "stop text or list of up to 64 texts of up to 256 characters" in shown
    assert "dry_multiplier" not in shown
    for field in ("dry_multiplier", "stream_options.include_usage", "parameters.do_sample"):
        assert field in page.words


# No example has the id of an answer, a key, an adapter, a model of vectors, or one to pull; no model changes.
_STATUSES = {
    "/v1/chat/completions/control": 404,
    "/v1/usage": 400,
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), 404),
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings"), 404),
    **dict.fromkeys(("/api/pull", "/api/create", "/api/delete"), 400),
    "/api/copy": 501,
}


def test_every_example_of_the_docs_page_is_answered(http, page):
    for form in page.forms:
        body = json.loads(form["body"]) if form["body"] else None
        if body is not None and "model" in body:
            body["model"] = "tiny"  # as the page does
        if "{" not in form["path"]:
            answer = http.request(form["method"], form["path"], json=body)
            assert answer.status_code == _STATUSES.get(form["path"], 200), form


class Part(BaseModel):
    role: Literal["system", "user"]
    parts: list[Part] = []


class NewBody(BaseModel):
    model: str
    messages: list[Part]
    hot: float = Field(default=0.5, ge=0, description="How `hot` <it> is.")
    note: str | None = None


def test_a_new_dialect_is_on_the_page_without_being_named_there():
    new = APIRouter(tags=["New"])

    @new.post("/new/{name}")
    def answer(body: NewBody, name: str) -> None:
        """Answer in a new dialect."""

    app = FastAPI(docs_url=None, description="New.")
    app.include_router(new)
    page = Page(docs_page.written_page(app.openapi()))
    [form] = page.forms
    assert json.loads(form["body"]) == {"model": "", "messages": [{"role": "user"}]}
    words = re.sub(r"\s+", " ", page.unfolded)
    for shown in ("New", "Answer in a new dialect.", "hot number at least 0 default: 0.5 How hot <it> is."):
        assert shown in words


def test_kserve_routes_are_shown_in_readable_form():
    shown = {(route.method, route.path): route.text for route in ROUTES}
    assert ("POST", "/v2/models/{model}[/versions/{version}]/infer") in shown
    assert ("GET", "/v2/health/ready") in shown
    assert not any(re.search(r"[?()\\]", path) for _, path in shown)
    assert all(shown.values())
