"""Operations: the bytes that a step of a logits graph reads, and its arithmetic operations.

They are read from the graph's file. Small contributions are left out: norms, activations, the rows of the
embedding, and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

__all__ = ["Machine", "Part", "read_parts"]

HEAD = "head"
LAYERS = "matrix products of the layers"
ATTENTION = "attention"

# The inputs that are weights, by which each row is multiplied once.
WEIGHTS = {"DecoderLayer": (8, 11, 14, 17), "Gemm": (1,), "Linear": (1,), "MatMul": (1,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The measured peak rates of the hardware."""

    bytes_per_s: float                      # bytes read from memory
    operations_per_s: Mapping[str, float]   # operations of matrix products, for "float32" and "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A kind of operators; each multiplication and each addition is one operation."""

    name: str
    arithmetic: str                         # "float32" or "int8"
    weight_bytes: int = 0                   # read once per step; of experts, those of one row
    operations_per_row: int = 0
    cache_bytes_per_token: int = 0          # read once per row and token of its context
    operations_per_token: int = 0           # per row and token of its context

    def floor_s(self, machine: Machine, *, rows: int, context: int) -> float:
        """Return the lower bound of the time: the time to read or to compute, whichever is longer."""
        tokens = rows * context
        num_bytes = self.weight_bytes + self.cache_bytes_per_token * tokens
        operations = self.operations_per_row * rows + self.operations_per_token * tokens
        return max(num_bytes / machine.bytes_per_s, operations / machine.operations_per_s[self.arithmetic])


def read_parts(path: Path) -> list[Part]:
    """Return the parts of a graph of `genserve export`: head, layers and attention."""
    graph = onnx.load(str(path), load_external_data=False).graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    products = [product for node in graph.node for product in _products(node, initializers)]
    [vocab_size] = (o.type.tensor_type.shape.dim[-1].dim_value for o in graph.output if o.name == "logits")
    head = [part for columns, part in products if columns == vocab_size]
    layers = [part for columns, part in products if columns != vocab_size]
    return [_sum(HEAD, head), _sum(LAYERS, layers), _attention(graph)]


def _products(node: Any, initializers: Mapping[str, Any]) -> Iterator[tuple[int, Part]]:
    """Yield the products of rows with weights, each with its number of columns."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Experts":
        yield from _experts(node, attributes, initializers)
    indices = [i for i in WEIGHTS.get(node.op_type, ()) if node.input[i] in initializers]
    for number, index in enumerate(indices):
        weights = initializers[node.input[index]]
        weight_format = attributes.get("weight_format", b"float32")
        match node.op_type:
            case "Linear":
                inputs, columns = attributes["in_features"], attributes["out_features"]
            case "DecoderLayer":
                inputs, columns = _layer_sizes(attributes)[number]
                weight_format = attributes["residual_weight_format"] if number in (1, 3) else weight_format
            case _:
                inputs, columns = reversed(weights.dims) if attributes.get("transB") else weights.dims
        yield columns, Part(
            name=node.op_type,
            arithmetic="float32" if weight_format == b"float32" else "int8",
            # The scales are the next input.
            weight_bytes=sum(
                _bytes(initializers[name]) for name in node.input[index : index + 2] if name in initializers
            ),
            operations_per_row=2 * inputs * columns,
        )


def _experts(
    node: Any, attributes: Mapping[str, Any], initializers: Mapping[str, Any]
) -> Iterator[tuple[int, Part]]:
    """Yield the products of a row with the router, the experts that it chooses, and the shared expert."""
    hidden, intermediate = attributes["hidden_size"], attributes["intermediate_size"]
    gates, shared = 2 if attributes["gated"] else 1, attributes.get("shared_size", 0)
    count, chosen = attributes["num_experts"], attributes["top_k"]
    for inputs, columns, experts, num_read, names in (
        (hidden, count + attributes.get("shared_score", 0), 1, 1, node.input[1:2]),
        (hidden, gates * intermediate, count, chosen, (node.input[2], node.input[4])),
        (intermediate, hidden, count, chosen, (node.input[3], node.input[5])),
        (hidden, gates * shared, 1, 1, node.input[12:14]),
        (shared, hidden, 1, 1, node.input[15:17]),
    ):
        is_float = attributes.get("weight_format", b"float32") == b"float32"
        num_bytes = sum(_bytes(initializers[name]) for name in names if name in initializers)
        yield columns, Part(
            name=node.op_type,
            arithmetic="float32" if is_float else "int8",
            weight_bytes=num_bytes * num_read // experts,
            operations_per_row=2 * inputs * columns * num_read,
        )


def _layer_sizes(attributes: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the numbers of inputs and outputs of a DecoderLayer's linear layers."""
    hidden, intermediate = attributes["hidden_size"], attributes["intermediate_size"]
    heads, kv_heads, dim = attributes["num_heads"], attributes["kv_num_heads"], attributes["head_dim"]
    return [
        (hidden, (heads + 2 * kv_heads) * dim),
        (heads * dim, hidden),
        (hidden, intermediate * (2 if attributes["gated"] else 1)),
        (intermediate, hidden),
    ]


def _bytes(tensor: Any) -> int:
    if uses_external_data(tensor):
        return int(next(entry.value for entry in tensor.external_data if entry.key == "length"))
    bits = 4 if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4) else None
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * 8
    return math.prod(tensor.dims) * (bits or itemsize) // 8


def _sum(name: str, parts: Iterable[Part]) -> Part:
    parts = list(parts)
    # A graph may have some products in higher precision; the floor assumes the faster precision.
    arithmetic = "int8" if any(part.arithmetic == "int8" for part in parts) else "float32"
    return Part(
        name=name,
        arithmetic=arithmetic,
        weight_bytes=sum(part.weight_bytes for part in parts),
        operations_per_row=sum(part.operations_per_row for part in parts),
    )


def _attention(graph: Any) -> Part:
    """Return the attention: keys and values of a token are read once, and multiplied once per query head."""
    heads = 0
    for node in graph.node:
        if node.op_type in ("DecoderLayer", "PagedAttention"):
            heads += next(a.i for a in node.attribute if a.name == "num_heads")
    caches = [i.type.tensor_type for i in graph.input if i.name.startswith("past_key_values.")]
    token_bytes, head_dim = 0, 0
    for cache in caches:
        _, _, *sizes = (dim.dim_value for dim in cache.shape.dim)
        token_bytes += math.prod(sizes) * onnx.helper.tensor_dtype_to_np_dtype(cache.elem_type).itemsize
        head_dim = max(head_dim, *sizes[1:], 0)     # the scales of an int8 cache have no such dimension
    return Part(
        name=ATTENTION,
        arithmetic="float32",
        cache_bytes_per_token=token_bytes,
        operations_per_token=4 * heads * head_dim,
    )
