"""Python backend: runs models that are a model.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf import json_format

from genserve.backends.backend import ModelSource, Placement
from genserve.backends.python.custom_metrics import MetricFamilies
from genserve.backends.python.model_context import Host
from genserve.backends.python.python_model import PythonModel, complete_config
from genserve.backends.python.stub import ModelProcess
from genserve.backends.python.stub_process import ModelSetup
from genserve.config.config_json import config_json
from genserve.errors import RepositoryError
from genserve.inference import CURRENT_EXECUTOR, Inference

__all__ = ["PythonBackend", "python_based"]


# A class that can have no auto_complete_config is not imported once more than needed.
_PLAIN_CLASS = re.compile(rb"^class TritonPythonModel\s*(\(\s*(object\s*)?\)\s*)?:", re.MULTILINE)


class PythonBackend:
    """One instance of a model.py.

    It runs in this process, where its BLS calls hand tensors over by pointer; or, with the parameter
    EXECUTION "process", in one of its own, where a crash takes nothing else with it.

    Attributes:
        folder: whose model.py runs every model of the backend; None: each model has its own.
    """

    folder: ClassVar[Path | None] = None

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """Let the model's `auto_complete_config` complete its config.

        Raises:
            InferenceError: what it raised.
            RepositoryError: what it wrote is no config.
        """
        file, folders = cls._file(path, version, message.default_model_filename)
        if file.is_file() and _cannot_complete(file):
            return
        host = Host(model=message.name or path.name, folder=path / str(version))
        completed = complete_config(file, folders=folders, host=host, config=config_json(message))
        try:
            parsed = json_format.ParseDict(completed, type(message)())
        except json_format.ParseError as error:
            raise RepositoryError(
                f"auto_complete_config of {file} made a config that is none: {error}",
                remedy="use the methods of its argument and the names of config.pbtxt",
            ) from error
        message.CopyFrom(parsed)

    @classmethod
    def load(cls, source: ModelSource) -> None:
        """Share nothing: each instance has modules of its own, as in Triton."""

    def __init__(self, source: ModelSource, shared: None, placement: Placement) -> None:
        config = source.config
        path, folders = self._file(source.path, source.version, config.default_model_filename)
        batching = config.sequence_batching
        host = Host(
            model=source.name,
            instance=placement.name,
            folder=source.folder,
            server=source.server,
            families=source.metrics.collector(MetricFamilies),
            decoupled=config.decoupled,
            outputs=tuple(output.name for output in config.outputs),
            executor=CURRENT_EXECUTOR.get(),
            cpu_inputs=config.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes").lower() != "no",
        )
        arguments = _arguments(source, placement)
        iterative = batching is not None and batching.iterative
        self._model: PythonModel | ModelProcess
        if config.parameters.get("EXECUTION") == "process":
            setup = ModelSetup(path=path, folders=tuple(folders), arguments=arguments, iterative=iterative)
            self._model = ModelProcess(setup, host=host)
        else:
            self._model = PythonModel(
                path, folders=folders, host=host, arguments=arguments, iterative=iterative
            )

    def execute(self, batch: Sequence[Inference]) -> None:
        """Have the model answer a batch."""
        self._model.execute(batch)

    def is_ready(self) -> bool:
        """Whether the model's own `is_ready` says so; from any thread."""
        return self._model.is_ready()

    def close(self) -> None:
        """Finalize the model."""
        self._model.close()

    def abort(self) -> bool:
        """Kill the process of its own, if it has one; from any thread."""
        if isinstance(self._model, PythonModel):
            return False
        self._model.abort()
        return True

    @classmethod
    def _file(cls, path: Path, version: int, filename: str) -> tuple[Path, list[Path]]:
        if cls.folder is not None:
            return cls.folder / "model.py", [cls.folder]
        folder = path / str(version)
        file = folder / (filename or "model.py")
        return file, list(dict.fromkeys((file.parent, folder, path)))


def python_based(folder: Path) -> type[PythonBackend]:
    """Return a backend of which every model is run by the model.py in `folder`."""
    return type("PythonBasedBackend", (PythonBackend,), {"folder": folder})


def _arguments(source: ModelSource, placement: Placement) -> dict[str, str]:
    """Return the argument of `initialize`; `model_repository` is the model's folder, despite its name."""
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
