"""ONNX graph: writes a model node by node, and streams its weights to one file next to it.

A thread packs and writes some rows of a weight while the caller reads the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
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
    "Activation": "genserve",
    "CausalConv": "genserve",
    "DecoderLayer": "genserve",
    "Embedding": "genserve",
    "Experts": "genserve",
    "GroupedLinear": "genserve",
    "Linear": "genserve",
    "LinearAttention": "genserve",
    "Norm": "genserve",
    "PagedAttention": "genserve",
    "StreamMix": "genserve",
}
# The version of genserve's operator set: 2 has DecoderLayer, 3 Embedding and weights in blocks, 4 Experts,
# 5 Embedding of weights in int8_block, 6 CausalConv and LinearAttention, 7 shared caches and chunks,
# 8 Norm, Activation and StreamMix.
_OPERATORS = 8


class OnnxGraphBuilder:
    """Builds `model.onnx` and `model.onnx.data` in a folder, with two parts of weights at a time in memory.

    Values are named by strings. Use the builder as a context manager, and call `save` at the end.
    """

    def __init__(self, folder: Path, *, file_name: str = MODEL_FILE) -> None:
        self._path = folder / file_name
        self._data_file = f"{file_name}.data"
        self._data = (folder / self._data_file).open("wb")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._written: Future[None] | None = None   # the task that writes the latest weights
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
        self._wait()    # for the order of the file
        self._weights.append(numpy_helper.from_array(value, name))
        return name

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Add a weight, whose bytes go directly to the data file."""
        self._in_turn(partial(self._write, name, [value]))
        return name

    def weights(
        self, names: Sequence[str], parts: Iterable[Callable[[], Sequence[NDArray[Any]]]]
    ) -> Sequence[str]:
        """Add weights, of which each function returns the next rows, one array for each name.

        Another thread calls the functions, and writes what they return for the first name at once; an error
        is raised by a later call.
        """
        writing = _Writing(names[0])
        rest: list[list[NDArray[Any]]] = [[] for _ in names[1:]]
        for compute in parts:
            self._in_turn(partial(self._write_part, writing, compute, rest))
        self._in_turn(partial(self._write_rest, writing, names[1:], rest))
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
        """Run a task on the thread once the previous one has ended, so that few weights are in memory."""
        self._wait()
        self._written = self._writer.submit(task)

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def _write_part(
        self,
        writing: _Writing,
        compute: Callable[[], Sequence[NDArray[Any]]],
        rest: Sequence[list[NDArray[Any]]],
    ) -> None:
        first, *others = compute()
        self._append(writing, first)
        for arrays, array in zip(rest, others, strict=True):
            arrays.append(array)

    def _write_rest(
        self, writing: _Writing, names: Sequence[str], rest: Sequence[list[NDArray[Any]]]
    ) -> None:
        self._weights.append(writing.pointer(file=self._data_file))
        for name, arrays in zip(names, rest, strict=True):
            self._write(name, arrays)

    def _write(self, name: str, parts: Sequence[NDArray[Any]]) -> None:
        writing = _Writing(name)
        for array in parts:
            self._append(writing, array)
        self._weights.append(writing.pointer(file=self._data_file))

    def _append(self, writing: _Writing, value: NDArray[Any]) -> None:
        if not writing.shapes:
            self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
            writing.offset, writing.dtype = self._data.tell(), value.dtype
        writing.shapes.append(value.shape)
        self._data.write(np.ascontiguousarray(value).data)


@dataclass(slots=True)
class _Writing:
    """A weight whose rows are being written to the data file."""

    name: str
    offset: int = 0                         # of the first row
    dtype: np.dtype[Any] | None = None
    shapes: list[tuple[int, ...]] = field(default_factory=list)     # of the parts

    def pointer(self, *, file: str) -> TensorProto:
        """Describe a weight whose bytes are in the data file `file`."""
        first = self.shapes[0]
        dims = (sum(shape[0] for shape in self.shapes), *first[1:]) if first else first
        assert self.dtype is not None
        data_type = helper.np_dtype_to_tensor_dtype(self.dtype)
        tensor = TensorProto(name=self.name, data_type=data_type, dims=dims)
        tensor.data_location = TensorProto.EXTERNAL
        length = prod(dims) * self.dtype.itemsize
        for key, entry in {"location": file, "offset": self.offset, "length": length}.items():
            tensor.external_data.add(key=key, value=str(entry))
        return tensor


def _value(name: str, dtype: DTypeLike, dims: Dims | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims)

