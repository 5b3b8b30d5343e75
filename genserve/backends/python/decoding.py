"""Decoding: the decode loop of a decoder stage, from its model.py."""

from __future__ import annotations

import inspect
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from genserve.errors import RepositoryError
from genserve.generation.decoding_loops import DecodeFunction

__all__ = ["load_decode"]


def load_decode(path: Path, *, name: str) -> DecodeFunction:
    """Return `TritonPythonModel().decode` of a decoder stage's model.py.

    The file is imported as a module of its own, named after the model, so that a debugger and a
    traceback show it as it is on disk.

    Raises:
        RepositoryError: the file cannot be imported, or has no `async def decode(self, sequence)`.
    """
    if not path.is_file():
        raise RepositoryError(f"{path} is missing", remedy="`genserve pull` and `genserve export` write one")
    module_name = f"genserve_model_repository.{name}"
    spec = spec_from_file_location(module_name, path)
    assert spec is not None  # as for every file that ends in .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
    except Exception as error:
        raise RepositoryError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    decode = getattr(model, "decode", None)
    if not inspect.iscoroutinefunction(decode):
        raise RepositoryError(
            f"{path}: TritonPythonModel has no coroutine `decode`",
            remedy="write `async def decode(self, sequence)`; model_repository/smollm2_decoder shows one",
        )
    return decode
