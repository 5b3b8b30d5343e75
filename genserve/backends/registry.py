"""Registry: finds the class of a backend by its name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from genserve.backends.backend import Backend
from genserve.config.backends import BUILT_IN, ENTRY_POINTS, known_backends
from genserve.errors import RepositoryError


def find_backend(name: str, *, backend_directory: Path | None = None) -> type[Backend]:
    """Return the class that runs the models of `backend: "<name>"`; it is imported when first needed.

    The class is a built-in backend, an entry point of the group `genserve.backends`, or Triton's python
    backend with `<backend_directory>/<name>/model.py` in place of the model.py of each model.

    Args:
        name: the backend's name in config.pbtxt.
        backend_directory: where python-based backends are.

    Raises:
        RepositoryError: there is no such backend, or it cannot be imported.
    """
    if name in BUILT_IN:
        return _load(EntryPoint(name=name, value=BUILT_IN[name].implementation, group=ENTRY_POINTS))
    for entry_point in entry_points(group=ENTRY_POINTS, name=name):
        return _load(entry_point)
    known = known_backends([backend_directory] if backend_directory else [])
    if backend_directory is not None and name in known:     # an unknown name may lead out of the folder
        from genserve.backends.python.python_backend import python_based

        return python_based(backend_directory / name)
    raise RepositoryError(
        f"unable to find backend library for backend '{name}', "
        "try specifying runtime on the model configuration.",
        remedy=f"known backends: {', '.join(known)}",
    )


def _load(entry_point: EntryPoint) -> type[Backend]:
    try:
        return cast("type[Backend]", entry_point.load())
    except Exception as error:  # a module of another package may raise anything
        raise RepositoryError(
            f"backend '{entry_point.name}' cannot be imported from {entry_point.value}: "
            f"{type(error).__name__}: {error}",
            remedy="reinstall the package of the backend",
        ) from error
