"""Model file rules: errors in the files of a model, which are opened as a load opens them.

No code of a model runs. An ONNX graph is not optimised, and its external weights are not read; a TorchScript
file is opened as an archive, without torch.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from genserve.backends.onnx_session import open_for_inspection
from genserve.backends.onnx_signature import OnnxSignature
from genserve.config.backends import DEFAULT_MAX_BATCH_SIZE
from genserve.config.diagnostics import Diagnostic, Severity
from genserve.config.model_config import ModelConfig
from genserve.config.normalise import num_gpus
from genserve.config.schema import model_config
from genserve.errors import GenserveError, MissingDependency, RepositoryError, Status
from genserve.files import special_kind
from genserve.repository.index import ModelEntry
from genserve.text.tokenizer import Tokenizer
from genserve.text.tokenizer_files import recommended_sampling_params
from genserve.textmodel.logits_config import CacheKind, cache_kind, context_length, logits_files
from genserve.textmodel.runtimes.cached_logits import resolve_max_length
from genserve.textmodel.runtimes.onnx_logits import check_logits_graph, exported_context_length

_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024   # by the Git LFS specification
_WEB_PAGE = re.compile(rb"\s*<(!doctype html|html|head)\b", re.IGNORECASE)    # a failed download
_NOT_IMPLEMENTED = "onnx runtime error 9:"      # an operator has no kernel on this device
_TORCHSCRIPT_RECORDS = ("data.pkl", "constants.pkl", "version")
_WEIGHTS = "data.pkl"         # also written by torch.save of a state_dict


def placeholder_diagnostics(folder: Path, *, backend: str, filename: str) -> Iterator[Diagnostic]:
    """Yield the Git LFS pointers, the special and the unreadable files of a version, and an empty model file.

    Args:
        folder: of the version.
        backend: of the model.
        filename: of the model: a file or a folder.
    """
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


def content_diagnostics(entry: ModelEntry, config: ModelConfig, folder: Path) -> Iterator[Diagnostic]:
    """Yield the errors that a load would report for the files of a version.

    Args:
        entry: the model.
        config: its config, without errors.
        folder: of the version; all files exist, and none is a placeholder.
    """
    file = folder / config.default_model_filename
    try:
        if config.backend == "onnxruntime":
            yield from _onnx_diagnostics(entry, config, folder)
        elif config.backend == "pytorch":
            _look_at_torchscript(config, file)
        elif config.backend == "tensorflow":
            _look_at_saved_model(config, file)
        elif config.backend == "tokenizer":
            Tokenizer.from_folder(folder)
            recommended_sampling_params(folder)
    except MissingDependency as error:
        message = f"it was not validated: {error.message}"
        yield _diagnostic(file, message, remedy=error.remedy, severity=Severity.WARNING)
    except GenserveError as error:
        yield _diagnostic(file if file.exists() else folder, error.message, remedy=error.remedy)
    except Exception as error:  # libraries raise any error for a damaged file
        message = f"{file.name} cannot be read: {error}"
        yield _diagnostic(file, message, remedy="copy or export it again")


def _onnx_diagnostics(entry: ModelEntry, config: ModelConfig, folder: Path) -> Iterator[Diagnostic]:
    """Yield the contradictions between the config and the graph, or those of a pipeline's stages.

    Raises:
        RepositoryError: the graph cannot be opened.
    """
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
                message = type(entry.parsed.message)()
                message.CopyFrom(entry.parsed.message)
                signature = OnnxSignature(session)
                signature.complete(message, default_max_batch_size=DEFAULT_MAX_BATCH_SIZE)
                signature.check(replace(model_config(message, name=config.name), backend=config.backend))
    except RepositoryError as error:
        yield _config_diagnostic(entry, error)


def _look_at_torchscript(config: ModelConfig, file: Path) -> None:
    remedy = f"save {file.name} with torch.jit.save of a scripted or traced module"
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except Exception as error:  # BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error, ...
        message = f"{file.name} is not a TorchScript archive, or is incomplete: {error}"
        raise _unloadable(config, message, remedy) from None
    missing = [name for name in _TORCHSCRIPT_RECORDS if name not in names]
    if not any(name.startswith("code/") for name in names):
        missing.append("code")
    if missing:
        problem = "holds weights without code" if _WEIGHTS in names else f"has no {', '.join(missing)}"
        raise _unloadable(config, f"{file.name} is not a TorchScript archive: it {problem}", remedy)


def _look_at_saved_model(config: ModelConfig, file: Path) -> None:
    if file.is_dir() and not any((file / f"saved_model.{end}").is_file() for end in ("pb", "pbtxt")):
        remedy = "copy the whole folder that `tf.saved_model.save` wrote"
        raise RepositoryError(
            f"unable to load model '{config.name}': there is no saved_model.pb in {file.name}", remedy=remedy
        )


def _unloadable(config: ModelConfig, message: str, remedy: str) -> RepositoryError:
    return RepositoryError(
        f"failed to load model '{config.name}': {message}", status=Status.INTERNAL, remedy=remedy
    )


def _config_diagnostic(entry: ModelEntry, error: RepositoryError) -> Diagnostic:
    """Make a diagnostic at the field that an error names, or at the beginning of the config."""
    return entry.parsed.diagnostic(
        Severity.ERROR, error.field or "", error.message, remedy=error.remedy, at_load=True
    )


def _diagnostic(path: Path, message: str, *, remedy: str, severity: Severity = Severity.ERROR) -> Diagnostic:
    return Diagnostic(severity=severity, path=path, message=message, remedy=remedy, at_load=True)
