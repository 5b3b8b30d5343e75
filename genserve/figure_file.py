"""Figure file: an empty plot, and whether it and other results can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genserve.errors import MissingDependency, RepositoryError


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn, before anything is measured.

    Raises:
        MissingDependency: matplotlib is not installed.
        RepositoryError: the folder does not exist, or the suffix is not an image format.
    """
    formats = new_figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise RepositoryError(
            f"the suffix of {path} is not an image format", remedy=f"use one of {', '.join(sorted(formats))}"
        )
    check_folder(path, of="plot")


def check_folder(path: Path, *, of: str) -> None:
    """Raise RepositoryError unless the folder exists into which a file is to be written."""
    if not path.parent.is_dir():
        raise RepositoryError(f"there is no folder {path.parent} for the {of}", remedy="create it")


def new_figure(*, height: float = 5.0) -> Any:
    """Return an empty figure of matplotlib; raises MissingDependency if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("a plot needs matplotlib", remedy="pip install 'genserve[plot]'") from error
    return Figure(figsize=(12, height), layout="constrained", dpi=120)
