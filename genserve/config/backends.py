"""Backends: which exist, which one runs a model, and the settings of `--backend-config`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from genserve.errors import GenserveError, RepositoryError

logger = logging.getLogger(__name__)

ENTRY_POINTS = "genserve.backends"
DEFAULT_MAX_BATCH_SIZE = 4      # Triton's
_MAX_DIGITS = 19                # of an int64

_DIRECTORY = "backend-directory"
_BATCH = "default-max-batch-size"
_PIPES = "tensors go to a model's process through a pipe, and within the server by pointer"
_POOLS = "each session has its own threads, as many as `intra_op_thread_count` in the model's parameters"
# The settings by backend; "" has the settings for all backends. None: supported. A text: ignored, since the
# setting changes memory and threads but no answer; the text says what happens instead.
_KNOWN: Mapping[str, Mapping[str, str | None]] = {
    "": {
        _DIRECTORY: None,
        _BATCH: None,
        "triton-backend-memory-tracker": "statistics do not include the memory of models",
    },
    "onnxruntime": {
        _BATCH: None,
        "enable-global-threadpool": _POOLS,
        "intra_op_thread_count": _POOLS,
        "inter_op_thread_count": _POOLS,
    },
    "tensorflow": {
        _BATCH: "configs of TensorFlow models are not completed from their files",
        "allow-soft-placement": "TensorFlow places operators by its own default",
        "gpu-memory-fraction": "TensorFlow takes memory as it needs it",
    },
    "python": {  # and of every backend that is a model.py
        "shm-default-byte-size": _PIPES,
        "shm-growth-byte-size": _PIPES,
        "shm-region-prefix-name": _PIPES,
        "shm_message_queue_size": _PIPES,
        "stub-timeout-seconds": "the server waits for a model's process until it exits",
        "thread-pool-size": "a BLS call waits on the thread that makes it",
    },
}


def version_folders(model_folder: Path) -> dict[int, Path]:
    """Return the folders named by a number without leading zeros, ascending by version."""
    try:
        folders = [path for path in model_folder.iterdir() if path.is_dir()]
    except OSError:     # removed meanwhile, or not readable
        return {}
    versions = {int(path.name): path for path in folders if _is_version(path.name)}
    return dict(sorted(versions.items()))


def _is_version(name: str) -> bool:
    is_number = name.isascii() and name.isdigit() and not name.startswith("0")
    return is_number and len(name) <= _MAX_DIGITS and int(name) < 2**63     # int64 in Triton's schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat:
    """A kind of model file that a backend loads."""

    platform: str = ""      # Triton's older name of backend and format together
    file_name: str          # in the folder of a version, unless `default_model_filename` names another


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInBackend:
    """A backend that comes with genserve."""

    implementation: str     # "module:class" of its `Backend`, imported when a model needs it
    formats: tuple[ModelFormat, ...]


# In the order in which Triton looks for their files.
BUILT_IN = {
    "tensorflow": BuiltInBackend(
        implementation="genserve.backends.tensorflow:TensorFlowBackend",
        formats=(
            ModelFormat(platform="tensorflow_savedmodel", file_name="model.savedmodel"),
            ModelFormat(platform="tensorflow_graphdef", file_name="model.graphdef"),
        ),
    ),
    "onnxruntime": BuiltInBackend(
        implementation="genserve.backends.onnxruntime:OnnxRuntimeBackend",
        formats=(ModelFormat(platform="onnxruntime_onnx", file_name="model.onnx"),),
    ),
    "pytorch": BuiltInBackend(
        implementation="genserve.backends.pytorch:PyTorchBackend",
        formats=(
            ModelFormat(platform="pytorch_libtorch", file_name="model.pt"),
            ModelFormat(platform="libtorch", file_name="model.pt"),
        ),
    ),
    "python": BuiltInBackend(
        implementation="genserve.backends.python.python_backend:PythonBackend",
        formats=(ModelFormat(file_name="model.py"),),
    ),
    "tokenizer": BuiltInBackend(
        implementation="genserve.backends.tokenizer_backend:TokenizerBackend",
        formats=(ModelFormat(file_name="tokenizer.json"),),
    ),
}


def known_backends(folders: Iterable[Path] = ()) -> tuple[str, ...]:
    """Return the names that `backend` may have.

    Args:
        folders: of backends written in Python: `<folder>/<name>/model.py`.
    """
    in_folders = (file.parent.name for folder in folders for file in folder.glob("*/model.py"))
    return tuple(dict.fromkeys((*BUILT_IN, *_installed_backends(tuple(sys.path)), *sorted(in_folders))))


@cache
def _installed_backends(_path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that packages on `sys.path` register; to read the metadata of all takes 10 ms."""
    return tuple(sorted(entry.name for entry in entry_points(group=ENTRY_POINTS)))


def deduce_backend(message: Any, model_folder: Path) -> None:
    """Fill in `backend`, `platform` and `default_model_filename` as far as they follow from each other.

    A backend that is not named follows from the platform, else from the model's file name, else from the
    files of the first version, else from the end of the model's name: `m.python`.

    Args:
        message: the `inference.ModelConfig`, changed in place.
        model_folder: the folder of the model; its name is the model's.

    Raises:
        RepositoryError: the backend cannot be deduced. The message is Triton's.
    """
    if message.platform == "ensemble":
        return
    files = _files(model_folder)
    if not message.backend:
        message.backend = _backend(message, files=files)
    if not (message.backend or message.platform or message.default_model_filename):
        message.backend = _suffix(model_folder.name)
        message.default_model_filename = f"model.{message.backend}"
    if message.backend in BUILT_IN:
        form = _format(message, BUILT_IN[message.backend].formats, files=files)
        message.platform = message.platform or form.platform
        message.default_model_filename = message.default_model_filename or form.file_name


def _files(model_folder: Path) -> set[str]:
    """Return the names in the folder of the lowest version."""
    folders = version_folders(model_folder)
    try:
        return {path.name for path in folders[min(folders)].iterdir()} if folders else set()
    except OSError:     # removed meanwhile, or not readable
        return set()


def _backend(message: Any, *, files: set[str]) -> str:
    is_unnamed = not message.platform and not message.default_model_filename
    for name, backend in BUILT_IN.items():
        for form in backend.formats:
            if _is_named(form, message) or (is_unnamed and form.file_name in files):
                return name
    return ""


def _format(message: Any, formats: tuple[ModelFormat, ...], *, files: set[str]) -> ModelFormat:
    named = [form for form in formats if _is_named(form, message)]
    found = [form for form in formats if form.file_name in files]
    return [*named, *found, *formats][0]


def _is_named(form: ModelFormat, message: Any) -> bool:
    if message.platform:
        return bool(message.platform == form.platform)
    return bool(message.default_model_filename == form.file_name)


def _suffix(model: str) -> str:
    _, dot, suffix = model.partition(".")
    if not dot:
        raise RepositoryError(
            f"Invalid model name: Could not determine backend for model '{model}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'.",
            remedy='add `backend: "python"`, "onnxruntime", "pytorch", "tensorflow" or "tokenizer", or '
            '`platform: "ensemble"`; or name the file of the model 1/model.py or 1/model.onnx',
        )
    return suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """The settings of backends from the command line.

    Attributes:
        backend_directory: folder of backends written in Python.
        default_max_batch_size: `max_batch_size` of an ONNX model whose graph can batch and whose config does
            not set it; 0: such a model does not batch.
    """

    backend_directory: Path | None = None
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE

    @classmethod
    def parse(cls, words: Iterable[str], *, backend_directory: Path | None = None) -> BackendConfig:
        """Read the values of `--backend-config`.

        Settings of Triton that are ignored here are logged as warnings.

        Args:
            words: each "BACKEND,SETTING=VALUE", or "SETTING=VALUE" for all backends.
            backend_directory: the value of `--backend-directory`.

        Raises:
            GenserveError: an unknown backend or setting, or an invalid value.
        """
        settings = [_split(word) for word in words]
        for backend, name, value in settings:
            if (backend, name) == ("", _DIRECTORY):
                if backend_directory not in (None, Path(value)):
                    raise GenserveError(
                        f"--backend-directory is {backend_directory}, but --backend-config sets {value}",
                        remedy="give --backend-directory alone",
                    )
                backend_directory = Path(value)
        batch_sizes = {"": DEFAULT_MAX_BATCH_SIZE}
        for backend, name, value in settings:
            instead = _instead(backend, name, directory=backend_directory)
            if instead is not None:
                of = f"{backend},{name}" if backend else name
                logger.warning("--backend-config=%s=%s is ignored: %s", of, value, instead)
            elif name == _BATCH:
                batch_sizes[backend] = _batch_size(value)
        return cls(
            backend_directory=backend_directory,
            default_max_batch_size=batch_sizes.get("onnxruntime", batch_sizes[""]),
        )


def _split(word: str) -> tuple[str, str, str]:
    """Return backend, setting and value; an empty backend means all of them."""
    key, _, value = word.partition("=")
    backend, comma, name = key.rpartition(",")
    if not name or not value or (comma and not backend):
        raise GenserveError(
            f"--backend-config={word} is not BACKEND,SETTING=VALUE or SETTING=VALUE",
            remedy="write for example --backend-config=onnxruntime,default-max-batch-size=8",
        )
    return backend, name, value


def _instead(backend: str, name: str, *, directory: Path | None) -> str | None:
    """Return what happens instead of a setting; None: it is supported."""
    backends = known_backends([directory] if directory else [])
    if backend and backend not in backends:
        raise GenserveError(
            f"--backend-config names an unknown backend '{backend}'",
            remedy=f"known backends: {', '.join(backends)}",
        )
    is_python_based = backend not in BUILT_IN and directory is not None and (directory / backend).is_dir()
    known = _KNOWN["python"] if backend and is_python_based else _KNOWN.get(backend, {})
    if name not in known:
        whose = f"of the backend '{backend}'" if backend else "for all backends"
        raise GenserveError(
            f"--backend-config sets '{name}', which is not a setting {whose}",
            remedy=f"settings {whose}: {', '.join(known) or 'none'}",
        )
    return known[name]


def _batch_size(value: str) -> int:
    if not value.isdecimal() or int(value) >= 2**31:
        raise GenserveError(
            f"--backend-config sets {_BATCH} to '{value}', which is not a batch size",
            remedy="write an integer; 0: models without `max_batch_size` do not batch",
        )
    return int(value)
