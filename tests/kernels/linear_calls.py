"""Linear calls: the plain C function through ctypes, its threads, and its reference in numpy."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.kernels import packing
from tests.kernels.c_types import Error, Tensor, Threads, library

FORMATS = ("int8", "int8_block", "int4_block", "float32")
NORMS = ("", "rms", "layer")
ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")
EPSILON = 1e-5

Array = NDArray[Any]


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

    def attributes(self) -> dict[str, Any]:
        """The attributes of the ONNX node."""
        named: dict[str, Any] = {"in_features": self.in_features, "out_features": self.out_features}
        named |= {"weight_format": self.weight_format, "norm": self.norm, "activation": self.activation}
        return named | {"gated": int(self.gated), "softcap": self.softcap, "epsilon": EPSILON}


INPUTS = ("x", "weight", "scales", "bias", "norm_weight", "norm_bias", "residual")


def make_layer(rng: np.random.Generator, *, bias: bool = True, **attributes: Any) -> Layer:
    """A layer with random weights; a residual is given with the rows."""
    layer = Layer(**attributes)
    if layer.gated:
        layer.out_features *= 2
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
    return Attributes(
        layer.in_features,
        layer.out_features,
        FORMATS.index(layer.weight_format),
        NORMS.index(layer.norm),
        ACTIVATIONS.index(layer.activation),
        layer.gated,
        EPSILON,
        layer.softcap,
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
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu": lambda v: 0.5 * v * (1 + _erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "relu": lambda v: np.maximum(v, 0),
}


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
    size = packing.BLOCKS[layer.weight_format] or layer.in_features
    blocks = [x[:, i : i + size] for i in range(0, layer.in_features, size)]
    largest = np.abs if layer.weight_format == "int4_block" else largest_of_pairs
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
    rows, step = rounded(layer, normed(layer, x))
    z = rows @ layer.weight.T + layer.inputs.get("bias", 0)
    off = 2 * step * np.abs(layer.weight).max() + 1e-5 * (np.abs(rows) @ np.abs(layer.weight).T) + 1e-6
    function = FUNCTIONS[layer.activation]
    if layer.gated:
        gate, up = np.split(z, 2, axis=1)
        off_gate, off_up = np.split(off, 2, axis=1)
        y, off = (
            function(gate) * up,
            1.2 * (off_gate * np.abs(up) + np.abs(gate) * off_up + off_gate * off_up),
        )
    else:
        y, off = function(z), 1.2 * off
    if layer.softcap:
        y = layer.softcap * np.tanh(y / layer.softcap)
    if residual is not None:
        y = y + residual
    return y, off + 1e-5 * (1 + np.abs(y))
