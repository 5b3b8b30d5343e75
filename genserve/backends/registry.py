"""Registry: which class runs the models that name a backend."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from genserve.backends.backend import Backend
from genserve.config.backends import ENTRY_POINTS, known_backends
from genserve.errors import RepositoryError

__all__ = ["find_backend"]

# Imported only when a model asks for them.
_BUILT_IN = {
    "onnxruntime": ("genserve.backends.onnxruntime", "OnnxRuntimeBackend"),
    "pytorch": ("genserve.backends.pytorch", "PyTorchBackend"),
    "tensorflow": ("genserve.backends.tensorflow", "TensorFlowBackend"),
    "python": ("genserve.backends.python.python_backend", "PythonBackend"),
    "tokenizer": ("genserve.backends.tokenizer_backend", "TokenizerBackend"),
}


def find_backend(name: str, *, backend_directory: Path | None = None) -> type[Backend]:
    """Return the class that runs the models of `backend: "<name>"`.

    It is one of genserve's own; or that of an entry point of the group `genserve.backends`; or Triton's
    python backend with `<backend_directory>/<name>/model.py` in place of each model's own.

    Args:
        name: as in config.pbtxt.
        backend_directory: of backends in Python.

    Raises:
        RepositoryError: there is none, or it cannot be imported.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        return cast("type[Backend]", getattr(import_module(module), attribute))
    for entry_point in entry_points(group=ENTRY_POINTS, name=name):
        return _from_entry_point(entry_point)
    known = known_backends([backend_directory] if backend_directory else [])
    if backend_directory is not None and name in known:     # what is not listed may lead out of the folder
        python_based = import_module("genserve.backends.python.python_backend").python_based
        return cast("type[Backend]", python_based(backend_directory / name))
    raise RepositoryError(
        f"unable to find backend library for backend '{name}', "
        "try specifying runtime on the model configuration.",
        remedy=f"backends here: {', '.join(known)}",
    )


def _from_entry_point(entry_point: EntryPoint) -> type[Backend]:
    try:
        return cast("type[Backend]", entry_point.load())
    except Exception as error:  # another's module: it may raise anything
        raise RepositoryError(
            f"backend '{entry_point.name}' cannot be imported from {entry_point.value}: "
            f"{type(error).__name__}: {error}",
            remedy="reinstall the package that brings it",
        ) from error

