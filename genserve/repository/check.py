"""Check: all that is wrong with a model of a repository: with its config, its files, its steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from genserve.config.fault import Fault, Severity, first_error
from genserve.config.model_config import ModelConfig, SpecificVersions
from genserve.errors import RepositoryError, Status
from genserve.repository.draft_rules import draft_faults
from genserve.repository.index import ModelEntry, links_out, scan, served_versions
from genserve.repository.model_file_rules import content_faults, placeholder_faults
from genserve.repository.plugin_rules import decodes, plugin_faults
from genserve.repository.size_rules import size_faults
from genserve.repository.source_rules import source_faults
from genserve.repository.stage_rules import role_of, stage_faults
from genserve.repository.wiring import wiring_faults

__all__ = ["accept", "model_faults", "repository_faults"]

logger = logging.getLogger(__name__)

# What is meant as the folder of a version, rightly named or not.
_VERSION_LIKE = re.compile(r"(v|ver|version)?[-_. ]?(?P<number>\d+)([._]\d+)*", re.IGNORECASE)
# The backends whose models are files, and those that need a second one.
_WITH_FILES = ("onnxruntime", "python", "pytorch", "tensorflow", "tokenizer")
_MORE_FILES = {"tokenizer": ("tokenizer_config.json",)}
_BRINGS_FILES = "put it there; that of an exported model `genserve pull` or `genserve export` brings"


def repository_faults(
    roots: Iterable[Path], *, config_name: str = "", backend_folders: Iterable[Path] = ()
) -> dict[str, tuple[Fault, ...]]:
    """Return the faults of each model of one or more repositories, by name; an empty tuple: none.

    Args:
        roots: see `scan`, as for the others.
        config_name: of the configs to take where a model has more than one.
        backend_folders: with backends that are written in Python.

    Raises:
        RepositoryError: a root is not a folder.
    """
    roots = list(roots)
    entries = scan(roots, config_name=config_name, backend_folders=backend_folders)
    real_roots = [root.resolve() for root in roots]
    found: dict[str, tuple[Fault, ...]] = {}
    for name, entry in entries.items():
        faults = model_faults(entry, entries)
        # A file that is missing or a config that is wrong would be told of twice.
        opened = () if first_error(faults) else _content_faults(entry)
        found[name] = (*faults, *_source_faults(entry), *opened, *_link_faults(entry, real_roots))
    return found


def accept(faults: Iterable[Fault]) -> None:
    """Raise the first error among the faults of what is to be loaded, or else log its warnings.

    Raises:
        RepositoryError: the first error.
    """
    known = list(faults)
    error = first_error(known)
    if error is not None:
        raise error
    for fault in known:
        logger.warning("%s: %s (%s)", fault.where, fault.message, fault.remedy)


def model_faults(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> tuple[Fault, ...]:
    """Return all faults of one model, those of its config first.

    Args:
        entry: the model.
        entries: all models of the repository, by name.
    """
    faults = list(entry.parsed.faults)
    if entry.config is None:
        return tuple(faults)
    faults += _version_faults(entry, entry.config)
    if entry.is_ensemble:
        faults += wiring_faults(entry, entries)
    else:
        faults += _file_faults(entry, entry.config)
        faults += draft_faults(entry, entry.config, entries)
    role = role_of(entry, entry.config, entries)
    faults += stage_faults(entry, entry.config, role)
    faults += size_faults(entry, entry.config, role)
    return tuple(faults)


def _version_faults(entry: ModelEntry, config: ModelConfig) -> Iterator[Fault]:
    versions = entry.versions
    for name in sorted(path.name for path in entry.path.iterdir() if path.is_dir()):
        like = _VERSION_LIKE.fullmatch(name)
        if like and name not in map(str, versions):
            yield Fault(
                severity=Severity.WARNING,
                path=entry.path / name,
                message=f"the folder {name!r} is not a version, and is passed over",
                remedy=f"rename it to {like['number'].lstrip('0') or '1'!r}: digits that do not begin with 0",
            )
    if isinstance(config.version_policy, SpecificVersions):
        for version in sorted(set(config.version_policy.versions) - set(versions)):
            yield _policy_fault(
                entry,
                Severity.WARNING,
                f"version {version} is specified for model '{entry.name}', but the version directory is not "
                "present",
                remedy=f"add the folder {str(version)!r}, or leave the version out",
            )
    try:
        served_versions(config, versions)
    except RepositoryError as error:
        yield _policy_fault(entry, Severity.ERROR, error.message, remedy=error.remedy)


def _policy_fault(entry: ModelEntry, severity: Severity, message: str, *, remedy: str) -> Fault:
    """Make a fault of the version policy; one of the folder where there is no version at all."""
    if not entry.versions:
        return Fault(severity=severity, path=entry.path, message=message, remedy=remedy)
    return entry.parsed.fault(severity, "version_policy", message, remedy=remedy)


def _served(entry: ModelEntry, config: ModelConfig) -> Sequence[int]:
    """Return the versions whose files are looked at; none where the policy has a fault, which was told."""
    try:
        return served_versions(config, entry.versions)
    except RepositoryError:
        return ()


def _content_faults(entry: ModelEntry) -> Iterator[Fault]:
    """Yield what is wrong with the content of the files that a load opens."""
    if entry.config is None or entry.config.backend not in _WITH_FILES:
        return
    for version in _served(entry, entry.config):
        yield from content_faults(entry, entry.config, entry.path / str(version))


def _source_faults(entry: ModelEntry) -> Iterator[Fault]:
    """Yield what a load would find in each model.py; of a decoder stage's, `_file_faults` does."""
    if entry.config is None or entry.config.backend != "python":
        return
    for version in _served(entry, entry.config):
        file = entry.path / str(version) / entry.config.default_model_filename
        if file.is_file() and file.suffix == ".py" and not decodes(file):
            yield from source_faults(file)


def _link_faults(entry: ModelEntry, real_roots: Iterable[Path]) -> Iterator[Fault]:
    """Yield a warning where the model's folder leads out of the repository; one, as links come in numbers."""
    links = links_out(entry.path, real_roots)
    if links:
        more = f", and so do {len(links) - 1} more" if links[1:] else ""
        yield Fault(
            severity=Severity.WARNING,
            path=links[0],
            message=f"the link leads out of the model repository{more}",
            remedy="it is followed, unless the server is started with --strict-repository-paths",
        )


def _file_faults(entry: ModelEntry, config: ModelConfig) -> Iterator[Fault]:
    if config.backend not in _WITH_FILES:
        return
    for version in _served(entry, config):
        folder = entry.path / str(version)
        file = folder / config.default_model_filename
        yield from placeholder_faults(
            folder, backend=config.backend, filename=config.default_model_filename
        )
        if config.backend == "python" and file.is_file() and decodes(file):
            yield from plugin_faults(file)
        for name in (config.default_model_filename, *_MORE_FILES.get(config.backend, ())):
            if not (folder / name).exists():
                yield Fault(
                    severity=Severity.ERROR,
                    path=folder,
                    message=f"{name} is missing",
                    remedy=_BRINGS_FILES,
                    status=Status.UNAVAILABLE,
                    at_load=True,
                )
