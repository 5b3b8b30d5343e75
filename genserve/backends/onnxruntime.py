"""ONNX Runtime backend: any ONNX graph, one session for all instances on a device."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.backends.backend import ModelSource, PerDevice, Placement, model_file
from genserve.backends.batch_runner import BatchRunner
from genserve.backends.onnx_session import (
    choose_providers,
    onnxruntime_module,
    open_for_inspection,
    open_session,
    runtime_message,
)
from genserve.backends.onnx_signature import GraphTensor, OnnxSignature, says_all
from genserve.backends.string_tensors import string_tensor, texts
from genserve.config.model_config import ModelConfig
from genserve.errors import InferenceError, Status
from genserve.inference import Inference
from genserve.tensor import DataType, Tensor

__all__ = ["OnnxGraph", "OnnxRuntimeBackend", "OnnxVersion", "open_graph"]

logger = logging.getLogger(__name__)

DEFAULT_FILE = "model.onnx"
_ONNX_BFLOAT16 = 16     # of TensorProto.DataType


class OnnxGraph:
    """A graph on one device. Several threads may run it at a time."""

    def __init__(self, session: Any, *, parameters: Mapping[str, str]) -> None:
        self.signature = OnnxSignature(session)
        self._session = session
        self._inputs = self.signature.inputs | self.signature.initializers
        self._bfloat16 = {
            name for name, tensor in self.signature.outputs.items() if tensor.element == "bfloat16"
        }
        self._run_options = onnxruntime_module().RunOptions()
        shrinkage = parameters.get("memory.enable_memory_arena_shrinkage")
        if shrinkage:
            self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrinkage)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Run it. Inputs are read where they are; outputs are views of ONNX Runtime's own memory.

        Raises:
            InferenceError: ONNX Runtime fails, or a string is not text.
        """
        feed = {name: _to_onnx(tensor, self._inputs[name]) for name, tensor in inputs.items()}
        try:
            if self._bfloat16.isdisjoint(outputs):
                values = self._session.run(outputs, feed, self._run_options)
            else:
                values = self._run_by_values(feed, outputs)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise InferenceError(runtime_message(error), status=Status.INTERNAL) from error
        return {
            name: _from_onnx(value, self.signature.outputs[name])
            for name, value in zip(outputs, values, strict=True)
        }

    def _run_by_values(self, feed: Mapping[str, Any], outputs: Sequence[str]) -> list[NDArray[Any]]:
        """Run a graph that answers in bfloat16, which `run` cannot give to numpy."""
        ort_value = onnxruntime_module().OrtValue
        values = {
            name: value if isinstance(value, ort_value) else ort_value.ortvalue_from_numpy(value)
            for name, value in feed.items()
        }
        results = self._session.run_with_ort_values(outputs, values, self._run_options)
        return [
            _bfloat16_bits(result) if name in self._bfloat16 else result.numpy()
            for name, result in zip(outputs, results, strict=True)
        ]


class OnnxVersion:
    """What the instances of a version share.

    Attributes:
        batches: around the runs.
        graphs: one on each device.
    """

    def __init__(self, source: ModelSource) -> None:
        config = source.config
        self.batches = BatchRunner(config)
        self.graphs = PerDevice(self._open)
        self._config = config
        self._path = model_file(
            source.folder, filename=config.default_model_filename, default=DEFAULT_FILE, model=config.name
        )

    def _open(self, placement: Placement) -> OnnxGraph:
        return open_graph(self._path, config=self._config, placement=placement)


def open_graph(path: Path, *, config: ModelConfig, placement: Placement) -> OnnxGraph:
    """Load a graph onto the device of a placement, and compare it with its config.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        RepositoryError: the file cannot be loaded, or the config tells of another graph.
    """
    optimization = config.message.optimization
    choice = choose_providers(
        optimization.execution_accelerators,
        placement,
        parameters=config.parameters,
        available=onnxruntime_module().get_available_providers(),
    )
    for warning in choice.warnings:
        logger.warning("model %s: %s", config.name, warning)
    session = open_session(
        path,
        parameters=config.parameters,
        graph_level=optimization.graph.level,
        providers=choice.providers,
    )
    graph = OnnxGraph(session, parameters=config.parameters)
    graph.signature.check(config)
    return graph


class OnnxRuntimeBackend:
    """`Backend` of `backend: "onnxruntime"` and `platform: "onnxruntime_onnx"`."""

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """See `Backend.auto_complete`. Nothing happens where inputs and outputs are both given."""
        if says_all(message):
            return
        file = model_file(
            path / str(version),
            filename=message.default_model_filename,
            default=DEFAULT_FILE,
            model=message.name or path.name,
        )
        signature = OnnxSignature(open_for_inspection(file))
        signature.complete(message, default_max_batch_size=default_max_batch_size)

    @classmethod
    def load(cls, source: ModelSource) -> OnnxVersion:
        """See `Backend.load`. A graph is opened as the first instance on its device starts."""
        return OnnxVersion(source)

    def __init__(self, source: ModelSource, shared: OnnxVersion, placement: Placement) -> None:
        self._batches = shared.batches
        self._graph = shared.graphs.of(placement)

    def execute(self, batch: Sequence[Inference]) -> None:
        """See `Backend.execute`."""
        self._batches.execute(batch, run=self._graph.run)

    def close(self) -> None:
        """See `Backend.close`. The session ends with the last one who holds it."""


def _to_onnx(tensor: Tensor, graph_tensor: GraphTensor) -> Any:
    if tensor.data_type is DataType.BYTES:
        array = np.array(texts(tensor), dtype=object).reshape(tensor.shape)
    else:
        array = tensor.array
    if not graph_tensor.shape and array.size == 1:
        array = array.reshape(())       # the config cannot say that an input is a scalar
    if tensor.data_type is DataType.BF16:
        return onnxruntime_module().OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
    return array


def _from_onnx(array: NDArray[Any], graph_tensor: GraphTensor) -> Tensor:
    shape = array.shape or (1,)         # nor that an output is one
    if graph_tensor.data_type is DataType.BYTES:
        return string_tensor(graph_tensor.name, array.reshape(-1).tolist(), shape=shape)
    return Tensor(graph_tensor.name, array.reshape(shape), data_type=graph_tensor.data_type)


def _bfloat16_bits(value: Any) -> NDArray[np.uint16]:
    memory = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(memory, dtype=np.uint16).reshape(value.shape())
