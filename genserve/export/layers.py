"""Layers: what of a graph holds weights - embedding, linear layers, head, norms - behind one interface.

`decoder_graph.py` writes a model by this interface. `fused_layers.py` implements it in operators of ours, for
the CPU; `standard_layers.py` in operators of ONNX, for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Activation
from genserve.export.graph import Graph
from genserve.export.precision import Format

__all__ = ["Layers", "Norm", "Place", "write_norm"]

Place = Literal["normed", "inner", "head"]   # what of a `Format` has a weight's scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm of rows [hidden]."""

    name: str
    kind: Literal["rms", "layer"]
    epsilon: float
    weight: FloatArray
    bias: FloatArray | None


class Layers(Protocol):
    """Adds layers to a graph; every method returns the name of the value that it made."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def numbers(self) -> Format:
        """The numbers of the export."""

    def vector(self, name: str, value: FloatArray) -> str:
        """Add a norm, a bias or a table in the type of the activations."""

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """Add the look-up of token ids [num_tokens] in a weight [vocab, hidden]: [num_tokens, hidden]."""

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
        """Add `activation(norm(x) @ weight.T + bias) + residual`.

        Args:
            x: a value [rows, K].
            weight: [N, K].
            output: the name of the result [rows, N]; the weights are named after it.
            place: what of the model it is, which tells its numbers.
            bias: [N].
            norm: of the rows of x, before anything else.
            activation: of the outputs.
            gated: the first half of the outputs, through the activation, times the second: [rows, N / 2].
            residual: a value [rows, N].
        """

    def head(
        self, x: str, weight: FloatArray, output: str, *, norm: Norm, softcap: float | None, tied: bool
    ) -> str:
        """Add the scores of all tokens for rows x [rows, hidden]: [rows, vocab], float32.

        Args:
            x: a value [rows, hidden].
            weight: [vocab, hidden].
            output: the name of the result.
            norm: of the rows of x, before.
            softcap: scores s become softcap * tanh(s / softcap).
            tied: the weight is that of the embedding.
        """


def write_norm(layers: Layers, x: str, norm: Norm) -> str:
    """Add a norm by an operator of ONNX; its value is named after it."""
    op = "SimplifiedLayerNormalization" if norm.kind == "rms" else "LayerNormalization"
    inputs = [x, layers.vector(f"{norm.name}.weight", norm.weight)]
    if norm.bias is not None:
        inputs.append(layers.vector(f"{norm.name}.bias", norm.bias))
    return layers.graph.node(op, inputs, norm.name, epsilon=norm.epsilon)
