"""Decoder stage: the decode loop and the plug-ins of its model.py, which run in an engine."""

from __future__ import annotations

import dis
import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

from genserve.backends.python.model_context import CONTEXT_GLOBAL, ModelContext
from genserve.backends.python.model_package import ModelPackage
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.generation.engine_request import TokenSequence
from genserve.generation.output_processor import DecodeFunction
from genserve.generation.text_engine import TextEngine
from genserve.inference import Inference
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
            f"model '{inference.model_name}' runs as a stage of the text model '{self._text_model}'",
            status=Status.UNSUPPORTED,
            remedy=f"send the request to '{self._text_model}'",
        )

    def close(self) -> None:
        """Do nothing: the text model closes the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The decode loop and the plug-ins of a decoder stage."""

    decode: DecodeFunction
    only_samples: bool                  # the loop is the one that `genserve export` writes
    plugins: Plugins
    tool_format: ToolFormat | None      # None: the chat template shows it


def load_decoding(path: Path, *, name: str, parameters: Mapping[str, str] | None = None) -> Decoding:
    """Return `TritonPythonModel().decode` of a decoder stage's model.py, and the model's plug-ins.

    The file is imported like that of other Python models, and its modules are dropped with `decode`.

    Args:
        path: of the model.py.
        name: of the stage.
        parameters: of its config; `tool_format` names the format of tool calls if the model declares none.

    Raises:
        RepositoryError: the file cannot be imported, or has no `async def decode(self, sequence)`, or a
            plug-in or the format of tool calls is not valid.
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
        tool_format = _declared_tool_format(model, path) or _named_tool_format(parameters or {}, name)
        # A new callable, whose finalizer runs when the file's can no longer be called.
        loop = _decode_of(model, path)
        decode: DecodeFunction = partial(loop)
    except BaseException:
        package.unload()
        raise
    weakref.finalize(decode, package.unload).atexit = False
    return Decoding(
        decode=decode, only_samples=_only_samples(loop), plugins=plugins, tool_format=tool_format
    )


def _model_of(package: ModelPackage, path: Path) -> object:
    try:
        model: object = package.load().TritonPythonModel()
    except (Exception, SystemExit) as error:
        raise RepositoryError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return model


class _Sampling:
    """Has the decode loop that `genserve export` writes."""

    async def decode(self, sequence: TokenSequence) -> None:
        while not sequence.finished:
            sequence.append(await sequence.sample())


def _only_samples(decode: DecodeFunction) -> bool:
    """Whether a loop does what `_Sampling.decode` does, and nothing else."""
    code = getattr(decode, "__code__", None)
    return code is not None and _instructions(code) == _instructions(_Sampling.decode.__code__)


def _instructions(code: CodeType) -> list[tuple[str, object]]:
    return [(instruction.opname, instruction.argval) for instruction in dis.get_instructions(code)]


def _declared_tool_format(model: object, path: Path) -> ToolFormat | None:
    """Return the format of tool calls that a model declares by the fields of `ToolFormat`."""
    declared = getattr(model, "tool_format", None)
    if declared is None:
        return None
    try:
        return ToolFormat(**dict(declared))
    except (TypeError, ValueError) as error:
        raise RepositoryError(
            f"{path}: tool_format: {error}", remedy="write a dict as docs/tools.md shows it"
        ) from None


def _named_tool_format(parameters: Mapping[str, str], stage: str) -> ToolFormat | None:
    """Return the format of tool calls that a stage's config names; None: it names none."""
    name = parameters.get("tool_format")
    if name is None:
        return None
    if name not in TOOL_FORMATS:
        remedy = f"write one of {', '.join(TOOL_FORMATS)}"
        raise RepositoryError(f"{stage}: tool_format {name!r} is unknown", remedy=remedy)
    return TOOL_FORMATS[name]


def _decode_of(model: object, path: Path) -> DecodeFunction:
    decode: DecodeFunction | None = getattr(model, "decode", None)
    if decode is None or not inspect.iscoroutinefunction(decode):
        raise RepositoryError(
            f"{path}: TritonPythonModel has no coroutine `decode`",
            remedy="write `async def decode(self, sequence)`; docs/decoding.md shows one",
        )
    return decode
