"""Model file: which file of a version's folder holds its model."""

from __future__ import annotations

from pathlib import Path

from genserve.errors import RepositoryError, Status

__all__ = ["model_file"]


def model_file(folder: Path, *, filename: str, default: str, model: str) -> Path:
    """Return the file, or the folder, that a version of a model is loaded from.

    Args:
        folder: of the version.
        filename: `default_model_filename` of the config; empty: the backend's default.
        default: what the backend looks for.
        model: its name, for the error.

    Raises:
        RepositoryError: there is none; in Triton's words.
    """
    path = folder / (filename or default)
    if not path.exists():
        raise RepositoryError(
            f"unable to find '{path}' for model instance '{model}'",
            status=Status.UNAVAILABLE,
            remedy="put the file there, or name it by `default_model_filename` in config.pbtxt",
        )
    return path
