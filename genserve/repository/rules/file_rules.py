"""File rules: the version folders of a model and the files in them, which are opened as a load opens them.

No code of a model runs. An ONNX graph is not optimised, and its external weights are not read; a TorchScript
file is opened as an archive, without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from genserve.backends.onnx_session import open_for_inspection
from genserve.backends.onnx_signature import OnnxSignature
from genserve.backends.registry import find_backend
from genserve.config.backends import BUILT_IN, DEFAULT_MAX_BATCH_SIZE
from genserve.config.diagnostics import Diagnostic, Severity
from genserve.config.model_config import SpecificVersions
from genserve.config.normalise import num_gpus
from genserve.config.schema import model_config
from genserve.errors import GenserveError, MissingDependency, RepositoryError, Status
from genserve.files import special_kind
from genserve.repository.index import links_out, served_versions
from genserve.repository.rules.facts import FileFacts
from genserve.textmodel.logits_config import CacheKind, cache_kind, context_length, logits_files
from genserve.textmodel.peft_adapter import PeftAdapter
from genserve.textmodel.runtimes.cached_logits import resolve_max_length
from genserve.textmodel.runtimes.onnx_logits import check_logits_graph, exported_context_length

# Names that look like a version.
_VERSION_LIKE = re.compile(r"(v|ver|version)?[-_. ]?(?P<number>\d+)([._]\d+)*", re.IGNORECASE)
_BRINGS_FILES = "add the file; `genserve pull` and `genserve export` make those of exported models"
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024   # by the Git LFS specification
_WEB_PAGE = re.compile(rb"\s*<(!doctype html|html|head)\b", re.IGNORECASE)    # a failed download
_NOT_IMPLEMENTED = "onnx runtime error 9:"      # an operator has no kernel on this device


def check_versions(facts: FileFacts) -> Iterator[Diagnostic]:
    """Reject a version policy that serves no version; warn of missing versions and misnamed folders."""
    config, versions = facts.config, facts.versions
    for name in sorted(path.name for path in facts.folder.iterdir() if path.is_dir()):
        like = _VERSION_LIKE.fullmatch(name)
        if like and name not in map(str, versions):
            yield Diagnostic(
                severity=Severity.WARNING,
                path=facts.folder / name,
                message=f"the folder {name!r} is not a version, and is ignored",
                remedy=f"rename it to {like['number'].lstrip('0') or '1'!r}: a number without leading zeros",
            )
    if isinstance(config.version_policy, SpecificVersions):
        for version in sorted(set(config.version_policy.versions) - set(versions)):
            yield _policy_diagnostic(
                facts,
                Severity.WARNING,
                f"version {version} is specified for model '{facts.name}', but the version directory is not "
                "present",
                remedy=f"add the folder {str(version)!r}, or leave the version out",
            )
    try:
        served_versions(config, versions)
    except RepositoryError as error:
        yield _policy_diagnostic(facts, Severity.ERROR, error.message, remedy=error.remedy)


def _policy_diagnostic(facts: FileFacts, severity: Severity, message: str, *, remedy: str) -> Diagnostic:
    """Make a diagnostic of the version policy, or of the folder if it has no version at all."""
    if not facts.versions:
        return Diagnostic(severity=severity, path=facts.folder, message=message, remedy=remedy)
    return facts.parsed.diagnostic(severity, "version_policy", message, remedy=remedy)


def check_placeholders(facts: FileFacts) -> Iterator[Diagnostic]:
    """Reject Git LFS pointers, special and unreadable files, and a model file that is empty."""
    config = facts.config
    for folder in _opened_folders(facts):
        yield from _placeholders(folder, backend=config.backend, filename=config.default_model_filename)


def _opened_folders(facts: FileFacts) -> Iterator[Path]:
    """Yield the folders of the served versions whose files a built-in backend opens."""
    if facts.config.backend in BUILT_IN:
        yield from facts.served_folders


def _placeholders(folder: Path, *, backend: str, filename: str) -> Iterator[Diagnostic]:
    model = folder / filename
    files = sorted({*folder.glob("*"), *(model.rglob("*") if model.is_dir() else ())})
    for file in files:
        # Which other files a model.py reads is unknown.
        is_needed = backend != "python" or file == model
        kind = special_kind(file)
        if kind:    # opening it could wait for ever, or read for ever
            yield _diagnostic(
                file,
                f"{file.name} is {kind}, not a file",
                remedy="put the file itself there",
                severity=Severity.ERROR if is_needed else Severity.WARNING,
            )
            continue
        try:
            if not file.is_file():
                continue
            with file.open("rb") as opened:
                content = opened.read(_MAX_POINTER_BYTES)
        except OSError as error:
            yield _diagnostic(
                file,
                f"{file.name} cannot be read: {error.strerror}",
                remedy="make it readable for this user, or remove it from the version's folder",
                severity=Severity.ERROR if file == model else Severity.WARNING,
            )
            continue
        if content.startswith(_POINTER):
            yield _diagnostic(
                file,
                f"{file.name} is a Git LFS pointer, not the file itself",
                remedy="run `git lfs pull` in the repository",
                severity=Severity.ERROR if is_needed else Severity.WARNING,
            )
        elif file == model and backend != "python":
            problem = "" if content else "is empty"
            if _WEB_PAGE.match(content):
                problem = "is a web page, not the file itself"
            if problem:
                yield _diagnostic(file, f"{file.name} {problem}", remedy="copy or export it again")


def check_missing_files(facts: FileFacts) -> Iterator[Diagnostic]:
    """Reject a version without its model file, or without another file that its backend needs."""
    config = facts.config
    for folder in _opened_folders(facts):
        for name in (config.default_model_filename, *BUILT_IN[config.backend].further_files):
            if not (folder / name).exists():
                yield Diagnostic(
                    severity=Severity.ERROR,
                    path=folder,
                    message=f"{name} is missing",
                    remedy=_BRINGS_FILES,
                    status=Status.UNAVAILABLE,
                )


def check_contents(facts: FileFacts) -> Iterator[Diagnostic]:
    """Reject the files that a load would reject; all files exist, and none is a placeholder."""
    for folder in _opened_folders(facts):
        yield from _contents(facts, folder)


def _contents(facts: FileFacts, folder: Path) -> Iterator[Diagnostic]:
    config = facts.config
    file = folder / config.default_model_filename
    try:
        if config.backend == "onnxruntime":
            yield from _onnx_diagnostics(facts, folder)
        elif config.backend == "adapter":
            PeftAdapter(folder)
        elif check_files := getattr(find_backend(config.backend), "check_files", None):
            check_files(folder, config)
    except MissingDependency as error:
        message = f"it was not validated: {error.message}"
        yield _diagnostic(file, message, remedy=error.remedy, severity=Severity.WARNING)
    except GenserveError as error:
        yield _diagnostic(file if file.exists() else folder, error.message, remedy=error.remedy)
    except Exception as error:  # libraries raise any error for a damaged file
        message = f"{file.name} cannot be read: {error}"
        yield _diagnostic(file, message, remedy="copy or export it again")


def _onnx_diagnostics(facts: FileFacts, folder: Path) -> Iterator[Diagnostic]:
    """Yield the contradictions between the config and the graph, or the graphs of a pipeline.

    Raises:
        RepositoryError: the graph cannot be opened.
    """
    config = facts.config
    file = folder / config.default_model_filename
    try:
        session = open_for_inspection(file)
    except RepositoryError as error:
        if num_gpus() and error.message.startswith(_NOT_IMPLEMENTED):
            return      # the CPU cannot run it, but a GPU may
        raise
    try:
        match cache_kind(config):
            case CacheKind.IN_PLACE:
                files = logits_files(config, folder)
                for stage, path in enumerate(files, 1):
                    opened = session if path == file else open_for_inspection(path)
                    check_logits_graph(opened, path, stage=stage, num_stages=len(files))
                metadata = session.get_modelmeta().custom_metadata_map
                exported_length = exported_context_length(metadata, file)
                resolve_max_length(context_length(config), context_length=exported_length, path=file)
            case CacheKind.NONE:
                message = type(facts.parsed.message)()
                message.CopyFrom(facts.parsed.message)
                signature = OnnxSignature(session)
                signature.complete(message, default_max_batch_size=DEFAULT_MAX_BATCH_SIZE)
                signature.check(replace(model_config(message, name=config.name), backend=config.backend))
    except RepositoryError as error:
        yield facts.error(error.field or "", error.message, remedy=error.remedy)


def _diagnostic(path: Path, message: str, *, remedy: str, severity: Severity = Severity.ERROR) -> Diagnostic:
    return Diagnostic(severity=severity, path=path, message=message, remedy=remedy)


def link_diagnostics(folder: Path, real_roots: Iterable[Path]) -> Iterator[Diagnostic]:
    """Yield one warning if links in a model's folder lead out of the repositories, see `links_out`."""
    links = links_out(folder, real_roots)
    if links:
        more = f", and {len(links) - 1} more do" if links[1:] else ""
        yield Diagnostic(
            severity=Severity.WARNING,
            path=links[0],
            message=f"the link leads out of the model repository{more}",
            remedy="the server follows it, unless started with --strict-repository-paths",
        )
