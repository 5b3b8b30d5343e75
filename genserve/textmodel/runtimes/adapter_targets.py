"""Adapter targets: the linear layers of an exported graph that an adapter may change, by their roles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.kernels.low_rank import LinearShape

_LINEAR = re.compile(r"(layers\.\d+\.)(attention\.qkv|attention\.output|mlp\.inner|mlp\.down)")
# The linear layers of DecoderLayer with the inputs that are their weights, and their attributes.
_PARTS = (
    ("attention.qkv", 8, "weight_format", "attention_smoothing"),
    ("attention.output", 11, "residual_weight_format", ""),
    ("mlp.inner", 14, "inner_weight_format", "mlp_smoothing"),
    ("mlp.down", 17, "down_weight_format", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTarget:
    """Some outputs of a linear layer.

    Attributes:
        weight: the name of the layer's weight.
        shape: the sizes of the layer.
        first: the first of the outputs.
        num_outputs: how many outputs these are.
        smoothing: [in_features], by which its export has divided the layer's inputs; None: by nothing.
        is_smoothed: whether its inputs may be divided by factors that the graph does not have.
    """

    weight: str
    shape: LinearShape
    first: int
    num_outputs: int
    smoothing: NDArray[np.float32] | None
    is_smoothed: bool


def read_targets(path: Path) -> dict[str, AdapterTarget]:
    """Return the targets in a graph of `genserve export`, by roles such as `layers.3.attention.query`.

    Layers of other operators than genserve's are none.
    """
    import onnx

    nodes = onnx.load(path, load_external_data=False).graph.node
    heads = {
        node.output[0].removesuffix("heads"): _attributes(node)
        for node in nodes
        if node.op_type == "PagedAttention"
    }
    targets: dict[str, AdapterTarget] = {}
    for node in nodes:
        if node.domain != "genserve":
            continue
        attributes = _attributes(node)
        if node.op_type == "Linear" and (match := _LINEAR.fullmatch(node.output[0])):
            layer, part = match.groups()
            targets |= _of_linear(
                layer,
                part,
                weight=node.input[1],
                sizes=(attributes["in_features"], attributes["out_features"]),
                weight_format=attributes.get("weight_format", ""),
                gated=bool(attributes.get("gated", 0)),
                norm=attributes.get("norm", ""),
                smoothing=attributes.get("smoothing"),
                heads=heads.get(f"{layer}attention.", {}),
            )
        if node.op_type == "DecoderLayer":
            targets |= _of_decoder_layer(node, attributes)
    return targets


def num_layers(roles: Iterable[str]) -> int:
    """Return the number of a model's layers, from the roles of all its graphs."""
    return 1 + max(int(role.split(".")[1]) for role in roles)


def _of_decoder_layer(node: Any, attributes: Mapping[str, Any]) -> dict[str, AdapterTarget]:
    layer = node.output[0].removesuffix("mlp.down")
    hidden, inner = attributes["hidden_size"], attributes["intermediate_size"]
    query = attributes["num_heads"] * attributes["head_dim"]
    keys = attributes["kv_num_heads"] * attributes["head_dim"]
    gated = bool(attributes.get("gated", 0))
    sizes = {
        "attention.qkv": (hidden, query + 2 * keys),
        "attention.output": (query, hidden),
        "mlp.inner": (hidden, 2 * inner if gated else inner),
        "mlp.down": (inner, hidden),
    }
    targets: dict[str, AdapterTarget] = {}
    for part, at, weight_format, smoothing in _PARTS:
        fallback = attributes.get("weight_format" if part == "mlp.inner" else "residual_weight_format", "")
        targets |= _of_linear(
            layer,
            part,
            weight=node.input[at],
            sizes=sizes[part],
            weight_format=attributes.get(weight_format, fallback),
            gated=gated and part == "mlp.inner",
            norm=attributes.get("norm", "") if smoothing else "",
            smoothing=attributes.get(smoothing),
            heads=attributes,
        )
    return targets


def _of_linear(
    layer: str,
    part: str,
    *,
    weight: str,
    sizes: tuple[int, int],
    weight_format: str,
    gated: bool,
    norm: str,
    smoothing: Sequence[float] | None,
    heads: Mapping[str, Any],
) -> dict[str, AdapterTarget]:
    inputs, outputs = sizes
    shape = LinearShape(
        in_features=inputs,
        outputs=_segments(weight_format, outputs),
        gated=gated,
        in_int8=weight_format != "float32",
    )
    return {
        f"{layer}{role}": AdapterTarget(
            weight=weight,
            shape=shape,
            first=first,
            num_outputs=count,
            smoothing=None if smoothing is None else np.array(smoothing, np.float32),
            # One scale per row suits inputs whose channels were balanced.
            is_smoothed=smoothing is None and bool(norm) and weight_format == "int8",
        )
        for role, first, count in _roles(part, outputs, gated=gated, heads=heads)
    }


def _roles(
    part: str, outputs: int, *, gated: bool, heads: Mapping[str, Any]
) -> Iterator[tuple[str, int, int]]:
    """Yield the roles of a layer, each with its first output and their number."""
    if part == "mlp.inner":
        half = outputs // 2
        yield from [("mlp.gate", 0, half), ("mlp.up", half, half)] if gated else [("mlp.up", 0, outputs)]
    elif part != "attention.qkv":
        yield part, 0, outputs
    elif heads and outputs % (heads["num_heads"] + 2 * heads["kv_num_heads"]) == 0:
        head_dim = outputs // (heads["num_heads"] + 2 * heads["kv_num_heads"])
        query, keys = heads["num_heads"] * head_dim, heads["kv_num_heads"] * head_dim
        yield "attention.query", 0, query
        yield "attention.key", query, keys
        yield "attention.value", query + keys, keys


def _segments(weight_format: str, outputs: int) -> tuple[int, ...]:
    """Return the outputs of each format of the attribute, such as "q4:384,q8:192"."""
    counts = tuple(int(each.partition(":")[2] or 0) for each in weight_format.split(","))
    others = sum(counts[1:])
    return (outputs - others, *counts[1:])


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    values = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
