"""The command `genserve remove`."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass

from genserve.cli.completion_command import model_names
from genserve.cli.flags import RepositoryFlags
from genserve.errors import InvalidRequest
from genserve.settings import Flag, flag
from genserve.store import default_repository, described


@dataclass(frozen=True, kw_only=True)
class RemoveFlags(RepositoryFlags):
    """The flags of `genserve remove`."""

    model: list[str] = flag(MISSING, Flag(help="Models to remove.", is_argument=True, complete=model_names))
    yes: bool = flag(False, Flag(help="Do not ask.", names=("--yes", "-y")))


def remove(flags: RemoveFlags) -> None:
    """Delete models and their stages from the repository, with what you have edited in them.

    A stage that another model uses stays. Downloads stay in the cache folder.
    """
    from genserve.cli.local_models import size_bytes
    from genserve.repository.index import scan
    from genserve.repository.model_files import delete_folder, removed_folders

    repository = flags.model_repository or default_repository()
    entries = scan([repository])
    folders = removed_folders(flags.model, entries, repository=repository)
    if not flags.yes:
        if not sys.stdin.isatty():
            raise InvalidRequest("nobody can be asked, and nothing was removed", remedy="add --yes")
        size_mb = sum(map(size_bytes, folders)) / 1e6
        names = ", ".join(folder.name for folder in folders)
        answer = input(f"delete {names} ({size_mb:.1f} MB) from {described(repository)}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            raise SystemExit(1)
    for folder in folders:
        delete_folder(folder)
    print(f"removed {', '.join(flags.model)} from {described(repository)}")
