from __future__ import annotations

import json
from pathlib import Path

import pytest

from genserve.errors import GenserveError
from genserve.tuning.engine_steps import measure_engine
from genserve.tuning.measured_steps import read_measured_engine


def test_steps_of_all_sizes_are_measured_and_written(repository: Path, tmp_path: Path) -> None:
    engine = measure_engine("tiny", repository=repository, budget_s=0)
    limits = engine.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.block_size) == (32, 256, 16)
    sizes = [step.size for step in engine.steps]
    assert {size.decodes for size in sizes} >= {0, 1, 2, 4, 8, 16}
    assert max(size.prompt_tokens for size in sizes) == limits.max_length - 64 - 1
    assert all(size.rows == size.decodes + (size.prompt_tokens > 0) for size in sizes)
    # A decode of a sequence of 64 tokens reads the 63 before, and a few more after each step.
    assert min(size.context_tokens / size.decodes for size in sizes if size.decodes) in (63, 64)
    assert all(step.seconds > 0 for step in engine.steps)
    engine.write(tmp_path / "steps.json")
    assert read_measured_engine(tmp_path / "steps.json") == engine
    older = json.loads((tmp_path / "steps.json").read_text())
    del older["limits"]["num_state_slots"]
    (tmp_path / "steps.json").write_text(json.dumps(older))
    assert read_measured_engine(tmp_path / "steps.json") == engine


def test_a_model_that_cannot_be_loaded_is_an_error(repository: Path) -> None:
    (repository / "tiny_logits" / "1" / "model.onnx").write_bytes(b"")
    with pytest.raises(GenserveError):
        measure_engine("tiny", repository=repository, budget_s=0)
