"""Encoder graph: traces an encoder of transformers, and packs its weights in int8 for genserve's kernels.

In int8 the linear layers of tokens are `genserve.Linear`, with their biases and Gelu, and the lookup of
tokens is `genserve.Embedding`: weights and activations have a scale per block of 64 inputs. The rest is in
fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from genserve.export.encoders.encoder_source import Encoder, EncoderModule
from genserve.export.export_options import Precision
from genserve.kernels.packing import WeightFormat, pack_quantized, quantize
from genserve.sampling.logits_array import FloatArray

_FORMAT: WeightFormat = "int8_block"


def write_graph(
    version: Path, module: EncoderModule, encoder: Encoder, *, precision: Precision, source: str
) -> None:
    """Write model.onnx and its weights into a folder.

    Args:
        version: the folder.
        module: the model.
        encoder: its inputs and output.
        precision: "fp32" or "int8".
        source: the checkpoint's name, for the metadata.
    """
    example = torch.tensor([[2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9]])
    values = {"input_ids": example, "attention_mask": torch.ones_like(example)}
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(
        module,
        tuple(values.get(name, torch.zeros_like(example)) for name in encoder.inputs),
        dynamo=True,
        input_names=list(encoder.inputs),
        output_names=[encoder.output],
        dynamic_shapes=(tuple(any_size for _ in encoder.inputs),),
        verbose=False,
    )
    assert program is not None
    path = version / "model.onnx"
    program.save(str(path), external_data=True)
    model = onnx.load(path)
    if precision == "int8":
        _Quantization(model.graph).apply()
        model.opset_import.append(helper.make_opsetid("genserve", 1))
    helper.set_model_props(model, {"genserve.precision": precision, "genserve.source": source})
    for file in version.glob("model.onnx*"):
        file.unlink()
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")


class _Quantization:
    """Replaces operators of a traced graph by genserve's, which read rows [rows * tokens, size]."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*graph.value_info, *graph.input)
        }
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._nodes = [helper.make_node("Shape", ["input_ids"], ["genserve.sizes"])]
        self._made: set[str] = set()        # values that operators of ours compute

    def apply(self) -> None:
        """Change the graph."""
        for node in list(self._graph.node):
            if self._made.issuperset(node.output):
                continue        # a part of a linear layer
            if self._is_linear(node):
                self._add_linear(node)
            elif self._is_embedding(node):
                self._add_embedding(node)
            else:
                self._nodes.append(node)
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        read = {name for node in self._nodes for name in node.input}
        del self._graph.initializer[:]
        self._graph.initializer.extend(tensor for tensor in self._weights.values() if tensor.name in read)

    def _is_linear(self, node: onnx.NodeProto) -> bool:
        """Whether a node multiplies all tokens [rows, tokens, inputs] by a weight [inputs, outputs]."""
        if node.op_type != "MatMul" or node.input[1] not in self._weights:
            return False
        shape = self._shapes.get(node.input[0], [])
        is_matrix = len(self._weights[node.input[1]].dims) == 2
        return is_matrix and len(shape) == 3 and shape[:2] == self._shapes["input_ids"]

    def _is_embedding(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in self._weights

    def _add_linear(self, node: onnx.NodeProto) -> None:
        """Add a linear layer with the bias and the activation behind it."""
        x, weight = node.input[0], self._array(node.input[1]).T
        name, bias, activation = node.output[0], "", ""
        if (adding := self._only_reader(name, "Add")) is not None:
            [other] = [one for one in adding.input if one != name]
            if other in self._weights and list(self._weights[other].dims) == [len(weight)]:
                bias, name = other, adding.output[0]
        if (activating := self._only_reader(name, "Gelu")) is not None:
            kinds = [one.s.decode() for one in activating.attribute if one.name == "approximate"]
            activation, name = "gelu_tanh" if kinds == ["tanh"] else "gelu", activating.output[0]
            self._made.add(activating.input[0])
        self._made |= {node.output[0], name}
        rows = f"{x}.rows"
        if rows not in self._made:
            self._made.add(rows)
            self._nodes.append(helper.make_node("Reshape", [x, self._size(-1, weight.shape[1])], [rows]))
        self._add("Linear", [rows, *self._packed(f"{name}.weight", weight), bias], name, weight, activation)

    def _add_embedding(self, node: onnx.NodeProto) -> None:
        """Add the lookup of token ids in a table."""
        table, name = self._array(node.input[0]), node.output[0]
        rows = f"{name}.ids"
        self._nodes.append(helper.make_node("Reshape", ["input_ids", self._size(-1)], [rows]))
        self._add("Embedding", [rows, *self._packed(f"{name}.weight", table)], name, table)

    def _add(
        self, op: str, inputs: Sequence[str], output: str, weight: FloatArray, activation: str = ""
    ) -> None:
        """Add an operator, and its output [rows, tokens, size]."""
        outputs = weight.shape[0 if op == "Linear" else 1]
        product, sizes = f"{output}.product", f"{output}.sizes"
        attributes = {"activation": activation} if op == "Linear" else {}
        node = helper.make_node
        self._nodes += [
            node(
                op, inputs, [product], domain="genserve", weight_format=_FORMAT,
                out_features=weight.shape[0], in_features=weight.shape[1], **attributes,
            ),
            node("Concat", ["genserve.sizes", self._size(outputs)], [sizes], axis=0),
            node("Reshape", [product, sizes], [output]),
        ]  # fmt: skip
        # ONNX Runtime cannot infer it.
        self._graph.value_info.append(
            helper.make_tensor_value_info(product, TensorProto.FLOAT, ["tokens", outputs])
        )

    def _packed(self, name: str, weight: FloatArray) -> list[str]:
        packed = pack_quantized(quantize(np.ascontiguousarray(weight), _FORMAT), _FORMAT)
        names = [name, f"{name}.scales"]
        for each, array in zip(names, packed, strict=True):
            self._weights[each] = numpy_helper.from_array(array, each)
        return names

    def _size(self, *numbers: int) -> str:
        name = f"genserve.size.{'.'.join(map(str, numbers))}"
        self._weights[name] = numpy_helper.from_array(np.array(numbers, np.int64), name)
        return name

    def _array(self, name: str) -> FloatArray:
        array: FloatArray = numpy_helper.to_array(self._weights[name])
        return array

    def _only_reader(self, name: str, op: str) -> onnx.NodeProto | None:
        """Return the node that reads a value, if it is of a kind and the only one."""
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and readers[0].op_type == op else None
