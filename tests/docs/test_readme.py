"""The README: its length and links, the navigation of the site that it leads to, and the table of clients."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from genserve.server.app import ROUTERS

ROOT = Path(__file__).parents[2]
SITE = "https://genserve.github.io/genserve/"
SOURCE = "https://github.com/genserve/genserve/blob/main/"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_a_minute():
    assert len(README.splitlines()) <= 120


def test_the_routes_in_the_table_of_clients_are_there():
    routes = {route.path for router in ROUTERS for route in router.routes}
    page = (ROOT / "docs" / "http_api.md").read_text(encoding="utf-8")
    [clients] = re.findall(r"## Clients\n(.*?)\n## ", page, flags=re.DOTALL)
    named = {path for path in re.findall(r"`(/[^`]*)`", clients) if not path.startswith("/v2/")}
    assert len(named) > 20
    assert named <= routes


def test_its_links_are_absolute_so_that_they_work_on_pypi():
    links = re.findall(r"\]\(([^)]+)\)|(?:href|src)=\"([^\"]+)\"", README)
    targets = [a or b for a, b in links]
    assert len(targets) > 15
    assert [target for target in targets if not target.startswith((SITE, SOURCE))] == []


def test_the_pages_that_it_links_are_in_the_site():
    targets = {target.partition("#")[0] for target in re.findall(rf"\]\({SITE}([^)]*)\)", README)}
    pictures = {target for target in targets if target.startswith("images/")}
    assert [picture for picture in pictures if not (ROOT / "docs" / picture).is_file()] == []
    pages = targets - pictures
    nav = {path.removesuffix("index.md").removesuffix(".md") for path in _paths(_config()["nav"])}
    assert {page.strip("/") for page in pages} <= nav
    files = set(re.findall(rf"\]\({SOURCE}([^)]*)\)", README))
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_every_page_is_in_the_navigation():
    docs = ROOT / "docs"
    nav = set(_paths(_config()["nav"]))
    assert {path.relative_to(docs).as_posix() for path in docs.glob("**/*.md")} <= nav


def _config() -> dict:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def _paths(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [path for part in (nav.values() if isinstance(nav, dict) else nav) for path in _paths(part)]
