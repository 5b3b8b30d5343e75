"""The folders of an export: written and installed whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from genserve.errors import ExportError
from genserve.export.model_folders import ModelFolders, install, writing_into
from genserve.export.pulling import fetch_gguf
from genserve.files import staging_folder

STAGES = ModelFolders("m")
FILES = (
    "m_tokenizer/config.pbtxt",
    "m_tokenizer/1/tokenizer.json",
    "m_logits/config.pbtxt",
    "m_logits/1/model.onnx",
    "m_decoder/config.pbtxt",
    "m_decoder/1/model.py",
    "m/1/.gitkeep",
    "m/config.pbtxt",
)


def write_files(folder: Path, *, content: str) -> None:
    for file in FILES:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)


def contents(repository: Path) -> dict[str, str]:
    paths = sorted(repository.rglob("*"))
    return {str(path.relative_to(repository)): path.read_text() if path.is_file() else "" for path in paths}


def install_without(missing: str, repository: Path, *, overwrite: bool) -> None:
    """Install, and fail at the missing file."""
    with staging_folder(repository, STAGES.ensemble) as staged:
        write_files(staged, content="new")
        (staged / missing).unlink()
        install(staged, repository, STAGES, overwrite=overwrite)


def test_a_failed_installation_is_undone(tmp_path: Path) -> None:
    write_files(tmp_path, content="old")
    (tmp_path / "m_decoder" / "1" / "model.py").unlink()
    before = contents(tmp_path)
    with pytest.raises(FileNotFoundError):
        install_without("m_decoder/1/model.py", tmp_path, overwrite=True)
    assert contents(tmp_path) == before


def test_a_failure_in_an_empty_repository_leaves_it_empty(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        install_without("m/config.pbtxt", tmp_path, overwrite=False)
    assert not list(tmp_path.iterdir())


def test_a_running_export_keeps_its_folder_and_a_killed_one_does_not(tmp_path: Path) -> None:
    (tmp_path / ".m.killed12.tmp").mkdir()
    with staging_folder(tmp_path, "m") as first, staging_folder(tmp_path, "m") as second:
        assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}
    assert not list(tmp_path.iterdir())


def test_what_only_looks_like_a_leftover_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a folder that several users share, anybody may create such a path."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / ".m.linked12.tmp").symlink_to(kept)
    os.mkfifo(tmp_path / ".m.waiting1.tmp")
    (tmp_path / ".m.file1234.tmp").touch()
    with staging_folder(tmp_path, "m") as staged:
        assert not list(staged.iterdir())
    assert kept.is_dir()


def test_a_folder_that_another_export_has_just_created_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp

    def make_and_be_overtaken(**name: Any) -> str:
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        folder = make(**name)
        with staging_folder(tmp_path, STAGES.ensemble):
            pass
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_be_overtaken)
    with staging_folder(tmp_path, STAGES.ensemble) as staged:
        assert list(tmp_path.iterdir()) == [staged]
    assert not list(tmp_path.iterdir())


def test_only_missing_files_are_added_to_shipped_folders(tmp_path: Path) -> None:
    write_files(tmp_path, content="shipped")
    (tmp_path / "m_logits" / "1" / "model.onnx").unlink()
    (tmp_path / "m_decoder" / "config.pbtxt").unlink()
    with staging_folder(tmp_path, STAGES.ensemble) as staged:
        write_files(staged, content="new")
        install(staged, tmp_path, STAGES, overwrite=False)
    new = {path for path, content in contents(tmp_path).items() if content == "new"}
    assert new == {"m_tokenizer/1/tokenizer.json", "m_logits/1/model.onnx", "m_decoder/config.pbtxt"}


def test_a_full_disk_is_an_error_with_a_remedy() -> None:
    with (
        pytest.raises(ExportError, match="/models") as caught,
        writing_into(Path("/models")),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        file.write(b"x")
    assert "space" in caught.value.remedy


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ExportError, match="cache/models"):
        fetch_gguf(tmp_path / "cache" / "models")


def test_other_errors_pass() -> None:
    with pytest.raises(FileNotFoundError), writing_into(Path("/models")):
        Path("/nowhere/at/all").read_bytes()
