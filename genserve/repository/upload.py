"""Upload: the files that a load call brings, in a folder that lasts as long as the model they are of."""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp

from genserve.config.backends import deduce_backend
from genserve.config.config_rules import MAX_NAME_BYTES
from genserve.config.schema import new_model_config
from genserve.errors import InferenceError, Status
from genserve.repository.index import ModelEntry

__all__ = ["Upload", "check_model_name", "refuse_code"]

_BACKENDS_OF_DATA = frozenset({"onnxruntime", "tokenizer"})
_WORD_OR_NUMBER = re.compile(r"\w+|\d+\.\d+")


class Upload:
    """A folder of one model; it is removed once nobody holds this any more.

    Attributes:
        root: the folder that holds the model's.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write the files.

        Args:
            name: of the model, see `check_model_name`.
            files: by their path in the model's folder: `1/model.py`.

        Raises:
            InferenceError: a path is none, or leads out of the folder, or two exclude each other.
        """
        self.root = Path(mkdtemp(prefix="genserve-"))
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        for path, content in files.items():
            _check_path(path)
            target = self.root / name / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            except OSError as error:
                raise InferenceError(f"the file {path!r} cannot be written: {error.strerror}") from error


def check_model_name(name: str) -> None:
    """Raise InferenceError for what cannot be the name of a model's folder."""
    if not _is_part(name) or name.startswith(".") or "/" in name or "\\" in name:
        raise InferenceError(
            f"{name!r} cannot be the name of a model",
            remedy="a model has the name of its folder in the repository",
        )


def refuse_code(entry: ModelEntry, *, is_uploaded: bool) -> None:
    """Refuse a load that would run code which the repository does not hold.

    ONNX graphs and tokenizers are data. All else is a program: Python and TorchScript by their nature, a
    SavedModel has operators that read and write files, and nobody knows of a backend that is not ours. An
    execution accelerator has options that name libraries: what a client sets there is a word or a number.

    Args:
        entry: the model, with the config that came with the call.
        is_uploaded: whether its files came with the call, too.

    Raises:
        InferenceError: the load is such a one.
        RepositoryError: nothing tells the backend.
    """
    message = new_model_config()
    message.CopyFrom(entry.parsed.message)
    if is_uploaded:
        deduce_backend(message, entry.path)
        if message.backend not in _BACKENDS_OF_DATA and message.platform != "ensemble":
            raise _code(entry, f"its files would run as code in the server (backend '{message.backend}')")
    accelerators = message.optimization.execution_accelerators
    for accelerator in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        for name, value in accelerator.parameters.items():
            if not _WORD_OR_NUMBER.fullmatch(value):
                parameter = f"the parameter '{name}' of accelerator '{accelerator.name}'"
                raise _code(entry, f"{parameter} may name a library")


def _code(entry: ModelEntry, why: str) -> InferenceError:
    return InferenceError(
        f"failed to load '{entry.name}', {why}, which a load call may not bring",
        status=Status.UNSUPPORTED,
        remedy="put the model, with its config, into the repository, or start the server with "
        "--allow-uploaded-code if whoever reaches it may run code there",
    )


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or not all(map(_is_part, pure.parts)):
        raise InferenceError(
            f"the file {path!r} would lie outside of the model's folder",
            remedy="name it as it lies in the folder of the model: file:1/model.py",
        )


def _is_part(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name and len(name.encode()) <= MAX_NAME_BYTES
