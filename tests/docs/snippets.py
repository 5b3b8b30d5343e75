"""Snippets: the code blocks of the documentation, with the marks that stand before them.

A mark is a comment in the page's source, right before a block:

    <!-- not run: REASON -->    the block cannot run in a test; its commands are still checked
    <!-- slow -->               it runs with `pytest -m slow` only

`<!-- no snippet is run: REASON -->`, anywhere, is the first mark for all blocks of the page.

    python -m tests.docs.snippets       # lists the blocks that do not run, by their reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

__all__ = ["PAGES", "ROOT", "Snippet", "snippets"]

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)

_MARK = re.compile(r"<!--\s*(?:(slow)|not run: (.+?))\s*-->")
_MARK_OF_PAGE = re.compile(r"<!--\s*no snippet is run: (.+?)\s*-->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One code block."""

    page: Path
    line: int  # the number of the first line
    language: str  # the word after the fence; empty: an indented block, or a fence without a word
    text: str
    not_run: str  # why the block is not run; empty: it is run
    is_slow: bool

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets() -> list[Snippet]:
    """Return the code blocks of all pages."""
    return [snippet for page in PAGES for snippet in _snippets(page)]


def _snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text(encoding="utf-8")
    of_page = _MARK_OF_PAGE.search(text)
    before = None
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            mark = _MARK.fullmatch(before.content.strip()) if before else None
            yield Snippet(
                page=page,
                line=token.map[0] + 1,
                language=token.info.strip(),
                text=token.content,
                not_run=(mark and mark[2]) or (of_page[1] if of_page else ""),
                is_slow=bool(mark and mark[1]),
            )
        before = token if token.type == "html_block" else None


def main() -> None:
    """List the blocks that do not run."""
    places: dict[str, list[str]] = {}
    for snippet in snippets():
        if snippet.not_run:
            places.setdefault(snippet.not_run, []).append(snippet.place)
    for reason, found in sorted(places.items()):
        print(f"{reason}: {', '.join(found)}")


if __name__ == "__main__":
    main()
