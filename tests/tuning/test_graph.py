from __future__ import annotations

import json
from pathlib import Path

import pytest

from genserve.tuning.search_space import state_types, top1_agreement


def test_the_types_of_a_cache_are_those_of_the_graph_s_inputs(tiny_repository: Path) -> None:
    types = state_types(tiny_repository / "tiny_logits" / "1" / "model.onnx")
    layers = (f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value"))
    assert types == dict.fromkeys(layers, "TYPE_FP32")


def test_the_agreement_is_what_the_export_found(tiny_repository: Path) -> None:
    assert top1_agreement(tiny_repository / "tiny_logits" / "1" / "model.onnx") == 1.0


@pytest.mark.parametrize("content", [None, "", "[]", "{}", json.dumps({"top1_agreement": "good"})])
def test_a_graph_of_unknown_make_agrees_to_an_unknown_degree(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "parity.json").write_text(content)
    assert top1_agreement(tmp_path / "model.onnx") is None
