"""Store: the user's own model repository, which commands use from any folder."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import platformdirs


def home_folder() -> Path:
    """Return the folder of a user's models: $GENSERVE_HOME, or genserve/ in the platform's data folder."""
    if folder := os.environ.get("GENSERVE_HOME"):
        return Path(os.path.expanduser(folder))     # noqa: PTH111  # Path's raises without a home folder
    return platformdirs.user_data_path("genserve", appauthor=False)


def default_repository() -> Path:
    """Return the store, the model repository of commands that get no other."""
    return home_folder() / "model_repository"


def display_path(path: Path) -> str:
    """Return a path as a user would write it: `~` for the home folder."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # the path is elsewhere, or the user has no home folder
        return str(path)


def described(repository: Path) -> str:
    """Return the name of a model repository in messages; the store has its short path."""
    is_store = repository == default_repository()
    return f"the store ({display_path(repository)})" if is_store else str(repository)


def repository_flag(repository: Path) -> str:
    """Return the flag that a command in a remedy needs, after a space; empty for the store."""
    return "" if repository == default_repository() else f" --model-repository {shlex.quote(str(repository))}"
