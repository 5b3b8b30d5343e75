"""The files that the documentation names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
GENERATED = re.compile(r"^(\.\./)*reference/(cli|environment|http|sampling|config|sdk)\.md$")
BASES = (ROOT, ROOT / "genserve", *(path for path in (ROOT / "genserve").rglob("*") if path.is_dir()))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_named_source_files_exist(page):
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|hpp|cpp|json))`", page.read_text(encoding="utf-8")))
    ours = {name for name in named if "/" in name and "NAME" not in name}
    assert {name for name in ours if not any((base / name).is_file() for base in BASES)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_pages_exist(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    others = [link for link in links if not (page.parent / link).exists()]
    # The reference is written when the site is built.
    assert [link for link in others if not GENERATED.search(link)] == []
