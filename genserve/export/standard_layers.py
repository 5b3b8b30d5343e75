"""Standard layers: every layer in operators of ONNX, which run on a GPU too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Activation
from genserve.export.graph import Graph
from genserve.export.layers import Norm, Place, write_norm
from genserve.export.precision import Format

__all__ = ["StandardLayers"]


@dataclass(frozen=True, slots=True)
class StandardLayers:
    """Implements `Layers` with weights in the type of the activations; a tied head is stored once."""

    graph: Graph
    numbers: Format

    def vector(self, name: str, value: FloatArray) -> str:
        """See `Layers.vector`."""
        return self.graph.weight(name, value.astype(self.numbers.activations))

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """See `Layers.embedding`."""
        return self.graph.node("Gather", [self.vector("embedding", weight), ids], output)

    def linear(
        self,
        x: str,
        weight: FloatArray,
        output: str,
        *,
        place: Place,
        bias: FloatArray | None = None,
        norm: Norm | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: str = "",
    ) -> str:
        """See `Layers.linear`."""
        del place
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
