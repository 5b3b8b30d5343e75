"""ONNX graph: writes a model node by node, and streams its weights to one file next to it.

A thread packs and writes a weight while the caller reads the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper, numpy_helper

MODEL_FILE = "model.onnx"

Dims = Sequence[int | str]

_ALIGNMENT = 4096  # bytes, so that weights can be mapped into memory
_OPSETS = {"": 21, "com.microsoft": 1, "genserve": 1}
_IR_VERSION = 10
_DOMAINS = {
    "DecoderLayer": "genserve",
    "GatherBlockQuantized": "com.microsoft",
    "Linear": "genserve",
    "PagedAttention": "genserve",
}
_OPERATORS = 2      # version of the set of genserve's operators; 2 has DecoderLayer


class OnnxGraphBuilder:
    """Builds `model.onnx` and `model.onnx.data` in a folder, with two weights at a time in memory.

    Values are named by strings. Use it as a context manager, and `save` it at the end.
    """

    def __init__(self, folder: Path, *, file_name: str = MODEL_FILE) -> None:
        self._path = folder / file_name
        self._data_file = f"{file_name}.data"
        self._data = (folder / self._data_file).open("wb")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._written: Future[None] | None = None   # the last weights
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._functions: list[onnx.FunctionProto] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._writer.shutdown()
        self._data.close()

    def input(self, name: str, dtype: DTypeLike, dims: Dims) -> str:
        """Declare an input of the graph, and return its name; string dimensions are symbolic."""
        self._inputs.append(_value(name, dtype, dims))
        return name

    def output(self, name: str, dtype: DTypeLike, dims: Dims) -> None:
        """Declare a value as an output of the graph."""
        self._outputs.append(_value(name, dtype, dims))

    def node(self, op: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        """Add an operator, and return the name of its first output; "" leaves an optional value out."""
        domain = _DOMAINS.get(op, "")
        node = helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes)
        self._nodes.append(node)
        return outputs[0]

    def value(self, name: str, dtype: DTypeLike) -> str:
        """Declare the type of an output of a custom operator, which ONNX Runtime cannot infer."""
        self._values.append(_value(name, dtype, None))
        return name

    def function(self, function: onnx.FunctionProto) -> None:
        """Add the body of a custom operator, for sessions without genserve's kernels."""
        self._functions.append(function)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a small constant, such as a shape or an index, to the graph file."""
        self._in_turn(partial(self._keep, numpy_helper.from_array(value, name)))
        return name

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Add a weight, whose bytes go directly to the data file."""
        return self.weights([name], lambda: [value])[0]

    def weights(self, names: Sequence[str], compute: Callable[[], Sequence[NDArray[Any]]]) -> Sequence[str]:
        """Add weights that another thread computes; an error is raised by a later call."""
        self._in_turn(partial(self._write, names, compute))
        return names

    def save(self, *, metadata: Mapping[str, str]) -> None:
        """Write the graph file with its metadata; nothing can be added afterwards."""
        self._wait()
        graph = helper.make_graph(
            self._nodes, "genserve", self._inputs, self._outputs, self._weights, value_info=self._values
        )
        opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
        model = helper.make_model(
            graph, functions=self._functions, opset_imports=opsets, ir_version=_IR_VERSION
        )
        helper.set_model_props(model, {**metadata, "genserve.operators": str(_OPERATORS)})
        self._data.close()
        self._path.write_bytes(model.SerializeToString())

    def _in_turn(self, task: Callable[[], None]) -> None:
        """Run a task on the thread, after the previous one, so that few weights are in memory."""
        self._wait()
        self._written = self._writer.submit(task)

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def _keep(self, tensor: TensorProto) -> None:
        self._weights.append(tensor)

    def _write(self, names: Sequence[str], compute: Callable[[], Sequence[NDArray[Any]]]) -> None:
        for name, value in zip(names, compute(), strict=True):
            self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
            self._keep(_pointer(name, value, file=self._data_file, offset=self._data.tell()))
            self._data.write(np.ascontiguousarray(value).data)


def _value(name: str, dtype: DTypeLike, dims: Dims | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims)


def _pointer(name: str, value: NDArray[Any], *, file: str, offset: int) -> TensorProto:
    """Describe a weight whose bytes are in the data file `file` at `offset`."""
    data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
    tensor = TensorProto(name=name, data_type=data_type, dims=value.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in {"location": file, "offset": offset, "length": value.nbytes}.items():
        tensor.external_data.add(key=key, value=str(entry))
    return tensor
