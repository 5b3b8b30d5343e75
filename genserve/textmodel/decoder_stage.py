"""Decoder stage: loads the decode loop and the plug-ins from its model.py."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from genserve.backends.python.model_context import CONTEXT_GLOBAL, ModelContext
from genserve.backends.python.model_package import ModelPackage
from genserve.errors import RepositoryError
from genserve.generation.output_processor import DecodeFunction
from genserve.textmodel.decoder_plugins import Plugins, plugins_of

__all__ = ["Decoding", "load_decoding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What a decoder stage is made of."""

    decode: DecodeFunction
    plugins: Plugins


def load_decoding(path: Path, *, name: str) -> Decoding:
    """Return `TritonPythonModel().decode` of a decoder stage's model.py, and the model's plug-ins.

    The file is imported as those of other python models are, and forgotten once nobody has `decode` any more.

    Raises:
        RepositoryError: the file cannot be imported, or has no `async def decode(self, sequence)`, or a
            plug-in cannot be used.
    """
    if not path.is_file():
        raise RepositoryError(f"{path} is missing", remedy="`genserve pull` and `genserve export` write one")
    context = ModelContext(model=name, instance=name, folder=path.parent)
    file = ModelPackage(
        path, model=name, folders=(path.parent, path.parent.parent), names={CONTEXT_GLOBAL: context}
    )
    context.package = file.package
    try:
        model = _model_of(file, path)
        plugins = plugins_of(model, path)
        # A callable of our own, which tells by its end that nobody can call the file's any more.
        decode: DecodeFunction = partial(_decode_of(model, path))
    except BaseException:
        file.forget()
        raise
    weakref.finalize(decode, file.forget).atexit = False
    return Decoding(decode=decode, plugins=plugins)


def _model_of(file: ModelPackage, path: Path) -> object:
    try:
        model: object = file.load().TritonPythonModel()
    except (Exception, SystemExit) as error:
        raise RepositoryError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return model


def _decode_of(model: object, path: Path) -> DecodeFunction:
    decode: DecodeFunction | None = getattr(model, "decode", None)
    if decode is None or not inspect.iscoroutinefunction(decode):
        raise RepositoryError(
            f"{path}: TritonPythonModel has no coroutine `decode`",
            remedy="write `async def decode(self, sequence)`; model_repository/smollm2_decoder shows one",
        )
    return decode
