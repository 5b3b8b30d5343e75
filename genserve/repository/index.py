"""Index: the models of a repository, read from its folders; nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from genserve.config.backends import version_folders
from genserve.config.diagnostics import Diagnostic, Severity
from genserve.config.model_config import LatestVersions, ModelConfig, SpecificVersions
from genserve.config.parse import ParsedConfig, read_config, unreadable_config
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.store import default_repository, described, repository_flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model folder."""

    name: str
    path: Path
    parsed: ParsedConfig  # its config.pbtxt
    wanted_version: int = -1  # the version that a step of an ensemble names; -1: the latest
    is_ambiguous: bool = False  # several repositories have a model of this name

    @property
    def config(self) -> ModelConfig | None:
        """The values of its config.pbtxt; None: it cannot be read."""
        return self.parsed.config

    @property
    def is_ensemble(self) -> bool:
        """Whether the model is an ensemble of other models."""
        return self.config is not None and self.config.platform == "ensemble"

    @property
    def base_model(self) -> str | None:
        """The text model whose adapter this is; None: it is no adapter."""
        return None if self.config is None else self.config.base_model

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that have a folder, ascending; see `version_folders`."""
        return tuple(version_folders(self.path))

    @property
    def highest_version(self) -> Path:
        """The folder of the highest version; of version 1, which does not exist, if there is none."""
        return self.path / str(max(self.versions, default=1))

    def latest_version(self) -> Path:
        """Return the folder of `wanted_version`, or of the highest version that the policy serves.

        Raises:
            RepositoryError: the version does not exist, or is not served.
        """
        versions = self.versions
        if not versions:
            raise RepositoryError(
                f"model {self.name!r} has no version folder in {self.path}",
                remedy="its weights are missing: run `genserve pull` or `genserve export`",
            )
        served = served_versions(self.config, versions) if self.config else versions
        if self.wanted_version not in (-1, *served):
            raise RepositoryError(
                f"version {self.wanted_version} of model {self.name!r} is not served",
                remedy=f"served versions: {', '.join(map(str, served))}",
            )
        return self.path / str(served[-1] if self.wanted_version == -1 else self.wanted_version)


def scan(
    roots: Iterable[Path],
    *,
    config_name: str = "",
    strict_paths: bool = False,
) -> dict[str, ModelEntry]:
    """Read the folders of one or more repositories, without hidden folders and folders of tools.

    Args:
        roots: the repositories.
        config_name: `configs/<config_name>.pbtxt` replaces config.pbtxt where the file exists.
        strict_paths: a model with a link out of the roots is an error, and is not read.

    Returns:
        The entries by name, in alphabetical order. A model whose config.pbtxt cannot be read, and one in two
        roots, is listed with a diagnostic.

    Raises:
        RepositoryError: a root is not a folder, or is a model; or `config_name` is a path.
    """
    if "/" in config_name or "\0" in config_name:
        raise RepositoryError(
            f"{config_name!r} is not the name of a config",
            remedy="write NAME for the files configs/NAME.pbtxt in the folders of models",
        )
    entries: dict[str, ModelEntry] = {}
    real_roots = {root.resolve(): root for root in roots}
    for root in real_roots.values():
        for path in _model_folders(root):
            name = _printable(path.name)
            if name in entries:
                entries[name] = _ambiguous(entries[name], other=path)
                continue
            outside = links_out(path, real_roots) if strict_paths else []
            if name != path.name:
                parsed = _misnamed(path)
            elif outside:
                parsed = _leads_out(path, outside[0])
            else:
                parsed = _read(path, config_name=config_name)
            entries[name] = ModelEntry(name=name, path=path, parsed=parsed)
    return dict(sorted(entries.items()))


def _printable(name: str) -> str:
    """Return the name of a folder; escaped, if it is not UTF-8 or would break a line of the log."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _read(path: Path, *, config_name: str) -> ParsedConfig:
    try:
        return read_config(path, config_name=config_name)
    except OSError as error:
        return unreadable_folder(path, error)


def unreadable_folder(path: Path, error: OSError) -> ParsedConfig:
    """Return the config of a model whose folder was removed meanwhile, or may not be read."""
    return unreadable_config(
        path / "config.pbtxt",
        at=path,
        message=f"the folder cannot be read: {error.strerror}",
        remedy="make it readable for this user, or remove it from the repository",
    )


def _misnamed(folder: Path) -> ParsedConfig:
    return unreadable_config(
        folder / "config.pbtxt",
        at=folder.parent,
        message=f"the folder {_printable(folder.name)!r} has a name that is not printable text in UTF-8",
        remedy="rename it",
    )


def served_versions(config: ModelConfig, versions: Iterable[int]) -> tuple[int, ...]:
    """Return the versions that the version policy of a model serves, ascending.

    Raises:
        RepositoryError: the policy serves no version.
    """
    there = sorted(versions)
    match config.version_policy:
        case LatestVersions(count=count):
            served = there[max(0, len(there) - count) :]
        case SpecificVersions(versions=asked):
            served = [version for version in there if version in asked]
        case _:
            served = there
    if not served:
        raise RepositoryError(
            f"at least one version must be available under the version policy of model '{config.name}'",
            remedy=_versions_remedy(there),
        )
    return tuple(served)


def _versions_remedy(there: list[int]) -> str:
    if not there:
        return "add a folder '1' for the first version; `genserve pull` and `genserve export` make it"
    available = ", ".join(map(str, there))
    return f"available versions: {available}; `version_policy {{ all {{ }} }}` serves them all"


def links_out(folder: Path, roots: Iterable[Path]) -> list[Path]:
    """Return the links in a model's folder, or the folder itself, that lead out of the repositories.

    Links to somewhere inside are followed.

    Args:
        folder: the model's folder.
        roots: the folders of the repositories, without links in their paths.
    """
    return list(_links_out(folder, tuple(map(str, roots)), seen=set()))


def _links_out(path: Path, roots: Sequence[str], *, seen: set[str]) -> Iterator[Path]:
    real = os.path.realpath(path)
    if not any(Path(real).is_relative_to(root) for root in roots):
        yield path
    elif real not in seen and path.is_dir():
        seen.add(real)
        try:
            parts = sorted(path.iterdir())
        except OSError:  # not readable, for backends neither
            return
        for part in parts:
            if part.is_symlink() or part.is_dir():
                yield from _links_out(part, roots, seen=seen)


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the name, modification time in ns and size of each file in a model's folder.

    Folders have a name only. Hidden files and the bytecode caches of Python are left out.
    """
    return tuple(sorted(_traces(str(path), prefix="")))


def _traces(folder: str, *, prefix: str) -> Iterator[tuple[str, int, int]]:
    try:
        parts = list(os.scandir(folder))
    except OSError:  # removed since it was listed, or not readable
        return
    for part in parts:
        if part.name.startswith(".") or part.name == "__pycache__" or part.name.endswith(".pyc"):
            continue
        name = prefix + part.name
        yield _trace(part, name=name)
        if part.is_dir(follow_symlinks=False):
            yield from _traces(part.path, prefix=f"{name}/")


def _trace(part: os.DirEntry[str], *, name: str) -> tuple[str, int, int]:
    try:
        stat = Path(part.path).stat()
    except OSError:  # removed since it was listed, or a broken link
        return name, 0, -1
    if part.is_dir():  # the content of a linked folder is not listed; its inode shows where the link leads
        return name, stat.st_ino if part.is_symlink() else 0, 0
    return name, stat.st_mtime_ns, stat.st_size


def _model_folders(root: Path) -> list[Path]:
    if root.exists() and not root.is_dir():
        raise RepositoryError(
            f"{described(root)} is a file, not a repository of models",
            remedy="name the folder that contains the folders of the models",
        )
    if not root.is_dir():
        missing = "model in" if root == default_repository() else "model repository at"
        raise RepositoryError(
            f"there is no {missing} {described(root)}",
            remedy="name one with --model-repository, or make one: "
            f"`genserve pull smollm2{repository_flag(root)}`",
        )
    folders = [path for path in root.iterdir() if path.is_dir() and not _is_other(path.name)]
    if (root / "config.pbtxt").is_file() and len(folders) == len(version_folders(root)):
        raise RepositoryError(
            f"{root} is a model, not a repository of models",
            remedy=f"give the folder that contains it: {root.resolve().parent}",
        )
    return folders


def _is_other(name: str) -> bool:
    """Whether a folder of this name belongs to a tool or a file system."""
    return name.startswith(".") or name in ("__pycache__", "lost+found")


def _leads_out(folder: Path, link: Path) -> ParsedConfig:
    return unreadable_config(
        folder / "config.pbtxt",
        at=link,
        message=f"the link leads out of the model repository, and model '{folder.name}' is rejected",
        remedy="replace the link by the file, or serve without --strict-repository-paths",
    )


def _ambiguous(entry: ModelEntry, *, other: Path) -> ModelEntry:
    diagnostic = Diagnostic(
        severity=Severity.ERROR,
        path=other,
        message=f"failed to poll model '{entry.name}': not unique across all model repositories",
        remedy=f"rename one of {entry.path} and {other}, or serve only one of the repositories",
    )
    parsed = replace(entry.parsed, diagnostics=(diagnostic, *entry.parsed.diagnostics))
    return replace(entry, parsed=parsed, is_ambiguous=True)


def step_models(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> list[ModelEntry]:
    """Return the models of an ensemble's steps, or an adapter's base, as far as they exist."""
    names = needed_names(entry.config) if entry.config else ()
    return [entries[name] for name in names if name in entries]


def needed_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the models of an ensemble's steps, or of an adapter's base."""
    if config.base_model is not None:
        return (config.base_model,)
    return tuple(step.model_name for step in config.ensemble_steps)


def all_step_models(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> list[ModelEntry]:
    """Return the models of the steps of an ensemble and of the ensembles among them; see `step_models`."""
    found: dict[str, ModelEntry] = {}
    waiting = step_models(entry, entries)
    while waiting:
        model = waiting.pop()
        if model.name not in found:
            found[model.name] = model
            waiting += step_models(model, entries)
    return list(found.values())


def is_decoupled(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> bool:
    """Whether a model is decoupled; an ensemble is if one of its steps is."""
    return any(
        model.config is not None and not model.is_ensemble and model.config.decoupled
        for model in (entry, *all_step_models(entry, entries))
    )


def not_polled(name: str, *, remedy: str) -> InferenceError:
    """Return Triton's error for a model without a folder, or with an invalid config."""
    text = f"failed to load '{name}', failed to poll from model repository"
    return InferenceError(text, status=Status.INTERNAL, remedy=remedy)
