"""Check: all that is wrong with a model of a repository: with its config, its files, its steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from genserve.config.fault import Fault, Severity
from genserve.config.model_config import LatestVersions, ModelConfig, SpecificVersions
from genserve.config.rules import BACKENDS
from genserve.repository.index import ModelEntry, scan
from genserve.repository.wiring import wiring_faults

__all__ = ["model_faults", "repository_faults"]

# What is meant as the folder of a version, rightly named or not.
_VERSION_LIKE = re.compile(r"(v|ver|version)?[-_. ]?(?P<number>\d+)([._]\d+)*", re.IGNORECASE)
_FILES = {
    "onnxruntime": ("model.onnx",),
    "python": ("model.py",),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
}
_BRINGS_FILES = "`genserve pull` or `genserve export` brings it"


def repository_faults(roots: Iterable[Path]) -> dict[str, tuple[Fault, ...]]:
    """Return the faults of each model of one or more repositories, by name; an empty tuple: none.

    Raises:
        RepositoryError: a root is not a folder.
    """
    entries = scan(roots)
    return {name: model_faults(entry, entries) for name, entry in entries.items()}


def model_faults(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> tuple[Fault, ...]:
    """Return all faults of one model, those of its config first.

    Args:
        entry: the model.
        entries: all models of the repository, by name.
    """
    faults = list(entry.parsed.faults)
    if entry.is_ensemble:
        faults += wiring_faults(entry, entries)
    elif entry.config is not None and entry.config.backend in BACKENDS:
        faults += _version_faults(entry)
        if entry.versions:
            faults += _policy_faults(entry, entry.config)
            faults += _file_faults(entry.latest_version(), entry.config)
    return tuple(faults)


def _version_faults(entry: ModelEntry) -> Iterator[Fault]:
    versions = {str(version) for version in entry.versions}
    for name in sorted(path.name for path in entry.path.iterdir() if path.is_dir()):
        like = _VERSION_LIKE.fullmatch(name)
        if like and name not in versions:
            yield Fault(
                severity=Severity.WARNING,
                path=entry.path / name,
                message=f"the folder {name!r} is not a version, and is passed over",
                remedy=f"rename it to {like['number'].lstrip('0') or '1'!r}: digits that do not begin with 0",
            )
    if not versions:
        yield Fault(
            severity=Severity.ERROR,
            path=entry.path,
            message="there is no version folder, such as '1'",
            remedy=_BRINGS_FILES,
        )


def _policy_faults(entry: ModelEntry, config: ModelConfig) -> Iterator[Fault]:
    *others, latest = entry.versions
    place = entry.parsed.places.of("version_policy")
    path = entry.path / "config.pbtxt"
    match config.version_policy:
        case LatestVersions(count=count):
            asked = set(entry.versions[-count:])
        case SpecificVersions(versions=versions):
            asked = set(versions)
        case _:
            asked = {latest, *others}
    if latest not in asked:
        yield Fault(
            severity=Severity.ERROR,
            path=path,
            place=place,
            message=f"version_policy is not honoured: it leaves out version {latest}, the highest, "
            "and that one would be served",
            remedy=f"leave `version_policy` out, and move the folder {str(latest)!r} away",
        )
    elif len(asked) > 1:
        yield Fault(
            severity=Severity.WARNING,
            path=path,
            place=place,
            message=f"version_policy is not honoured: version {latest}, the highest, is served alone",
            remedy="leave it out",
        )


def _file_faults(folder: Path, config: ModelConfig) -> Iterator[Fault]:
    names = _FILES[config.backend]
    if config.backend == "onnxruntime" and config.default_model_filename:
        names = (config.default_model_filename,)
    for name in names:
        if not (folder / name).is_file():
            yield Fault(
                severity=Severity.ERROR, path=folder, message=f"{name} is missing", remedy=_BRINGS_FILES
            )
