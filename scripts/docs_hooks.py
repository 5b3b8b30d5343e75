"""Docs hooks: add pages to docs/ for `mkdocs build`; mkdocs.yml names this file.

The reference is written from the code, CONTRIBUTING.md and CHANGELOG.md become pages, and a link that leads
out of docs/ becomes a link to the new page, or to the file on GitHub.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import error_reference
import model_tables
import reference_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/genserve/genserve/blob/main/"
# Files outside of docs/ that are pages.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose source is outside docs/."""
    pages = reference_pages.pages()
    pages |= {"errors.md": error_reference.reference(), "architectures.md": model_tables.reference()}
    for path, text in pages.items():
        files.append(File.generated(config, f"reference/{path}", content=text))
    for name, path in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, path, content=_relinked(text, folder=posixpath.dirname(name))))
    return files


def on_page_markdown(markdown: str, page: Page, **_others: Any) -> str:
    """Correct the links of a page of docs/ that lead out of it."""
    if page.file.generated_by:
        return markdown
    return _relinked(markdown, folder=posixpath.dirname("docs/" + page.file.src_uri))


def on_page_content(html: str, **_others: Any) -> str:
    """Make the empty heads of tables plain cells, which screen readers do not announce as heads."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def _relinked(text: str, *, folder: str) -> str:
    """Return the Markdown of a file in `folder` of the repository with links that work in the site."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if target.startswith("docs/"):
            path = target.removeprefix("docs/")
        elif target in PAGES:
            path = PAGES[target]
        elif (ROOT / target).exists():
            return f"]({SOURCE}{target}{found[2] or ''})"
        else:
            return found[0]  # mkdocs reports the broken link
        start = posixpath.relpath("docs", folder or ".") if folder.startswith("docs") else "."
        return f"]({posixpath.normpath(posixpath.join(start, path))}{found[2] or ''})"

    return _LINK.sub(link, text)
