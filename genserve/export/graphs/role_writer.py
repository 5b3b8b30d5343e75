"""Role writer: adds linear layers, norms and tensors of a decoder to its graph, by their roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from genserve.export.checkpoints.rows import Rows, joined_rows
from genserve.export.checkpoints.stored_weight import StoredWeight, joined
from genserve.export.decoder import Attention, Decoder
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.graphs.layers import Layers, Linear, LinearKind, Norm
from genserve.export.graphs.onnx_graph import OnnxGraphBuilder
from genserve.sampling.logits_array import FloatArray

# Whether a weight has all numbers of the checkpoint, by role.
Kept = dict[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWriter:
    """What the writers of all parts of a decoder share.

    Attributes:
        weights: the weights of the whole decoder.
        decoder: its sizes and options.
        layers: writes layers with weights.
        part: the layers that the graph has.
        kept: the weights that were added.
    """

    weights: DecoderWeights
    decoder: Decoder
    layers: Layers
    part: range
    kept: Kept = field(default_factory=dict)

    @property
    def graph(self) -> OnnxGraphBuilder:
        """The graph."""
        return self.layers.graph

    @property
    def is_first(self) -> bool:
        """Whether the graph has the embedding."""
        return self.part.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the graph has the head."""
        return self.part.stop == len(self.decoder.layers)

    @property
    def selecting_layer(self) -> int | None:
        """The layer after whose token mixers only the rows that reach the head matter; None: it is not here.

        It is the last one that writes keys, values or states; those behind it only read caches.
        """
        return max(self.decoder.last_writer, self.part.start) if self.is_last else None

    @property
    def attentions(self) -> list[Attention]:
        """The attention of the graph's layers, where they have one."""
        layers = self.decoder.layers[self.part.start : self.part.stop]
        return [layer.attention for layer in layers if layer.attention is not None]

    def attention_of(self, index: int) -> Attention:
        """The attention of a layer that has one."""
        attention = self.decoder.layers[index].attention
        assert attention is not None
        return attention

    def has(self, part: str) -> bool:
        """Whether the decoder has the weight of a part."""
        return f"{part}.weight" in self.weights.roles

    def norm(self, name: str, *, num_groups: int = 1) -> Norm:
        """The description of a norm, of all columns or of groups of them."""
        return Norm(
            name=name,
            kind=self.decoder.norm,
            epsilon=self.decoder.norm_epsilon,
            weight=self.weights.load(f"{name}.weight"),
            bias=self.weights.optional(f"{name}.bias"),
            num_groups=num_groups,
            smoothing=self.weights.smoothing(name),
        )

    def pre_norm(self, part: str) -> dict[str, Any]:
        """The norm before attention or MLP, and the kind of the linear layers that read it."""
        # Without a norm, rows are as heavy-tailed as the residual. One that a residual has is not smoothed.
        if not self.has(f"{part}.norm"):
            return {"kind": "inner"}
        kind = "inner" if self.has(f"{part}.laurel_left") else "normed"
        return {"kind": kind, "norm": self.norm(f"{part}.norm")}

    def linear(
        self, x: str, part: str, *roles: str, output: str, kind: LinearKind, **options: Any
    ) -> Linear:
        """Describe several linear layers as one, with their outputs concatenated."""
        names, is_gated = [f"{part}.{role}" for role in roles], options.get("gated", False)
        biases = [bias for name in names if (bias := self.weights.optional(f"{name}.bias")) is not None]
        if biases and len(biases) < len(names):
            biases = [self._bias_or_zeros(name) for name in names]
        return Linear(
            x=x,
            weight=self.weights.rows(f"{names[0]}.weight")
            if kind == "exact"
            else self.weight([f"{name}.weight" for name in names], gated=is_gated),
            bias=np.concatenate(biases) if biases else None,
            output=f"{part}.{output}",
            kind=kind,
            **options,
        )

    def in_groups(self, x: str, role: str, count: int) -> str:
        """The products of groups of columns, each with its rows of a weight."""
        weight = self.weights.rows(f"{role}.weight")
        height = weight.shape[0] // count

        def rows(group: int) -> Rows[np.float32]:
            start = group * height
            return Rows(
                (height, weight.shape[1]), lambda first, last: weight.read(start + first, start + last)
            )

        return self.layers.grouped_linear(
            [Linear(x=x, weight=rows(group), output=role, kind="inner") for group in range(count)]
        )

    def weight(self, roles: list[str], *, gated: bool = False) -> Rows[np.float32] | StoredWeight:
        """The weights of several roles, one after the other, in blocks if these can hold them."""
        if self.layers.scheme.blocks:
            parts = [
                self.weights.rows(role) if (rows := self.weights.stored(role)) is None else rows
                for role in roles
            ]
            weight = joined(parts, gated=gated)
            are_exact = weight.are_exact if weight else [False] * len(roles)
            for role, is_exact in zip(roles, are_exact, strict=True):
                is_embedding = role == "head.weight" and self.decoder.tied
                self.kept["embedding.weight" if is_embedding else role] = is_exact
            if weight is not None:
                return weight
        return joined_rows([self.weights.rows(role) for role in roles])

    def fp32(self, role: str) -> str:
        """The tensor of a role in float32; an empty name if the decoder does not have it."""
        return self.graph.weight(role, self.weights.load(role)) if role in self.weights.roles else ""

    def number(self, name: str, value: float) -> str:
        """A number in the type of the activations."""
        return self.layers.vector(name, np.array(value, np.float32))

    def split(self, x: str, names: list[str], sizes: list[int]) -> None:
        """Split the columns of a value."""
        self.graph.node("Split", [x, self.graph.constant(f"{x}.sizes", np.array(sizes))], *names, axis=-1)

    def selected(self, x: str) -> str:
        """The rows of a value [num_tokens, ...] whose logits are requested: [num_logits, ...]."""
        return self.graph.node("Gather", [x, "logits_indices"], f"{x}.rows")

    def of_rows(self, name: str, index: int) -> str:
        """An input that describes tokens or their sequences, for the rows that a layer runs."""
        return f"{name}.rows" if self.selecting_layer is not None and index > self.selecting_layer else name

    def _bias_or_zeros(self, name: str) -> FloatArray:
        bias = self.weights.optional(f"{name}.bias")
        return np.zeros(self.weights.rows(f"{name}.weight").shape[0], np.float32) if bias is None else bias
