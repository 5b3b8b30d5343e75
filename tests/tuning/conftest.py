"""A repository that a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def repository(tiny_repository: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_repository, tmp_path / "models")
