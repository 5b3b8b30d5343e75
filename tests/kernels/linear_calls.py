"""Linear calls: the plain C function through ctypes, its threads, and its reference in numpy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from genserve.kernels import packing
from genserve.kernels.blocks import BLOCK_FORMATS, pack_blocks
from tests.kernels.c_types import Error, Tensor, Threads, library

FORMATS = ("int8", "int8_block", "int4_block", "float32")
ALL_FORMATS = (*FORMATS, "q4", "q5", "q8", "q4k", "q5k", "q6k", "q4z_32", "q4z_64", "q4z_128")
NORMS = ("", "rms", "layer")
ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu", "relu2")
EPSILON = 1e-5

Array = NDArray[Any]


class Segment(ctypes.Structure):
    _fields_ = (("outputs", ctypes.c_int64), ("weight_format", ctypes.c_int32))


class Attributes(ctypes.Structure):
    _fields_ = (
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("weight_format", ctypes.c_int32),
        ("norm", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("more", Segment * 2),
    )


@dataclass(kw_only=True)
class Layer:
    """A Linear with its weights, packed and dequantized."""

    in_features: int
    out_features: int
    weight_format: str = "int8"
    norm: str = ""
    activation: str = ""
    gated: bool = False
    softcap: float = 0.0
    inputs: dict[str, Array] = field(default_factory=dict)
    weight: Array = field(default_factory=lambda: np.zeros(0))
    # In blocks: the types in GGUF and the outputs of the segments; `weight_format` is that of the first.
    segments: list[tuple[str, int]] = field(default_factory=list)

    @property
    def outputs(self) -> int:
        return self.out_features // 2 if self.gated else self.out_features

    def set_weight(self, weight: Array) -> None:
        """Quantize and pack a weight [N, K]."""
        if self.weight_format == "float32":
            self.weight, self.inputs["weight"] = weight, packing.pack_float32(weight, gated=self.gated)
        else:
            self.set_quantized(packing.quantize(weight, self.weight_format))

    def set_quantized(self, quantized: packing.Quantized) -> None:
        block = packing.BLOCKS[self.weight_format] or self.in_features
        scales = np.repeat(quantized.scales.astype(np.float64), block, axis=1)[:, : self.in_features]
        self.weight = quantized.values * scales
        packed = packing.pack_quantized(quantized, self.weight_format, gated=self.gated)
        self.inputs |= {"weight": packed.weight, "scales": packed.scales}

    def set_rows(self, segments: list[tuple[str, Array]]) -> None:
        """Pack the rows of GGUF types, each [N, bytes]."""
        self.segments = [(kind, len(rows)) for kind, rows in segments]
        self.weight_format = BLOCK_FORMATS[segments[0][0]].name
        self.weight = np.concatenate([dequantized(rows, kind) for kind, rows in segments])
        packed = [pack_blocks(rows, kind, gated=self.gated) for kind, rows in segments]
        self.inputs["weight"] = np.concatenate(packed)

    def attributes(self) -> dict[str, Any]:
        """The attributes of the ONNX node."""
        named: dict[str, Any] = {"in_features": self.in_features, "out_features": self.out_features}
        formats = ",".join(f"{BLOCK_FORMATS[kind].name}:{outputs}" for kind, outputs in self.segments)
        named |= {"weight_format": formats or self.weight_format, "norm": self.norm}
        named |= {"activation": self.activation}
        return named | {"gated": int(self.gated), "softcap": self.softcap, "epsilon": EPSILON}


INPUTS = ("x", "weight", "scales", "bias", "norm_weight", "norm_bias", "residual", "order")


# Where the blocks of a type have numbers in fp16.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "Q4Z_32": [0, 2], "Q4Z_64": [0, 2], "Q4Z_128": [0, 2],
}


def random_rows(rng: np.random.Generator, kind: str, outputs: int, inputs: int) -> Array:
    """Rows of a GGUF type with any codes: [outputs, bytes]."""
    known = BLOCK_FORMATS[kind]
    blocks = rng.integers(0, 256, (outputs, inputs // known.block, known.bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        values = (rng.standard_normal((*blocks.shape[:2], 1)) / 100).astype(np.float16)
        blocks[:, :, at : at + 2] = values.view(np.uint8)
    if kind.startswith("Q4Z"):
        zeros = rng.integers(0, 17, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, 2:4] = zeros.view(np.uint8)
    return blocks.reshape(outputs, -1)


def dequantized(rows: Array, kind: str) -> Array:
    """What the package gguf reads, or the formula of Q4Z: [outputs, inputs] float64."""
    if kind.startswith("Q4Z"):
        return zero_pointed(rows, inputs=int(kind.removeprefix("Q4Z_")))
    values = gguf.dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])
    return values.reshape(len(rows), -1).astype(np.float64)


def zero_pointed(rows: Array, *, inputs: int) -> Array:
    """(code - zero) * scale, one weight after the other."""
    weights = []
    for block in rows.reshape(-1, 4 + inputs // 2):
        scale, zero = np.ascontiguousarray(block[:4]).view(np.float16).astype(np.float64)
        for start in range(4, len(block), 16):
            codes = [code & 15 for code in block[start : start + 16]]
            codes += [code >> 4 for code in block[start : start + 16]]
            weights += [(float(code) - zero) * scale for code in codes]
    return np.array(weights).reshape(len(rows), -1)


def make_layer(
    rng: np.random.Generator, *, bias: bool = True, kinds: Sequence[str] = (), **attributes: Any
) -> Layer:
    """A layer with random weights; a residual is given with the rows.

    `kinds` are the types in GGUF of parts of about equal size.
    """
    layer = Layer(**attributes)
    if layer.gated:
        layer.out_features *= 2
    if kinds:
        counts = np.diff(np.linspace(0, layer.out_features, len(kinds) + 1).astype(int))
        layer.set_rows([
            (kind, random_rows(rng, kind, count, layer.in_features))
            for kind, count in zip(kinds, counts, strict=True)
        ])
    else:
        layer.set_weight(rng.standard_normal((layer.out_features, layer.in_features), dtype=np.float32))
    if bias:
        layer.inputs["bias"] = rng.standard_normal(layer.out_features, dtype=np.float32)
    if layer.norm:
        layer.inputs["norm_weight"] = rng.standard_normal(layer.in_features, dtype=np.float32)
    if layer.norm == "layer":
        layer.inputs["norm_bias"] = rng.standard_normal(layer.in_features, dtype=np.float32)
    return layer


def attributes_of(layer: Layer) -> Attributes:
    """The attributes of a layer as its C structure."""
    more = [(outputs, ALL_FORMATS.index(BLOCK_FORMATS[kind].name)) for kind, outputs in layer.segments[1:]]
    return Attributes(
        layer.in_features,
        layer.out_features,
        ALL_FORMATS.index(layer.weight_format),
        NORMS.index(layer.norm),
        ACTIVATIONS.index(layer.activation),
        layer.gated,
        EPSILON,
        layer.softcap,
        (Segment * 2)(*more),
    )


class LinearError(Exception):
    pass


def compute(
    layer: Layer, x: Array, residual: Array | None = None, *, isa: str = "", threads: int = 1
) -> Array:
    """Call genserve_linear."""
    given = layer.inputs | {"x": x} | ({} if residual is None else {"residual": residual})
    attributes = attributes_of(layer)
    y = np.full((len(x), layer.outputs), np.nan, np.float32)
    tensors = (Tensor * len(INPUTS))(*(Tensor.of(given.get(name)) for name in INPUTS))
    y_tensor, error = Tensor.of(y), Error()
    good = library(isa).genserve_linear(
        ctypes.byref(attributes),
        tensors,
        ctypes.byref(y_tensor),
        ctypes.byref(Threads.of(threads)),
        ctypes.byref(error),
    )
    if not good:
        raise LinearError(error.message.decode())
    return y


# What numpy computes, in float64.

_erf = np.vectorize(math.erf, otypes=[np.float64])

FUNCTIONS = {
    "": lambda v: v,
    "silu": lambda v: v / (1 + np.exp(np.minimum(-v, 700))),
    "gelu": lambda v: 0.5 * v * (1 + _erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "relu": lambda v: np.maximum(v, 0),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
}


def slope(activation: str, z: Array, off: Array) -> Array | float:
    """The largest slope of an activation between z - off and z + off; at most 1.13 but for the square."""
    return 2 * np.maximum(z + off, 0) if activation == "relu2" else 1.2


def normed(layer: Layer, x: Array) -> Array:
    x = x.astype(np.float64)
    if layer.norm == "":
        return x
    if layer.norm == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * layer.inputs["norm_weight"] + layer.inputs.get("norm_bias", 0)


def rounded(layer: Layer, x: Array) -> tuple[Array, Array]:
    """Rows quantized to int8 and back, and the largest step of each."""
    if layer.weight_format == "float32":
        return x, np.zeros((len(x), 1))
    size = 32 if layer.segments else packing.BLOCKS[layer.weight_format] or layer.in_features
    blocks = [x[:, i : i + size] for i in range(0, layer.in_features, size)]
    formats = {BLOCK_FORMATS[kind].name for kind, _ in layer.segments} or {layer.weight_format}
    largest = largest_of_pairs if formats & {"int8", "int8_block", "q8"} else np.abs
    steps = [largest(block).max(axis=1, keepdims=True) / 127 for block in blocks]
    values = [
        np.rint(block / np.where(step == 0, 1, step)) * step
        for block, step in zip(blocks, steps, strict=True)
    ]
    return np.concatenate(values, axis=1), np.concatenate(steps, axis=1).max(axis=1, keepdims=True)


def largest_of_pairs(x: Array) -> Array:
    """[T, K] to [T, ceil(K / 2)]: the largest magnitude of each two neighbours and of their sum."""
    first, second = x[:, ::2], np.zeros_like(x[:, ::2])
    second[:, : x.shape[1] // 2] = x[:, 1::2]
    return np.maximum.reduce([np.abs(first), np.abs(second), np.abs(first + second)])


def reference(layer: Layer, x: Array, residual: Array | None = None) -> tuple[Array, Array]:
    """The outputs of a layer in float64, and their tolerance in float32.

    A value of x between two integers may be rounded to either, which is tolerated twice.
    """
    values = normed(layer, x)
    if "order" in layer.inputs:
        values = values[:, layer.inputs["order"]]
    rows, step = rounded(layer, values)
    z = rows @ layer.weight.T + layer.inputs.get("bias", 0)
    off = 2 * step * np.abs(layer.weight).max() + 1e-5 * (np.abs(rows) @ np.abs(layer.weight).T) + 1e-6
    function = FUNCTIONS[layer.activation]
    if layer.gated:
        gate, up = np.split(z, 2, axis=1)
        off_gate, off_up = np.split(off, 2, axis=1)
        off_gate *= slope(layer.activation, gate, off_gate)
        y, off = (
            function(gate) * up,
            off_gate * np.abs(up) + np.abs(function(gate)) * off_up + off_gate * off_up,
        )
    else:
        y, off = function(z), off * slope(layer.activation, z, off)
    if layer.softcap:
        y = layer.softcap * np.tanh(y / layer.softcap)
    if residual is not None:
        y = y + residual
    return y, off + 1e-5 * (1 + np.abs(y))
