"""The documentation as a site: every link resolves, and a browser asks no other host for anything."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest
import yaml

from tests.docs.snippets import ROOT
from tests.server.browser import chromium

pytestmark = pytest.mark.slow

_LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.add(values["href"])
        address = values.get(_LOADING.get(tag, ""))
        if address and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.add(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, with which no warning is counted.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, _Page]:
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path.relative_to(site).as_posix(): _Page(path.read_text(encoding="utf-8")) for path in files}


def test_every_link_resolves(site, pages):
    own = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["site_url"]
    broken, external = [], set()
    for name, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(urljoin(own + name.removesuffix("index.html"), link))
            if not address.startswith(own):
                external.add(address)
                continue
            target = unquote(address.removeprefix(own))
            target += "index.html" if target == "" or target.endswith("/") else ""
            is_there = target in pages or (site / target).is_file()
            if not is_there or (anchor and target in pages and unquote(anchor) not in pages[target].ids):
                broken.append(f"{name}: {link}")
    assert broken == []
    assert {urlsplit(address).scheme for address in external} <= {"https", "http"}
    print("\nexternal links:", *sorted(external), sep="\n  ")


def test_no_page_loads_anything_from_another_host(pages):
    assert {address for page in pages.values() for address in page.loaded if "//" in address} == set()


def test_links_to_the_repository_are_files_of_it(pages):
    source = "https://github.com/genserve/genserve/blob/main/"
    links = {urldefrag(link)[0] for page in pages.values() for link in page.links if link.startswith(source)}
    assert links
    assert [link for link in links if not (ROOT / link.removeprefix(source)).exists()] == []


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_browser_reads_and_searches_it_at_every_width(address):
    paths = ("", "reference/cli/", "reference/http/", "reference/sdk/", "sampling/", "guides/nginx/")
    with chromium() as browser:
        for width, scheme in ((1280, "light"), (390, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
            requests: list[str] = []
            page.on("request", lambda request: requests.append(request.url))     # noqa: B023
            for path in paths:
                page.goto(address + path, wait_until="networkidle")
                assert page.evaluate("document.documentElement.scrollWidth") == width
                assert page.locator("body").get_attribute("data-md-color-scheme") == (
                    "slate" if scheme == "dark" else "default"
                )
            assert {url for url in requests if not url.startswith((address, "data:"))} == set()
            page.close()
        page = browser.new_page()
        page.goto(address, wait_until="networkidle")
        page.get_by_role("textbox", name="Search").click()
        page.keyboard.type("least recently used")
        page.locator(".md-search-result__item", has_text="The KV cache").first.wait_for()
