"""Recorded answers of the samplers of llama.cpp, from tests/engine/recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["recorded"]

RECORDED = Path(__file__).parents[1] / "engine" / "recorded" / "llama_cpp.json"


def recorded(*names: str) -> list[dict[str, Any]]:
    """The steps whose options have one of these names; `row` and `left` are [V] float32."""
    cases = json.loads(RECORDED.read_text())
    found = [case for case in cases if any(name in case["options"] for name in names)]
    assert found
    for case in found:
        case["row"] = np.array(case["row"], dtype=np.float32)
        left = np.full_like(case["row"], -np.inf)
        left[case["ids"]] = case["left"] or case["row"][case["ids"]]
        case["left"] = left
    return found
