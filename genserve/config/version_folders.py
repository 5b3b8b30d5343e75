"""Version folders: which folders of a model are versions of it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["version_folders"]


def version_folders(model_folder: Path) -> dict[int, Path]:
    """Return the folders named by a number that does not begin with 0, ascending by version."""
    folders = (path for path in model_folder.iterdir() if path.is_dir()) if model_folder.is_dir() else ()
    versions = {int(path.name): path for path in folders if _is_version(path.name)}
    return dict(sorted(versions.items()))


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and not name.startswith("0")
