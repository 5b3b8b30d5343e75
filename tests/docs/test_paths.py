"""The files, classes and methods that the documentation names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
GENERATED = re.compile(
    r"^(\.\./)*reference/(cli|environment|http|sampling|config|sdk|metrics|errors|architectures)\.md$"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
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


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_walks_name_modules_classes_and_methods_of_today(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    files = set(re.findall(r"`(\w+\.(?:py|hpp|cpp))`", text)) - {"model.py"}    # which is the user's
    assert {file for file in files if not any((base / file).is_file() for base in BASES)} == set()
    named = set(re.findall(r"`([A-Z][a-z]\w*)(?:\.(\w+))?`", text))
    members = _members_of_classes({owner for owner, _ in named})
    assert {(owner, member) for owner, member in named if owner not in members} == set()
    assert {(owner, member) for owner, member in named if member and member not in members[owner]} == set()


def _members_of_classes(names: set[str]) -> dict[str, set[str]]:
    """Return the methods and annotated attributes that each of these classes has in its own body."""
    members: dict[str, set[str]] = {}
    defined = re.compile(rf"^class ({'|'.join(names)})\b", re.MULTILINE)
    for path in (ROOT / "genserve").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for owner in ast.parse(source).body if defined.search(source) else ():
            if isinstance(owner, ast.ClassDef) and owner.name in names:
                functions = {node.name for node in owner.body if isinstance(node, FUNCTIONS)}
                fields = {ast.unparse(node.target) for node in owner.body if isinstance(node, ast.AnnAssign)}
                members.setdefault(owner.name, set()).update(functions, fields)
    return members


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_pages_exist(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    others = [link for link in links if not (page.parent / link).exists()]
    # The reference is written when the site is built.
    assert [link for link in others if not GENERATED.search(link)] == []
