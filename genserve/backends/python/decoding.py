"""Decoding: the decode loop of a decoder stage, from its model.py."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from pathlib import Path

from genserve.backends.python.host import HOST_NAME, Host
from genserve.backends.python.model_file import ModelFile
from genserve.errors import RepositoryError
from genserve.generation.decoding_loops import DecodeFunction

__all__ = ["load_decode"]


def load_decode(path: Path, *, name: str) -> DecodeFunction:
    """Return `TritonPythonModel().decode` of a decoder stage's model.py.

    The file is imported as those of other python models are, and forgotten once nobody has `decode` any more.

    Raises:
        RepositoryError: the file cannot be imported, or has no `async def decode(self, sequence)`.
    """
    if not path.is_file():
        raise RepositoryError(f"{path} is missing", remedy="`genserve pull` and `genserve export` write one")
    host = Host(model=name, instance=name, folder=path.parent)
    file = ModelFile(path, model=name, folders=(path.parent, path.parent.parent), names={HOST_NAME: host})
    host.package = file.package
    try:
        # A callable of our own, which tells by its end that nobody can call the file's any more.
        decode: DecodeFunction = partial(_decode_of(file, path))
    except BaseException:
        file.forget()
        raise
    weakref.finalize(decode, file.forget).atexit = False
    return decode


def _decode_of(file: ModelFile, path: Path) -> DecodeFunction:
    try:
        model = file.load().TritonPythonModel()
    except (Exception, SystemExit) as error:
        raise RepositoryError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    decode: DecodeFunction | None = getattr(model, "decode", None)
    if decode is None or not inspect.iscoroutinefunction(decode):
        raise RepositoryError(
            f"{path}: TritonPythonModel has no coroutine `decode`",
            remedy="write `async def decode(self, sequence)`; model_repository/smollm2_decoder shows one",
        )
    return decode
