"""Schema: Triton's official protobuf schema of config.pbtxt, from the `tritonclient` package."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from genserve.errors import MissingDependency

__all__ = ["new_model_config"]


def _model_config_pb2() -> ModuleType:
    # The generated file alone: importing the package around it loads gRPC too, 0.2 s and 240 modules more.
    # A later `import tritonclient.grpc` gets the same message classes, because protobuf pools them by name.
    package = find_spec("tritonclient")
    if package is None or package.submodule_search_locations is None:
        raise MissingDependency(
            "reading config.pbtxt needs the package `tritonclient`", remedy="pip install 'tritonclient[grpc]'"
        )
    [folder] = package.submodule_search_locations
    module = ModuleType("tritonclient.grpc.model_config_pb2")
    SourceFileLoader(module.__name__, str(Path(folder) / "grpc" / "model_config_pb2.py")).exec_module(module)
    return module


_PB2 = _model_config_pb2()


def new_model_config() -> Any:
    """An empty `inference.ModelConfig` message."""
    return _PB2.ModelConfig()
