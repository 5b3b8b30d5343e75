"""ONNX Runtime backend: ONNX graphs, one session for all instances on a device."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.backends.backend import Placement, model_file
from genserve.backends.libraries import import_onnxruntime
from genserve.backends.network_backend import NetworkBackend, run_error
from genserve.backends.onnx_session import (
    choose_providers,
    open_for_inspection,
    open_session,
    runtime_message,
)
from genserve.backends.onnx_signature import GraphTensor, OnnxSignature, has_signature
from genserve.config.model_config import ModelConfig
from genserve.tensor import DataType, Tensor, decode_strings, string_tensor

logger = logging.getLogger(__name__)

_INDEX = re.compile(r"idx=(-?\d+) must be within")  # of Gather and its kind
_ONNX_BFLOAT16 = 16     # TensorProto.DataType.BFLOAT16


class OnnxGraph:
    """A graph on one device; a `Network`."""

    def __init__(self, session: Any, *, parameters: Mapping[str, str]) -> None:
        self.signature = OnnxSignature(session)
        self._session = session
        self._inputs = self.signature.inputs | self.signature.initializers
        self._bfloat16 = {
            name for name, tensor in self.signature.outputs.items() if tensor.element == "bfloat16"
        }
        self._run_options = import_onnxruntime().RunOptions()
        shrinkage = parameters.get("memory.enable_memory_arena_shrinkage")
        if shrinkage:
            self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrinkage)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Run it. Inputs are not copied; outputs are views of ONNX Runtime's memory.

        Raises:
            InferenceError: ONNX Runtime fails, see `run_error`; or a string is not UTF-8.
        """
        feed = {name: _to_onnx(tensor, self._inputs[name]) for name, tensor in inputs.items()}
        try:
            if self._bfloat16.isdisjoint(outputs):
                values = self._session.run(outputs, feed, self._run_options)
            else:
                values = self._run_by_values(feed, outputs)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise run_error(_naming_input(runtime_message(error), inputs), inputs) from error
        return {
            name: _from_onnx(value, self.signature.outputs[name])
            for name, value in zip(outputs, values, strict=True)
        }

    def terminate(self) -> None:
        """End the current runs with an error, each after its current operator; later runs fail too."""
        self._run_options.terminate = True

    def _run_by_values(self, feed: Mapping[str, Any], outputs: Sequence[str]) -> list[NDArray[Any]]:
        """Run a graph with outputs in bfloat16, which `run` cannot convert to numpy."""
        ort_value = import_onnxruntime().OrtValue
        values = {
            name: value if isinstance(value, ort_value) else ort_value.ortvalue_from_numpy(value)
            for name, value in feed.items()
        }
        results = self._session.run_with_ort_values(outputs, values, self._run_options)
        return [
            _bfloat16_bits(result) if name in self._bfloat16 else result.numpy()
            for name, result in zip(outputs, results, strict=True)
        ]


def open_graph(path: Path, *, config: ModelConfig, placement: Placement) -> OnnxGraph:
    """Load a graph onto the device of a placement, and validate its config against it.

    Raises:
        MissingDependency: ONNX Runtime is not installed.
        RepositoryError: the file cannot be loaded, or does not match the config.
    """
    optimization = config.message.optimization
    choice = choose_providers(
        optimization.execution_accelerators,
        placement,
        parameters=config.parameters,
        available=import_onnxruntime().get_available_providers(),
    )
    for warning in choice.warnings:
        logger.warning("model %s: %s", config.name, warning)
    session = open_session(
        path, parameters=config.parameters, graph_level=optimization.graph.level, providers=choice.providers
    )
    graph = OnnxGraph(session, parameters=config.parameters)
    graph.signature.check(config)
    return graph


class OnnxRuntimeBackend(NetworkBackend):
    """`Backend` of `backend: "onnxruntime"` and `platform: "onnxruntime_onnx"`."""

    default_file = "model.onnx"
    network: OnnxGraph

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """See `Backend.auto_complete`. The graph is not read if inputs and outputs are both given."""
        if has_signature(message):
            return
        file = model_file(
            path / str(version),
            filename=message.default_model_filename,
            default=cls.default_file,
            model=message.name or path.name,
        )
        signature = OnnxSignature(open_for_inspection(file))
        signature.complete(message, default_max_batch_size=default_max_batch_size)
        pooling = message.parameters.get("pooling")
        if pooling is not None and pooling.string_value != "none":
            for spec in message.output:
                if len(spec.dims) == 2:
                    del spec.dims[0]    # the tokens, over which it is pooled

    @classmethod
    def open_network(cls, path: Path, config: ModelConfig, placement: Placement) -> OnnxGraph:
        """See `NetworkBackend.open_network`."""
        return open_graph(path, config=config, placement=placement)

    def abort(self) -> bool:
        """End a run that an unload does not wait for any longer, such as an endless loop of the graph."""
        self.network.terminate()
        return True


def _naming_input(message: str, inputs: Mapping[str, Tensor]) -> str:
    """Return a message with the name of the input that has the index which it is about, if there is one."""
    if (found := _INDEX.search(message)) is None:
        return message
    index = int(found[1])
    names = [
        name
        for name, tensor in inputs.items()
        if tensor.array.dtype.kind in "iu" and (tensor.array == index).any()
    ]
    return f"input '{names[0]}': {message}" if len(names) == 1 else message


def _to_onnx(tensor: Tensor, graph_tensor: GraphTensor) -> Any:
    if tensor.data_type is DataType.BYTES:
        array = np.array(decode_strings(tensor), dtype=object).reshape(tensor.shape)
    else:
        array = tensor.array
    if not graph_tensor.shape and array.size == 1:
        array = array.reshape(())       # a config cannot express a scalar input
    if tensor.data_type is DataType.BF16:
        return import_onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
    return array


def _from_onnx(array: NDArray[Any], graph_tensor: GraphTensor) -> Tensor:
    shape = array.shape or (1,)         # nor a scalar output
    if graph_tensor.data_type is DataType.BYTES:
        return string_tensor(graph_tensor.name, array.reshape(-1).tolist(), shape=shape)
    return Tensor(graph_tensor.name, array.reshape(shape), data_type=graph_tensor.data_type)


def _bfloat16_bits(value: Any) -> NDArray[np.uint16]:
    memory = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(memory, dtype=np.uint16).reshape(value.shape())
