"""Decoder stage: the decode loop and the plug-ins of its model.py, which run in an engine."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from genserve.backends.python.model_context import CONTEXT_GLOBAL, ModelContext
from genserve.backends.python.model_package import ModelPackage
from genserve.engine.decoding_loops import DecodeFunction
from genserve.engine.text_engine import TextEngine
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.inference import Inference
from genserve.text.reasoning import REASONING_FORMATS
from genserve.text.tool_formats import TOOL_FORMATS, ToolFormat
from genserve.textmodel.decoder_plugins import Plugins, plugins_of


class DecoderInference:
    """Rejects inferences, since a decoder stage runs in the engine of its text model; a `ModelRuntime`."""

    num_waiting = 0

    def __init__(self, engine: TextEngine, *, text_model: str) -> None:
        """Reject, naming the text model to ask instead."""
        self._engine = engine
        self._text_model = text_model

    @property
    def ready(self) -> bool:
        """Whether the engine runs."""
        return self._engine.ready

    def submit(self, inference: Inference) -> None:
        """Reject.

        Raises:
            InferenceError: always.
        """
        raise InferenceError(
            f"model '{inference.request.model_name}' runs as a stage of the text model '{self._text_model}'",
            status=Status.UNSUPPORTED,
            remedy=f"send the request to '{self._text_model}'",
        )

    def close(self) -> None:
        """Do nothing: the text model closes the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The decoding loop and the plug-ins of a decoder stage."""

    decode: DecodeFunction
    is_default_loop: bool  # the model.py has no `decode`
    plugins: Plugins
    tool_format: ToolFormat | None  # None: the chat template shows it
    reasoning_format: str | None = None  # a name; None: the vocabulary shows it


def load_decoding(path: Path, *, name: str, parameters: Mapping[str, str] = MappingProxyType({})) -> Decoding:
    """Return `TritonPythonModel().decode` of a decoder stage's model.py, and the model's plug-ins.

    A model without `decode` has the default loop. The file is imported like that of other Python models, and
    its modules are dropped with `decode`.

    Args:
        path: the model.py.
        name: the name of the stage.
        parameters: the parameters in its config; `tool_format` names the format of tool calls if the model
            declares none, and `reasoning_format` that of reasoning.

    Raises:
        RepositoryError: the file cannot be imported, its `decode` is no coroutine function, or a plug-in or
            the format of tool calls is not valid.
    """
    if not path.is_file():
        raise RepositoryError(f"{path} is missing", remedy="`genserve pull` and `genserve export` write one")
    context = ModelContext(model=name, instance=name, folder=path.parent)
    folders = (path.parent, path.parent.parent)
    package = ModelPackage(path, model=name, folders=folders, module_globals={CONTEXT_GLOBAL: context})
    context.package = package.name
    try:
        model = _model_of(package, path)
        plugins = plugins_of(model, path)
        tool_format = _declared_tool_format(model, path)
        if named := _named(parameters, "tool_format", TOOL_FORMATS, name):
            tool_format = tool_format or TOOL_FORMATS[named]
        reasoning_format = _named(parameters, "reasoning_format", REASONING_FORMATS, name)
        # A new callable, whose finalizer runs when the file's can no longer be called.
        own = _decode_of(model, path)
        decode: DecodeFunction = partial(own or sample_until_finished)
    except BaseException:
        package.unload()
        raise
    weakref.finalize(decode, package.unload).atexit = False
    return Decoding(
        decode=decode,
        is_default_loop=own is None,
        plugins=plugins,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
    )


async def sample_until_finished(sequence: TokenSequence) -> None:
    """The default decoding loop: the request's sampling parameters choose each token."""
    while not sequence.finished:
        sequence.append(await sequence.sample())


def _model_of(package: ModelPackage, path: Path) -> object:
    try:
        model: object = package.load().TritonPythonModel()
    except (Exception, SystemExit) as error:
        raise RepositoryError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return model


def _declared_tool_format(model: object, path: Path) -> ToolFormat | None:
    """Return the format of tool calls that a model declares by the fields of `ToolFormat`."""
    declared = getattr(model, "tool_format", None)
    if declared is None:
        return None
    try:
        return ToolFormat.declared(declared)
    except (TypeError, ValueError) as error:
        raise RepositoryError(
            f"{path}: tool_format: {error}", remedy="write a dict as docs/tool_formats.md shows it"
        ) from None


def _named(parameters: Mapping[str, str], key: str, known: Collection[str], stage: str) -> str | None:
    """Return the format that a stage's config names by the parameter `key`; None: the config names none."""
    name = parameters.get(key)
    if name is not None and name not in known:
        remedy = f"write one of {', '.join(known)}"
        raise RepositoryError(f"{stage}: {key} {name!r} is unknown", remedy=remedy)
    return name


def _decode_of(model: object, path: Path) -> DecodeFunction | None:
    """Return the decoding loop of a model; None: the model has no `decode`."""
    decode: DecodeFunction | None = getattr(model, "decode", None)
    if decode is not None and not inspect.iscoroutinefunction(decode):
        raise RepositoryError(
            f"{path}: the `decode` of TritonPythonModel is no coroutine",
            remedy="write `async def decode(self, sequence)`; docs/decoding.md shows one",
        )
    return decode
