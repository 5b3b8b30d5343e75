"""Model choice: which model a command means, in a repository or on a server; a missing one is pulled."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.cli.local_models import LocalModel, local_models
from genserve.errors import GenserveError, ModelNotFound, RepositoryError, closest, suggestion
from genserve.export import (
    DEFAULT_MODEL,
    known_encoder,
    known_model,
    packaged_file,
    pull,
    pull_encoder,
    pull_remedy,
    pulled_name,
)
from genserve.machine import total_memory_bytes
from genserve.store import default_repository, described, repository_flag

if TYPE_CHECKING:
    from rich.console import Console

    from genserve.export import KnownModel


def choose_model(
    name: str | None, *, repository: Path, models: Mapping[str, LocalModel] | None = None
) -> str:
    """Return the name of the model to load: `name`, or the only model, or the default model.

    `models` has the models of the repository by name; None: the repository is read.

    Raises:
        RepositoryError: the model does not exist, or has no weights.
    """
    models = models or _models_by_name(repository)
    if name is None:
        whole = [model.name for model in models.values() if model.base is None]
        name = whole[0] if len(whole) == 1 else DEFAULT_MODEL
    where, flag = described(repository), repository_flag(repository)
    pull = f"`genserve pull {DEFAULT_MODEL}{flag}`"
    if name not in models and (repository / name).exists():
        raise RepositoryError(
            f"{name!r} in {where} is no text model, or its config is broken", remedy=f"`genserve check{flag}`"
        )
    if name not in models:
        remedy = pull if name == DEFAULT_MODEL else _remedy(name, known=models)
        raise RepositoryError(f"there is no model {name!r} in {where}", remedy=remedy)
    if models[name].missing:
        export = f"`genserve export SOURCE --name {name}{flag}`"
        raise RepositoryError(
            f"model {name!r} in {where} has no weights yet: {', '.join(models[name].missing)}",
            remedy=pull if name == DEFAULT_MODEL else export,
        )
    return name


def bring_models(names: Iterable[str], *, roots: Sequence[Path]) -> list[str]:
    """Return the names of models in repositories, after pulling models that are missing and can be pulled.

    Args:
        names: the models to find; short names and ORG/NAME can be pulled, and * means all models.
        roots: the folders of the repository; pulled models go to the first folder.

    Raises:
        RepositoryError: a model is in no folder, and cannot be pulled.
    """
    found = []
    for name in names:
        local_name = pulled_name(name)
        if local_name is not None:
            root = next((root for root in roots if (root / local_name).exists()), roots[0])
            # A folder of this name that is no text model is served as it is.
            if not (root / local_name).exists() and known_encoder(name):
                _pull(name, repository=root)
            elif not (root / local_name).exists() or local_name in _models_by_name(root):
                bring_model(name, repository=root)
        elif name != "*" and not any((root / name).exists() for root in roots):
            folders = (path for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir())
            known = sorted(path.name for path in folders)
            raise RepositoryError(
                f"there is no model {name!r} in {', '.join(map(described, roots))}",
                remedy=_remedy(name, known=known),
            )
        found.append(local_name or name)
    return found


def bring_model(name: str | None, *, repository: Path | None) -> tuple[Path, str]:
    """Return the repository of a model to load, and the model's name in it; pull the model if it is missing.

    Args:
        name: a model of the repository, or a model that can be pulled: a short name, or ORG/NAME on the
            Hugging Face hub. None: the only model of the repository, or the default model.
        repository: the model repository; None: the store. Only a named model is pulled into another
            repository, which may be a user's own.

    Raises:
        RepositoryError: there is no such model, and it cannot be pulled.
        ExportError: the pull failed.
        MissingDependency: pulling a model from the hub needs packages that are not installed.
        GenserveError: the user does not want the download.
    """
    where = default_repository() if repository is None else repository
    if repository is None:
        remark_on_old_default()
    models = _models_by_name(where) if where.exists() else {}
    if name is None:
        if repository is not None or any(not model.missing for model in models.values()):
            return where, choose_model(None, repository=where, models=models)
        name = DEFAULT_MODEL
    if known_encoder(name):
        raise RepositoryError(
            f"{name} makes vectors of texts, and generates none", remedy="`genserve serve` serves it"
        )
    local_name = pulled_name(name)
    # A folder with this name that is no text model belongs to the user.
    if local_name is None or (local_name not in models and (where / local_name).exists()):
        return where, choose_model(name, repository=where, models=models)
    if local_name not in models or models[local_name].missing:
        _pull(name, repository=where)
    return where, local_name


def _remedy(name: str, *, known: Collection[str]) -> str:
    """Return the remedy for a model that is neither among the known ones nor can be pulled."""
    if known and closest(name, known=known):
        return suggestion(name, known=known)
    here = f"{suggestion(name, known=known)}; " if known else ""
    return here + pull_remedy(name)


def _models_by_name(repository: Path) -> dict[str, LocalModel]:
    return {model.name: model for model in local_models(repository)}


def _pull(name: str, *, repository: Path) -> None:
    from genserve.backends.libraries import require_export_packages
    from genserve.cli.console import ConsoleProgress, make_console, print_prose

    console = make_console(stderr=True)
    if packaged_file(name) is None:
        require_export_packages(f"pulling {name}")
    if known := known_model(name):
        print_prose(_about(known), console=console)
        if known.name != DEFAULT_MODEL and not _is_wanted(console):
            raise GenserveError(
                f"{name} was not downloaded", remedy="`genserve models --available` lists other models"
            )
    print_prose(f"pulling {name} into {described(repository)}, once", console=console)
    try:
        if encoder := known_encoder(name):
            pull_encoder(encoder, repository=repository, progress=ConsoleProgress())
        else:
            pull(name, repository=repository, progress=ConsoleProgress())
    except KeyboardInterrupt:
        console.print(f"stopped: `genserve pull {name}{repository_flag(repository)}` goes on with it")
        raise


def _about(model: KnownModel) -> str:
    """Return what a download takes, and what it gives."""
    from genserve.cli.console import sized

    total = total_memory_bytes()
    text = (
        f"{model.name}: {sized(model.download_bytes)} to download from {model.source} ({model.licence}), "
        f"then {sized(model.graph_bytes)} on disk and about {sized(model.memory_bytes)} in memory"
    )
    if total is not None and total < model.memory_bytes:
        text += f"; this machine has {sized(total)}"
    return text


def _is_wanted(console: Console) -> bool:
    """Ask whether to download, on a terminal; a program that runs without one has decided."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    from genserve.cli.chat.keyboard import released_keys

    with released_keys():
        console.print("download it? [Y/n] ", end="")
        try:
            return input().strip().lower() in ("", "y", "yes")
        except EOFError:
            console.print()
            return False


def remark_on_old_default() -> None:
    """Print a hint if the current folder has a repository that versions before the store would have used."""
    from genserve.cli.console import make_console

    old = Path("model_repository")
    try:
        names = [model.name for model in local_models(old) if not model.missing] if old.is_dir() else []
    except GenserveError:
        return
    if names:
        make_console(stderr=True).print(
            f"note: ./{old} ({', '.join(names)}) is not used unless --model-repository {old} names it"
        )


def choose_remote(name: str | None, known: Sequence[str]) -> str:
    """Return the name of a server's model: `name`, or the server's only model.

    Raises:
        ModelNotFound: the server has no such model, or not exactly one if `name` is None.
    """
    if name is None and len(known) == 1:
        return known[0]
    if not known:
        raise ModelNotFound("the server has no model that generates text", remedy="load one on the server")
    if name is None:
        raise ModelNotFound(
            f"the server has {len(known)} models, and the command names none",
            remedy=f"name one of: {', '.join(known)}",
        )
    if name not in known:
        raise ModelNotFound(f"the server has no model {name!r}", remedy=suggestion(name, known=known))
    return name
