"""Backends: which there are, and which one runs a model whose config does not say so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from genserve.config.version_folders import version_folders
from genserve.errors import RepositoryError

__all__ = ["BUILT_IN", "ENTRY_POINTS", "ModelFormat", "deduce_backend", "known_backends"]

ENTRY_POINTS = "genserve.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat:
    """One kind of file that a backend reads."""

    platform: str = ""      # Triton's older word for backend and format together
    file_name: str          # in the folder of a version, unless `default_model_filename` says another


# The backends that come with genserve, in the order in which Triton looks for their files.
BUILT_IN = {
    "tensorflow": (
        ModelFormat(platform="tensorflow_savedmodel", file_name="model.savedmodel"),
        ModelFormat(platform="tensorflow_graphdef", file_name="model.graphdef"),
    ),
    "onnxruntime": (ModelFormat(platform="onnxruntime_onnx", file_name="model.onnx"),),
    "pytorch": (
        ModelFormat(platform="pytorch_libtorch", file_name="model.pt"),
        ModelFormat(platform="libtorch", file_name="model.pt"),
    ),
    "python": (ModelFormat(file_name="model.py"),),
    "tokenizer": (ModelFormat(file_name="tokenizer.json"),),
}


def known_backends(folders: Iterable[Path] = ()) -> tuple[str, ...]:
    """Return the names that `backend` may have.

    Args:
        folders: with backends that are written in Python: `<folder>/<name>/model.py`.
    """
    installed = (entry.name for entry in entry_points(group=ENTRY_POINTS))
    in_folders = (file.parent.name for folder in folders for file in folder.glob("*/model.py"))
    return tuple(dict.fromkeys((*BUILT_IN, *sorted(installed), *sorted(in_folders))))


def deduce_backend(message: Any, model_folder: Path) -> None:
    """Fill in `backend`, `platform` and `default_model_filename` as far as one tells the other.

    A backend that is not named follows from the platform, else from the model's file name, else from the
    files of the first version, else from the end of the model's name: `m.python`.

    Args:
        message: the `inference.ModelConfig`, changed in place.
        model_folder: the folder of the model; its name is the model's.

    Raises:
        RepositoryError: nothing tells the backend. The message is Triton's.
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
        form = _format(message, BUILT_IN[message.backend], files=files)
        message.platform = message.platform or form.platform
        message.default_model_filename = message.default_model_filename or form.file_name


def _files(model_folder: Path) -> set[str]:
    """The names of what the lowest version has."""
    folders = version_folders(model_folder)
    return {path.name for path in folders[min(folders)].iterdir()} if folders else set()


def _backend(message: Any, *, files: set[str]) -> str:
    is_silent = not message.platform and not message.default_model_filename
    for backend, formats in BUILT_IN.items():
        for form in formats:
            if _is_named(form, message) or (is_silent and form.file_name in files):
                return backend
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
            '`platform: "ensemble"`; or put the model where it is found, as 1/model.py or 1/model.onnx',
        )
    return suffix
