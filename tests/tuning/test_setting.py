from __future__ import annotations

from pathlib import Path

from genserve.backends.onnx_session import num_cores
from genserve.repository.index import scan
from genserve.tuning.search_space import Setting, configured


def test_a_setting_is_read_from_the_config_that_it_was_put_into(repository: Path) -> None:
    setting = Setting(graph="model.onnx", threads=num_cores() + 3, batch_size=5)
    changed = configured(scan([repository])["tiny_logits"], setting)
    assert changed.config is not None
    assert Setting.of(changed.config) == setting
    assert changed.config.parameters["max_sequence_length"] == "256"
