"""Load request: a request to load a model, which may bring a config or files in place of its folder's."""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import gettempdir

from genserve.config.backends import BUILT_IN, deduce_backend
from genserve.config.config_json import read_config_json
from genserve.config.parse import MAX_NAME_BYTES, config_of
from genserve.config.schema import new_model_config
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.files import staging_folder
from genserve.repository.index import ModelEntry, not_polled, scan

_WORD_OR_NUMBER = re.compile(r"\w+|\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A request to load a model.

    Attributes:
        config_json: a config as JSON, which replaces the folder's; empty: the folder's config is read.
        files: the files that replace the folder, as content or as paths on this machine, by paths like
            `1/model.py`; None or empty: no change.
        allow_code: whether config and files may make the server run code that is not in the repository.
    """

    name: str
    config_json: str = ""
    files: Mapping[str, bytes | Path] | None = None
    allow_code: bool = True

    def __post_init__(self) -> None:
        """Raise InferenceError unless a model's folder can have this name."""
        if not _is_part(self.name) or self.name.startswith(".") or "/" in self.name or "\\" in self.name:
            raise InferenceError(
                f"{self.name!r} is not a valid model name",
                remedy="write the name of the model's folder in the repository",
            )

    def resolve(self, entries: Mapping[str, ModelEntry]) -> tuple[ModelEntry, Upload | None]:
        """Return the model to load, and the folder of its uploaded files.

        Args:
            entries: all models of the repository, by name.

        Raises:
            InferenceError: the config or a file is invalid, or would run code that is not allowed.
        """
        upload = None
        if self.files:
            if not self.config_json:
                raise not_polled(self.name, remedy="send the model's config as JSON along with its files")
            upload = Upload(self.name, self.files)
            entries = scan([upload.root])
        if self.name not in entries:
            raise not_polled(self.name, remedy="there is no folder of this name in the repository")
        entry = entries[self.name]
        if self.config_json:
            try:
                entry = self._with_config(entry)
                if not self.allow_code:
                    _reject_code(entry, is_uploaded=upload is not None)
            except RepositoryError as error:
                raise not_polled(self.name, remedy=str(error)) from error
        return entry, upload

    def _with_config(self, entry: ModelEntry) -> ModelEntry:
        """Return a model with the config of the request. Raises what `read_config_json` raises."""
        message = read_config_json(self.config_json, name=entry.name)
        return replace(entry, parsed=config_of(message, path=entry.parsed.path, folder=entry.path))


class Upload:
    """A temporary folder with the files of a model; it is removed with the last reference to this.

    Attributes:
        root: the parent of the model's folder.
    """

    def __init__(self, name: str, files: Mapping[str, bytes | Path]) -> None:
        """Write the files.

        Args:
            name: the name of the model's folder.
            files: their contents, or where they are, by their path in the model's folder: `1/model.py`.

        Raises:
            InferenceError: a path is invalid or leads out of the folder, or two paths conflict.
        """
        with ExitStack() as stack:
            # Those of killed servers are deleted now: the files may be large.
            self.root = stack.enter_context(staging_folder(Path(gettempdir()), "genserve-upload"))
            weakref.finalize(self, stack.pop_all().close)
        for name_in_folder, content in files.items():
            path = name_in_folder.lstrip("/")   # as in Triton, file:/1/model.py is file:1/model.py
            _check_path(path)
            target = self.root / name / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, Path):
                    shutil.copy2(content, target)   # no link: training writes it in place
                else:
                    target.write_bytes(content)
            except OSError as error:
                raise InferenceError(f"the file {path!r} cannot be written: {error.strerror}") from error


def _reject_code(entry: ModelEntry, *, is_uploaded: bool) -> None:
    """Reject a load that would run code which is not in the repository.

    ONNX graphs and tokenizers are data. Everything else may be code: Python and TorchScript are, a SavedModel
    has operators that read and write files, and third-party backends are unknown. Options of execution
    accelerators may name libraries: a client may set words and numbers only.

    Args:
        entry: the model, with the config of the load request.
        is_uploaded: whether the load request has files.

    Raises:
        InferenceError: the load may run such code.
        RepositoryError: the backend cannot be deduced.
    """
    message = new_model_config()
    message.CopyFrom(entry.parsed.message)
    if is_uploaded:
        deduce_backend(message, entry.path)
        built_in = BUILT_IN.get(message.backend)
        is_data = message.platform == "ensemble" or (built_in is not None and built_in.is_data)
        if not is_data:
            raise _code_error(entry, f"its files would run as code (backend '{message.backend}')")
    accelerators = message.optimization.execution_accelerators
    for accelerator in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        for name, value in accelerator.parameters.items():
            if not _WORD_OR_NUMBER.fullmatch(value):
                parameter = f"the parameter '{name}' of accelerator '{accelerator.name}'"
                raise _code_error(entry, f"{parameter} may name a library")


def _code_error(entry: ModelEntry, reason: str) -> InferenceError:
    return InferenceError(
        f"failed to load '{entry.name}', {reason}, which a load request must not contain",
        status=Status.UNSUPPORTED,
        remedy="put the model, with its config, into the repository, or start the server with "
        "--allow-uploaded-code if all its clients may run code there",
    )


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    if not pure.parts or not all(map(_is_part, pure.parts)):
        raise InferenceError(
            f"the file {path!r} is outside of the model's folder",
            remedy="write its path in the folder of the model: file:1/model.py",
        )


def _is_part(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name and len(name.encode()) <= MAX_NAME_BYTES
