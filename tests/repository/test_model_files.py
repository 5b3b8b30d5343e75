"""Copies of models in a repository."""

from __future__ import annotations

import os
import shutil
from errno import ENOSPC
from pathlib import Path

import pytest

from genserve.errors import RepositoryError
from genserve.repository.index import scan
from genserve.repository.model_files import copy_text_model
from genserve.repository.text_stages import text_stages
from tests.repository.test_model_validation import SHIPPED


def copied(root: Path) -> None:
    entries = scan([root])
    stages = text_stages(entries["smollm2"], entries)
    assert stages is not None
    copy_text_model("smollm2", stages, entries, to="other")


def test_a_tensor_with_the_name_of_a_model_keeps_it(tmp_path: Path) -> None:
    root = shutil.copytree(SHIPPED, tmp_path / "r")
    (root / "smollm2_logits").rename(root / "logits")
    for name in ("smollm2", "logits"):
        config = root / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"smollm2_logits"', '"logits"'))
    copied(root)
    entries = scan([root])
    stages = text_stages(entries["other"], entries)
    assert stages is not None
    assert {stage.name for stage in stages.values()} == {"other_tokenizer", "other_logits", "other_decoder"}
    config = entries["other_logits"].config
    assert config is not None
    assert [output.name for output in config.outputs] == ["logits"]


def test_a_copy_onto_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = shutil.copytree(SHIPPED, tmp_path / "r")

    def full(*_: object) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    before = {*root.iterdir()}
    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(RepositoryError, match=os.strerror(ENOSPC)):
        copied(root)
    assert {*root.iterdir()} == before
