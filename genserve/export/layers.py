"""Layers: the layers with weights of a graph (embedding, linear layers, head, norms), in two implementations.

`decoder_graph.py` writes a model through `Layers`. `FusedLayers` writes custom operators, for the CPU;
`StandardLayers` writes operators of ONNX, which also run on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from genserve.export.decoder import Activation
from genserve.export.onnx_graph import OnnxGraphBuilder
from genserve.export.quantization import QuantizationScheme
from genserve.kernels.packing import BLOCKS, Quantized, WeightFormat, pack_float32, pack_quantized, quantize
from genserve.sampling.logits_array import FloatArray

LinearKind = Literal["normed", "inner", "head"]   # the field of `QuantizationScheme` for the weight

# The inputs of a graph that describe its sequences, in the order in which operators take them.
SEQUENCE_INPUTS = ("cumulative_sequence_length", "past_seqlens", "block_table")

_ROWS = 1024    # that are quantized together


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm of rows [hidden]."""

    name: str
    kind: Literal["rms", "layer"]
    epsilon: float
    weight: FloatArray
    bias: FloatArray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer: `activation(norm(x) @ weight.T + bias) + residual`, of rows x [rows, K]."""

    x: str                                  # a value [rows, K]
    weight: FloatArray                      # [N, K]
    output: str                             # the name of the result [rows, N]; prefix of its weights
    kind: LinearKind                        # selects the number format of the weight
    bias: FloatArray | None = None          # [N]
    norm: Norm | None = None                # applied to the rows of x first
    activation: Activation | None = None    # applied to the outputs
    gated: bool = False                     # the activated first half times the second half: [rows, N / 2]
    residual: str = ""                      # a value [rows, N]
    softcap: float | None = None            # of a head: outputs s become softcap * tanh(s / softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer of a decoder: attention and MLP, with norms before them and residuals around them."""

    x: str                      # a value [num_tokens, hidden]
    # qkv, output, inner and down; iterated once, so that few of their weights are in memory.
    linears: Iterable[Linear]
    past: Sequence[str]         # the layer's buffers in the KV cache: keys, values, in int8 also their scales
    present: Sequence[str]      # the same, after the layer
    constants: Sequence[str]    # cosines, sines, norms of queries and keys, ALiBi's slopes; "": none
    attributes: Mapping[str, float | str]   # of the operator, except for those of the weights


@dataclass(frozen=True, slots=True)
class Layers(ABC):
    """Adds layers to a graph; every method returns the name of the value that it adds."""

    graph: OnnxGraphBuilder
    scheme: QuantizationScheme

    has_decoder_layers: ClassVar[bool] = False     # whether `decoder_layer` is implemented

    def vector(self, name: str, value: FloatArray) -> str:
        """Add the weight of a norm, a bias or a table, in the type of the activations."""
        return self.graph.weight(name, value.astype(self.scheme.activations))

    def norm(self, x: str, norm: Norm) -> str:
        """Add a norm as an operator of ONNX; its value is named like the norm."""
        op = "SimplifiedLayerNormalization" if norm.kind == "rms" else "LayerNormalization"
        inputs = [x, self.vector(f"{norm.name}.weight", norm.weight)]
        if norm.bias is not None:
            inputs.append(self.vector(f"{norm.name}.bias", norm.bias))
        return self.graph.node(op, inputs, norm.name, epsilon=norm.epsilon)

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """Add the lookup of token ids [num_tokens] in a weight [vocab, hidden]: [num_tokens, hidden]."""
        return self.graph.node("Gather", [self.vector("embedding", weight), ids], output)

    @abstractmethod
    def linear(self, layer: Linear) -> str:
        """Add a linear layer."""

    def decoder_layer(self, layer: DecoderLayer) -> str:
        """Add a layer of a decoder as one operator; its value is named like the output of `down`."""
        raise NotImplementedError

    @abstractmethod
    def head(self, layer: Linear, *, tied: bool) -> str:
        """Add the head, whose outputs are the logits [rows, vocab] float32; `tied`: to the embedding."""


@dataclass(frozen=True, slots=True)
class StandardLayers(Layers):
    """Layers with weights in the type of the activations; a tied head is stored once."""

    def linear(self, layer: Linear) -> str:
        """See `Layers.linear`."""
        x, output = layer.x, layer.output
        if layer.norm:
            x = self.norm(x, layer.norm)
        matrix = self.vector(f"{output}.weight", layer.weight.T)
        x = self.graph.node("MatMul", [x, matrix], f"{output}.product")
        if layer.bias is not None:
            x = self.graph.node("Add", [x, self.vector(f"{output}.bias", layer.bias)], f"{output}.biased")
        if layer.gated:
            assert layer.activation
            gate, up = f"{output}.gate", f"{output}.up"
            self.graph.node("Split", [x], gate, up, axis=-1, num_outputs=2)
            x = self.graph.node("Mul", [self._activated(gate, layer.activation), up], f"{output}.gated")
        elif layer.activation:
            x = self._activated(x, layer.activation)
        if layer.residual:
            x = self.graph.node("Add", [x, layer.residual], f"{output}.sum")
        return x

    def head(self, layer: Linear, *, tied: bool) -> str:
        """See `Layers.head`."""
        assert layer.norm
        output, softcap = layer.output, layer.softcap
        matrix = "embedding" if tied else self.vector("head", layer.weight)
        x = self.norm(layer.x, layer.norm)
        x = self.graph.node("Gemm", [x, matrix], f"{output}.product", transB=1)
        x = self.graph.node("Cast", [x], output if softcap is None else f"{output}.uncapped", to=1)
        if softcap is None:
            return x
        limit = self.graph.constant(f"{output}.cap", np.array(softcap, np.float32))
        x = self.graph.node("Div", [x, limit], f"{output}.scaled")
        x = self.graph.node("Tanh", [x], f"{output}.tanh")
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


@dataclass(frozen=True, slots=True)
class FusedLayers(Layers):
    """Layers of our operators: float32 activations, packed weights; a tied head is packed separately."""

    has_decoder_layers: ClassVar[bool] = True

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """See `Layers.embedding`."""
        weight_format, hidden = self.scheme.embedding, weight.shape[1]
        if weight_format is None:
            return Layers.embedding(self, ids, weight, output)
        block_size = BLOCKS[weight_format]
        assert block_size is not None
        padding = -hidden % block_size

        def packed() -> list[NDArray[Any]]:
            values, scales = _quantized(weight, weight_format)
            return [np.pad(values, ((0, 0), (0, padding))).view(np.uint8) + np.uint8(128), scales]

        packed_weight, scales = self.graph.weights(["embedding", "embedding.scales"], packed)
        rows = self.graph.node(
            "GatherBlockQuantized",
            [packed_weight, ids, scales],
            f"{output}.padded" if padding else output,
            bits=8,
            block_size=block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        return self._first_columns(rows, output, width=hidden) if padding else rows

    def linear(self, layer: Linear) -> str:
        """See `Layers.linear`."""
        norm = layer.norm
        self.graph.node(
            "Linear",
            [layer.x, *self._weights(layer), *self._norm_weights(norm), layer.residual],
            self.graph.value(layer.output, np.float32),
            out_features=layer.weight.shape[0],
            in_features=layer.weight.shape[1],
            weight_format=self._format(layer) or "float32",
            activation=layer.activation or "",
            gated=int(layer.gated),
            softcap=layer.softcap or 0.0,
            **({"norm": norm.kind, "epsilon": norm.epsilon} if norm else {}),
        )
        return layer.output

    def decoder_layer(self, layer: DecoderLayer) -> str:
        """See `Layers.decoder_layer`."""
        inputs = [layer.x, *layer.past[:2], *SEQUENCE_INPUTS, *(layer.past[2:] or ["", ""])]
        norms: list[str] = []
        for linear in layer.linears:
            inputs += self._weights(linear)
            if linear.norm:
                norms += self._norm_weights(linear.norm)
        hidden_size, intermediate_size = linear.weight.shape    # of the last one, down
        return self.graph.node(
            "DecoderLayer",
            [*inputs, *norms, *layer.constants],
            self.graph.value(linear.output, np.float32),
            *layer.present,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            weight_format=self.scheme.normed or "float32",
            residual_weight_format=self.scheme.inner or "float32",
            **layer.attributes,
        )

    def head(self, layer: Linear, *, tied: bool) -> str:
        """See `Layers.head`."""
        del tied
        return self.linear(layer)

    def _norm_weights(self, norm: Norm | None) -> list[str]:
        if norm is None:
            return ["", ""]
        weight = self.vector(f"{norm.name}.weight", norm.weight)
        return [weight, "" if norm.bias is None else self.vector(f"{norm.name}.bias", norm.bias)]

    def _format(self, layer: Linear) -> WeightFormat | None:
        weight_format: WeightFormat | None = getattr(self.scheme, layer.kind)
        return weight_format

    def _weights(self, layer: Linear) -> list[str]:
        """Add the packed weight [N, K], its scales, which float32 does not have, and the bias."""
        name, weight, gated = f"{layer.output}.weight", layer.weight, layer.gated
        weight_format = self._format(layer)
        if weight_format is None:
            names = [*self.graph.weights([name], lambda: [pack_float32(weight, gated=gated)]), ""]
        else:
            names = [
                *self.graph.weights(
                    [name, f"{name}.scales"],
                    lambda: pack_quantized(_quantized(weight, weight_format), weight_format, gated=gated),
                )
            ]
        return [*names, "" if layer.bias is None else self.vector(f"{layer.output}.bias", layer.bias)]

    def _first_columns(self, x: str, output: str, *, width: int) -> str:
        bounds = {"starts": 0, "ends": width, "axes": -1}
        constants = [
            self.graph.constant(f"{output}.{name}", np.array([value])) for name, value in bounds.items()
        ]
        return self.graph.node("Slice", [x, *constants], output)


def _quantized(weight: FloatArray, weight_format: WeightFormat) -> Quantized:
    """Quantize a weight block of rows by block, since the temporaries take several times its memory."""
    parts = [quantize(weight[i : i + _ROWS], weight_format) for i in range(0, len(weight), _ROWS)]
    values, scales = map(np.concatenate, zip(*parts, strict=True))
    return Quantized(values, scales)
