"""Layers: the layers with weights of a graph (embedding, linear layers, head, norms), in two implementations.

`decoder_graph.py` writes a model through `Layers`. `FusedLayers` writes our custom operators, for the CPU;
`StandardLayers` writes operators of ONNX, which also run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Activation
from genserve.export.onnx_graph import OnnxGraphBuilder
from genserve.export.precision import QuantizationScheme
from genserve.kernels.packing import (
    BLOCKS,
    Quantized,
    WeightFormat,
    pack_float32,
    pack_quantized,
    quantize,
)

__all__ = ["FusedLayers", "Layers", "LinearKind", "Norm", "StandardLayers", "write_norm"]

LinearKind = Literal["normed", "inner", "head"]   # the field of `QuantizationScheme` for the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm of rows [hidden]."""

    name: str
    kind: Literal["rms", "layer"]
    epsilon: float
    weight: FloatArray
    bias: FloatArray | None


class Layers(Protocol):
    """Adds layers to a graph; every method returns the name of the value that it adds."""

    @property
    def graph(self) -> OnnxGraphBuilder:
        """The graph to which layers are added."""

    @property
    def scheme(self) -> QuantizationScheme:
        """The number formats of weights and activations."""

    def vector(self, name: str, value: FloatArray) -> str:
        """Add the weight of a norm, a bias or a table, in the type of the activations."""

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """Add the lookup of token ids [num_tokens] in a weight [vocab, hidden]: [num_tokens, hidden]."""

    def linear(
        self,
        x: str,
        weight: FloatArray,
        output: str,
        *,
        kind: LinearKind,
        bias: FloatArray | None = None,
        norm: Norm | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: str = "",
    ) -> str:
        """Add `activation(norm(x) @ weight.T + bias) + residual`.

        Args:
            x: a value [rows, K].
            weight: [N, K].
            output: the name of the result [rows, N]; the weights are named after it.
            kind: selects the number format of the weight.
            bias: [N].
            norm: applied to the rows of x first.
            activation: applied to the outputs.
            gated: multiply the activated first half of the outputs by the second half: [rows, N / 2].
            residual: a value [rows, N].
        """

    def head(
        self, x: str, weight: FloatArray, output: str, *, norm: Norm, softcap: float | None, tied: bool
    ) -> str:
        """Add the logits of rows x [rows, hidden]: [rows, vocab] float32.

        Args:
            x: a value [rows, hidden].
            weight: [vocab, hidden].
            output: the name of the result.
            norm: applied to the rows of x first.
            softcap: logits s become softcap * tanh(s / softcap).
            tied: the weight is that of the embedding.
        """


def write_norm(layers: Layers, x: str, norm: Norm) -> str:
    """Add a norm as an operator of ONNX, and return its value, named like the norm."""
    op = "SimplifiedLayerNormalization" if norm.kind == "rms" else "LayerNormalization"
    inputs = [x, layers.vector(f"{norm.name}.weight", norm.weight)]
    if norm.bias is not None:
        inputs.append(layers.vector(f"{norm.name}.bias", norm.bias))
    return layers.graph.node(op, inputs, norm.name, epsilon=norm.epsilon)


@dataclass(frozen=True, slots=True)
class StandardLayers:
    """Implements `Layers` with weights in the type of the activations; a tied head is stored once."""

    graph: OnnxGraphBuilder
    scheme: QuantizationScheme

    def vector(self, name: str, value: FloatArray) -> str:
        """See `Layers.vector`."""
        return self.graph.weight(name, value.astype(self.scheme.activations))

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """See `Layers.embedding`."""
        return self.graph.node("Gather", [self.vector("embedding", weight), ids], output)

    def linear(
        self,
        x: str,
        weight: FloatArray,
        output: str,
        *,
        kind: LinearKind,
        bias: FloatArray | None = None,
        norm: Norm | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: str = "",
    ) -> str:
        """See `Layers.linear`."""
        del kind
        if norm:
            x = write_norm(self, x, norm)
        x = self.graph.node("MatMul", [x, self.vector(f"{output}.weight", weight.T)], f"{output}.product")
        if bias is not None:
            x = self.graph.node("Add", [x, self.vector(f"{output}.bias", bias)], f"{output}.shifted")
        if gated:
            assert activation
            gate, raised = f"{output}.gate", f"{output}.raised"
            self.graph.node("Split", [x], gate, raised, axis=-1, num_outputs=2)
            x = self.graph.node("Mul", [self._activated(gate, activation), raised], f"{output}.gated")
        elif activation:
            x = self._activated(x, activation)
        if residual:
            x = self.graph.node("Add", [x, residual], f"{output}.sum")
        return x

    def head(
        self, x: str, weight: FloatArray, output: str, *, norm: Norm, softcap: float | None, tied: bool
    ) -> str:
        """See `Layers.head`."""
        matrix = "embedding" if tied else self.vector("head", weight)
        x = self.graph.node("Gemm", [write_norm(self, x, norm), matrix], f"{output}.product", transB=1)
        x = self.graph.node("Cast", [x], output if softcap is None else f"{output}.uncapped", to=1)
        if softcap is None:
            return x
        limit = self.graph.constant(f"{output}.cap", np.array(softcap, np.float32))
        x = self.graph.node("Tanh", [self.graph.node("Div", [x, limit], f"{output}.small")], f"{output}.bent")
        return self.graph.node("Mul", [x, limit], output)

    def _activated(self, x: str, activation: Activation) -> str:
        match activation:
            case "silu":
                sigmoid = self.graph.node("Sigmoid", [x], f"{x}.sigmoid")
                return self.graph.node("Mul", [x, sigmoid], f"{x}.silu")
            case "gelu":
                return self.graph.node("Gelu", [x], f"{x}.gelu")
            case "gelu_tanh":
                return self.graph.node("Gelu", [x], f"{x}.gelu", approximate="tanh")
            case "relu":
                return self.graph.node("Relu", [x], f"{x}.relu")


_ROWS = 1024


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Implements `Layers` with `genserve.Linear`: activations in float32, packed weights."""

    graph: OnnxGraphBuilder
    scheme: QuantizationScheme

    def vector(self, name: str, value: FloatArray) -> str:
        """See `Layers.vector`."""
        return self.graph.weight(name, value.astype(np.float32))

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """See `Layers.embedding`."""
        weight_format, hidden = self.scheme.embedding, weight.shape[1]
        if weight_format is None:
            return self.graph.node("Gather", [self.vector("embedding", weight), ids], output)
        block_size = BLOCKS[weight_format]
        assert block_size is not None
        values, scales = _quantized(weight, weight_format)
        padding = -hidden % block_size
        offset = np.pad(values, ((0, 0), (0, padding))).view(np.uint8) + np.uint8(128)
        rows = self.graph.node(
            "GatherBlockQuantized",
            [self.graph.weight("embedding", offset), ids, self.graph.weight("embedding.scales", scales)],
            f"{output}.padded" if padding else output,
            bits=8,
            block_size=block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        return self._first_columns(rows, output, width=hidden) if padding else rows

    def linear(
        self,
        x: str,
        weight: FloatArray,
        output: str,
        *,
        kind: LinearKind,
        bias: FloatArray | None = None,
        norm: Norm | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: str = "",
        softcap: float | None = None,
    ) -> str:
        """See `Layers.linear`; `softcap` caps the outputs."""
        weight_format: WeightFormat | None = getattr(self.scheme, kind)
        inputs = [
            x,
            *self._packed(f"{output}.weight", weight, weight_format, gated=gated),
            "" if bias is None else self.vector(f"{output}.bias", bias),
            *self._norm_weights(norm),
            residual,
        ]
        self.graph.node(
            "Linear",
            inputs,
            self.graph.value(output, np.float32),
            out_features=weight.shape[0],
            in_features=weight.shape[1],
            weight_format=weight_format or "float32",
            activation=activation or "",
            gated=int(gated),
            softcap=softcap or 0.0,
            **({"norm": norm.kind, "epsilon": norm.epsilon} if norm else {}),
        )
        return output

    def head(
        self, x: str, weight: FloatArray, output: str, *, norm: Norm, softcap: float | None, tied: bool
    ) -> str:
        """See `Layers.head`; a tied weight is stored a second time, packed for the product."""
        del tied
        return self.linear(x, weight, output, kind="head", norm=norm, softcap=softcap)

    def _norm_weights(self, norm: Norm | None) -> list[str]:
        if norm is None:
            return ["", ""]
        weight = self.vector(f"{norm.name}.weight", norm.weight)
        return [weight, "" if norm.bias is None else self.vector(f"{norm.name}.bias", norm.bias)]

    def _packed(
        self, name: str, weight: FloatArray, weight_format: WeightFormat | None, *, gated: bool
    ) -> list[str]:
        """Add a packed weight [N, K] and its scales, which float32 does not have."""
        if weight_format is None:
            return [self.graph.weight(name, pack_float32(weight, gated=gated)), ""]
        packed = pack_quantized(_quantized(weight, weight_format), weight_format, gated=gated)
        return [
            self.graph.weight(name, packed.weight), self.graph.weight(f"{name}.scales", packed.scales)
        ]

    def _first_columns(self, x: str, output: str, *, width: int) -> str:
        bounds = {"starts": 0, "ends": width, "axes": -1}
        constants = [
            self.graph.constant(f"{output}.{name}", np.array([value])) for name, value in bounds.items()
        ]
        return self.graph.node("Slice", [x, *constants], output)


def _quantized(weight: FloatArray, weight_format: WeightFormat) -> Quantized:
    """Quantise a weight block of rows by block, since the temporaries take several times its memory."""
    parts = [quantize(weight[i : i + _ROWS], weight_format) for i in range(0, len(weight), _ROWS)]
    values, scales = map(np.concatenate, zip(*parts, strict=True))
    return Quantized(values, scales)
