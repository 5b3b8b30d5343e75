from __future__ import annotations

from pathlib import Path

import pytest

from genserve.errors import ExportError
from genserve.export.model_folders import writing_into
from genserve.export.pulling import fetch_gguf


def test_a_full_disk_is_told_with_what_to_do() -> None:
    with (
        pytest.raises(ExportError, match="/models cannot be written to: No space left") as caught,
        writing_into(Path("/models")),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        file.write(b"x")
    assert caught.value.remedy == "free some space, or choose a folder on another disk"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ExportError, match=r"cache/models cannot be written to: Not a directory \("):
        fetch_gguf(tmp_path / "cache" / "models")


def test_an_error_that_is_not_the_disks_passes() -> None:
    with pytest.raises(FileNotFoundError), writing_into(Path("/models")):
        Path("/nowhere/at/all").read_bytes()
