"""The tiny model with the plug-ins of docs/decoding.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

__all__ = ["copy_with_plugins", "documented_model"]

_PAGE = Path(__file__).parents[2] / "docs" / "decoding.md"


def documented_model() -> str:
    """The model.py that the page shows."""
    found = re.search(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def copy_with_plugins(tiny_repository: Path, root: Path, *, more: str = "") -> Path:
    """Copy the repository; its decoder's model.py is the page's, and `more` behind it."""
    shutil.copytree(tiny_repository, root)
    (root / "tiny_decoder" / "1" / "model.py").write_text(documented_model() + more)
    return root
