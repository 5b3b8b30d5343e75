"""Configs of adapters, as `genserve check` judges them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from genserve.config.diagnostics import Severity
from genserve.errors import InvalidRequest
from genserve.repository.index import scan
from genserve.repository.model_files import removed_folders
from genserve.repository.model_validation import repository_diagnostics
from tests.repository.test_model_validation import SHIPPED

BASE = 'parameters { key: "base_model" value { string_value: "%s" } }\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = Path(shutil.copytree(SHIPPED, tmp_path / "r"))
    folder = root / "pirate" / "1"
    folder.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).write_bytes(b"{}")
    return root


def found(root: Path, config: str) -> list[tuple[Severity, str]]:
    (root / "pirate" / "config.pbtxt").write_text(config)
    diagnostics = repository_diagnostics([root])["pirate"]
    return [(one.severity, one.position) for one in diagnostics if one.path.name == "config.pbtxt"]


def test_the_backend_follows_from_the_files(root: Path) -> None:
    assert found(root, BASE % "smollm2") == []
    assert scan([root])["pirate"].base_model == "smollm2"


@pytest.mark.parametrize("config", ["", BASE % "nobody", BASE % "smollm2_logits", BASE % "pirate"])
def test_a_base_that_is_no_text_model_is_an_error(root: Path, config: str) -> None:
    assert [severity for severity, _ in found(root, f'backend: "adapter"\n{config}')] == [Severity.ERROR]


def test_fields_that_the_base_has_are_warnings(root: Path) -> None:
    config = f'backend: "adapter"\n{BASE % "smollm2"}max_batch_size: 4\n'
    assert found(root, config) == [(Severity.WARNING, "3:1")]


def test_of_several_versions_the_latest_is_served(root: Path) -> None:
    shutil.copytree(root / "pirate" / "1", root / "pirate" / "2")
    config = f'backend: "adapter"\n{BASE % "smollm2"}version_policy {{ all {{ }} }}\n'
    assert found(root, config) == [(Severity.WARNING, "3:1")]


def test_a_missing_file_is_an_error(root: Path) -> None:
    (root / "pirate" / "1" / "adapter_config.json").unlink()
    (root / "pirate" / "config.pbtxt").write_text(f'backend: "adapter"\n{BASE % "smollm2"}')
    messages = [one.message for one in repository_diagnostics([root])["pirate"]]
    assert messages == ["adapter_config.json is missing"]


def test_a_base_is_not_removed_without_its_adapters(root: Path) -> None:
    (root / "pirate" / "config.pbtxt").write_text(BASE % "smollm2")
    entries = scan([root])
    with pytest.raises(InvalidRequest, match="pirate"):
        removed_folders(["smollm2"], entries, repository=root)
    assert removed_folders(["pirate"], entries, repository=root) == [root / "pirate"]
    assert root / "pirate" in removed_folders(["smollm2", "pirate"], entries, repository=root)
