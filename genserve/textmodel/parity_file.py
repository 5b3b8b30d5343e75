"""Parity file: parity.json beside a graph, in which its export says how the graph agrees with its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PARITY_FILE = "parity.json"


def read_parity(folder: Path) -> dict[str, Any]:
    """Return the fields of the `export.parity.Parity` of the graph in a folder; empty without such a file."""
    try:
        found = json.loads((folder / PARITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
