"""The tiny model with the plug-ins of docs/decoding.md."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.docs.snippets import ROOT, snippets

__all__ = ["copy_with_plugins", "documented_model"]

_PAGE = ROOT / "docs" / "decoding.md"


def documented_model() -> str:
    """The model.py that the page shows."""
    [block] = [one.text for one in snippets() if one.page == _PAGE and one.language == "python"]
    return block


def copy_with_plugins(tiny_repository: Path, root: Path, *, more: str = "") -> Path:
    """Copy the repository; its decoder's model.py is the page's, and `more` behind it."""
    shutil.copytree(tiny_repository, root)
    (root / "tiny_decoder" / "1" / "model.py").write_text(documented_model() + more)
    return root
