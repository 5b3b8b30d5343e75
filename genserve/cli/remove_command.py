"""The command `genserve remove`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genserve.cli.completion_command import model_names
from genserve.cli.flags import ModelRepository
from genserve.errors import InvalidRequest, ModelNotFound, RepositoryError, suggestion
from genserve.store import default_repository, described, repository_flag

if TYPE_CHECKING:
    from genserve.repository.index import ModelEntry


def remove(
    model: Annotated[
        list[str], typer.Argument(help="Models to remove.", show_default=False, autocompletion=model_names)
    ],
    model_repository: ModelRepository = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete models and their stages from the repository, with what you have edited in them.

    A stage that another model uses stays. Downloads stay in the cache folder.
    """
    from genserve.cli.model_access import size_bytes
    from genserve.repository.index import scan

    repository = model_repository or default_repository()
    entries = scan([repository])
    folders = _folders(model, entries, repository=repository)
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest("nobody can be asked, and nothing was removed", remedy="add --yes")
        size_mb = sum(map(size_bytes, folders)) / 1e6
        names = ", ".join(folder.name for folder in folders)
        # Not typer's `confirm`, for which Ctrl-C is the end of the input.
        answer = input(f"delete {names} ({size_mb:.1f} MB) from {described(repository)}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            raise typer.Exit(1)
    for folder in folders:
        _delete(folder)
    print(f"removed {', '.join(model)} from {described(repository)}")


def _folders(names: Sequence[str], entries: Mapping[str, ModelEntry], *, repository: Path) -> list[Path]:
    """Return the folders to delete: ensembles before their steps, so that no incomplete model is listed.

    Raises:
        ModelNotFound: a name is not a model.
        RepositoryError: a model that stays needs one of them.
    """
    for name in names:
        if name not in entries:
            remedy = suggestion(name, known=entries)
            raise ModelNotFound(f"there is no model {name!r} in {described(repository)}", remedy=remedy)
    steps = {name: _steps(entry) for name, entry in entries.items()}
    removed = dict.fromkeys(names)
    for name in names:
        # Those that other models need are left.
        removed |= dict.fromkeys(
            step
            for step in steps[name]
            if step in entries and not any(step in steps[other] for other in entries.keys() - removed.keys())
        )
    for name in names:
        if users := [other for other in entries.keys() - removed.keys() if name in steps[other]]:
            raise RepositoryError(
                f"{name!r} is a stage of {', '.join(sorted(users))}",
                remedy=f"`genserve remove {users[0]}{repository_flag(repository)}`",
            )
    return [entries[name].path for name in removed]


def _steps(entry: ModelEntry) -> list[str]:
    return [step.model_name for step in entry.config.ensemble_steps] if entry.config else []


def _delete(folder: Path) -> None:
    try:
        if folder.is_symlink():     # what it points to is not the repository's
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        raise RepositoryError(
            f"{folder} cannot be deleted: {error.strerror}", remedy="change its permissions"
        ) from error
