"""Model files: copies and removes models of a repository, each with the stages that belong to it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from genserve.errors import InvalidRequest, ModelNotFound, RepositoryError, suggestion
from genserve.files import link_or_copy, staging_folder
from genserve.repository.index import ModelEntry, needed_names
from genserve.repository.text_stages import TextStages
from genserve.store import described, repository_flag

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# A comment, a bracket, a field with a name, or another text.
_CONFIG_PART = re.compile(
    r"""#[^\n]*|(?P<bracket>[{}\[\]<>])"""
    r"""|(?P<begin>\b(?P<field>(?:model_)?name)\s*:\s*["'])(?P<name>[^"'\n]*)(?P<end>["'])"""
    r"""|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
)


def require_new_name(name: str, *, entries: Mapping[str, ModelEntry]) -> None:
    """Raise InvalidRequest unless a new model can have this name."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:128]!r} cannot be the name of a model",
            remedy="use letters, digits, ., _ and -",
            field="model",
        )
    if name in entries:
        raise InvalidRequest(
            f"there is a model {name!r} already",
            remedy="delete it first, or take another name",
            field="model",
        )


def copy_text_model(name: str, stages: TextStages, entries: Mapping[str, ModelEntry], *, to: str) -> None:
    """Copy a text model with its three stages, next to it; large files are links to the same data.

    Args:
        name: the model.
        stages: its stages, by their roles.
        entries: all models of the repository.
        to: the name of the copy; its stages are `<to>_<role>`.

    Raises:
        InvalidRequest: there is a model of the name already, or none can have it.
        RepositoryError: a folder cannot be written.
    """
    names = {name: to} | {stage.name: f"{to}_{role}" for role, stage in stages.items()}
    for new in names.values():
        require_new_name(new, entries=entries)
    root = entries[name].path.parent
    try:
        with staging_folder(root, "copy") as staging:
            for old, new in names.items():
                shutil.copytree(entries[old].path, staging / new, copy_function=link_or_copy)
                for config in (staging / new).rglob("*.pbtxt"):
                    config.write_text(_renamed(config.read_text(encoding="utf-8"), names), encoding="utf-8")
            for new in reversed(names.values()):    # the ensemble last, so that it is never incomplete
                (staging / new).rename(root / new)
    except OSError as error:
        raise RepositoryError(
            f"{name!r} cannot be copied in {described(root)}: {_reason(error)}", remedy="check its disk"
        ) from error


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error):     # of a copied folder: source, target and reason of each failure
        return str(error.args[0][0][2])
    return error.strerror or str(error)


def _renamed(config: str, names: Mapping[str, str]) -> str:
    """Return a config with the new names of models in the fields that have one: a tensor keeps its name."""
    depth = 0

    def rename(match: re.Match[str]) -> str:
        nonlocal depth
        if match["bracket"]:
            depth += 1 if match["bracket"] in "{[<" else -1
        if match["field"] is None or (match["field"] == "name" and depth):
            return match[0]
        return f"{match['begin']}{names.get(match['name'], match['name'])}{match['end']}"

    return _CONFIG_PART.sub(rename, config)


def removed_folders(
    names: Sequence[str], entries: Mapping[str, ModelEntry], *, repository: Path
) -> list[Path]:
    """Return the folders to delete: ensembles before their steps, so that no incomplete model is listed.

    Stages that other models need stay.

    Raises:
        ModelNotFound: a name is not a model.
        InvalidRequest: a model that stays needs a model to delete.
    """
    for name in names:
        if name not in entries:
            remedy = suggestion(name, known=entries)
            raise ModelNotFound(f"there is no model {name!r} in {described(repository)}", remedy=remedy)
    steps = {name: _steps(entry) for name, entry in entries.items()}
    removed = dict.fromkeys(names)
    for name in names:
        removed |= dict.fromkeys(
            step
            for step in steps[name]
            if step in entries and not any(step in steps[other] for other in entries.keys() - removed.keys())
        )
    for name in names:
        staying = entries.keys() - removed.keys()
        if users := [other for other in staying if name in _needed(entries[other])]:
            relation = "base" if entries[users[0]].base_model else "stage"
            raise InvalidRequest(
                f"{name!r} is a {relation} of {', '.join(sorted(users))}",
                field="model",
                remedy=f"`genserve remove {users[0]}{repository_flag(repository)}`",
            )
    return [entries[name].path for name in removed]


def _steps(entry: ModelEntry) -> Sequence[str]:
    return () if entry.base_model else _needed(entry)   # its base is not removed with an adapter


def _needed(entry: ModelEntry) -> Sequence[str]:
    return needed_names(entry.config) if entry.config else ()


def delete_folder(folder: Path) -> None:
    """Delete the folder of a model, or the link to it; raises RepositoryError."""
    try:
        if folder.is_symlink():     # the target of the link does not belong to the repository
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        raise RepositoryError(
            f"{folder} cannot be deleted: {error.strerror}", remedy="change its permissions"
        ) from error
