"""Parity file: what an export found when it compared a graph with its source, in a file beside the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["PARITY_FILE", "read_parity"]

PARITY_FILE = "parity.json"


def read_parity(folder: Path) -> dict[str, Any]:
    """Return the fields of `export.parity.Parity` of the graph in a folder; none, if no file has them."""
    try:
        found = json.loads((folder / PARITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
