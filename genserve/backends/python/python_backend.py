"""Python backend: runs models that are a model.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf import json_format
from prometheus_client.registry import Collector

from genserve.backends.backend import ModelSource, Placement
from genserve.backends.python.custom_metrics import CustomMetrics
from genserve.backends.python.model_context import ModelContext
from genserve.backends.python.python_model import ModelSetup, PythonModel, complete_config
from genserve.backends.python.stub import ModelProcess
from genserve.config.config_json import config_json
from genserve.errors import RepositoryError
from genserve.inference import CURRENT_EXECUTOR, Inference

# A class without bases and without this method has no auto_complete_config, and need not be imported.
_PLAIN_CLASS = re.compile(rb"^class TritonPythonModel\s*(\(\s*(object\s*)?\)\s*)?:", re.MULTILINE)


class _CollectedMetrics(CustomMetrics, Collector):
    """The custom metrics of a server, for its registry."""


class PythonBackend:
    """One instance of a model.py.

    It runs in this process, where BLS requests pass tensors by pointer; or, with the parameter EXECUTION
    "process", in a stub process, whose crash does not affect the server.

    Attributes:
        folder: where the model.py is that runs every model of the backend; None: each model has its own.
    """

    folder: ClassVar[Path | None] = None

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """Complete a config by the model's `auto_complete_config`.

        Raises:
            InferenceError: raised by the model.
            RepositoryError: the result is not a valid config.
        """
        file, folders = cls._file(path, version, message.default_model_filename)
        if file.is_file() and _cannot_complete(file):
            return
        context = ModelContext(model=message.name or path.name, folder=path / str(version))
        completed = complete_config(file, folders=folders, context=context, config=config_json(message))
        try:
            parsed = json_format.ParseDict(completed, type(message)())
        except json_format.ParseError as error:
            raise RepositoryError(
                f"auto_complete_config of {file} returned an invalid config: {error}",
                remedy="use the methods of its argument, with the field names of config.pbtxt",
            ) from error
        message.CopyFrom(parsed)

    @classmethod
    def load(cls, source: ModelSource) -> None:
        """Return None: each instance has its own modules, as in Triton."""

    def __init__(self, source: ModelSource, shared: None, placement: Placement) -> None:
        config = source.config
        path, folders = self._file(source.path, source.version, config.default_model_filename)
        batching = config.sequence_batching
        context = ModelContext(
            model=source.name,
            instance=placement.name,
            folder=source.folder,
            server=source.server,
            metrics=source.metrics.collector(_CollectedMetrics),
            decoupled=config.decoupled,
            outputs=tuple(output.name for output in config.outputs),
            executor=CURRENT_EXECUTOR.get(),
            cpu_inputs=config.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes").lower() != "no",
        )
        setup = ModelSetup(
            path=path,
            folders=folders,
            arguments=_arguments(source, placement),
            iterative=batching is not None and batching.iterative,
        )
        model = ModelProcess if config.parameters.get("EXECUTION") == "process" else PythonModel
        self._model = model(setup, context=context)

    def execute(self, batch: Sequence[Inference]) -> None:
        """Execute a batch. See `Backend.execute`."""
        self._model.execute(batch)

    def is_ready(self) -> bool:
        """Whether the model's `is_ready`, if it has one, returns True; from any thread."""
        return self._model.is_ready()

    def close(self) -> None:
        """Finalize the model."""
        self._model.close()

    def abort(self) -> bool:
        """Kill the stub process, if there is one; from any thread."""
        return self._model.abort()

    @classmethod
    def _file(cls, path: Path, version: int, filename: str) -> tuple[Path, tuple[Path, ...]]:
        if cls.folder is not None:
            return cls.folder / "model.py", (cls.folder,)
        folder = path / str(version)
        file = folder / (filename or "model.py")
        return file, tuple(dict.fromkeys((file.parent, folder, path)))


def python_based(folder: Path) -> type[PythonBackend]:
    """Return a backend that runs every model with the model.py in `folder`."""
    return type("PythonBasedBackend", (PythonBackend,), {"folder": folder})


def _arguments(source: ModelSource, placement: Placement) -> dict[str, str]:
    """Return the argument of `initialize`; its `model_repository` is the folder of the model."""
    return {
        "model_config": config_json(source.config.message),
        "model_instance_kind": placement.kind,
        "model_instance_name": placement.name,
        "model_instance_device_id": str(placement.device_id),
        "model_repository": str(source.path),
        "model_version": str(source.version),
        "model_name": source.name,
    }


def _cannot_complete(file: Path) -> bool:
    text = file.read_bytes()
    return b"auto_complete_config" not in text and _PLAIN_CLASS.search(text) is not None
