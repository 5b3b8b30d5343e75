"""Decoder graph: the ONNX graph of any decoder, from its description and its weights.

Its inputs and outputs are those that the onnxruntime backend runs:

inputs
    input_ids [batch, sequence] int64; seqlens_k [batch] int32: tokens in the cache + sequence - 1;
    total_len [] int32: the largest of seqlens_k, plus 1; rows [num_rows] int64: which of the
    batch * sequence hidden rows reach the head; past_key_values.{i}.key and .value
    [batch, kv_heads, max_len, head_dim], in the type of the activations.
outputs
    logits [num_rows, vocab] float32; present.{i}.key and .value: the past's buffer, written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from genserve.export.decoder import Attention, Decoder, Rotary, alibi_slopes
from genserve.export.graph import Graph
from genserve.export.layers import Layers, Vocabulary
from genserve.export.weights import DecoderWeights

__all__ = ["write_decoder"]


def write_decoder(
    weights: DecoderWeights, decoder: Decoder, layers: Layers, advance: Callable[[int], None]
) -> None:
    """Add the graph of a decoder; `advance` is called with 1 after each layer.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    writer = _Writer(weights=weights, decoder=decoder, layers=layers, graph=layers.graph)
    writer.inputs()
    vocabulary = layers.vocabulary("embedding", weights.load("embedding.weight"))
    residual = writer.embedded(layers.embedding("input_ids", vocabulary, "embeddings"))
    x = writer.norm(residual, "layers.0.attention.norm")
    for index, attention in enumerate(decoder.attentions):
        last = index + 1 == len(decoder.attentions)
        x = writer.attention(x, attention, index=index)
        if last:
            # Past the last keys and values, only the rows that reach the head matter.
            x, residual = writer.chosen_rows(x), writer.chosen_rows(residual)
        following = "norm" if last else f"layers.{index + 1}.attention.norm"
        x, residual = writer.after_attention(x, residual, f"layers.{index}", following=following)
        advance(1)
    writer.head(x, vocabulary)
    layers.graph.output("logits", np.float32, ("num_rows", decoder.vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Adds the parts of one model; every method answers the name of the value it made."""

    weights: DecoderWeights
    decoder: Decoder
    layers: Layers
    graph: Graph
    tables: dict[Rotary, list[str]] = field(default_factory=dict)

    def inputs(self) -> None:
        """Declare the inputs, and add what all layers share: tables of angles, the bias of ALiBi."""
        self.graph.input("input_ids", np.int64, ("batch", "sequence"))
        self.graph.input("seqlens_k", np.int32, ("batch",))
        self.graph.input("total_len", np.int32, ())
        self.graph.input("rows", np.int64, ("num_rows",))
        for attention in self.decoder.attentions:
            if attention.rotary and attention.rotary not in self.tables:
                names = [f"rotary.{len(self.tables)}.{table}" for table in ("cos", "sin")]
                tables = attention.rotary.tables(self.decoder.context_length)
                self.tables[attention.rotary] = [
                    self.layers.vector(name, table) for name, table in zip(names, tables, strict=True)
                ]
        if self.decoder.alibi or self._has("positions"):
            self._positions()
        if self.decoder.alibi:
            self._alibi()

    def embedded(self, x: str) -> str:
        """What the first layer reads: embeddings, scaled, with positions, normed."""
        if self.decoder.embedding_scale is not None:
            scale = self._scalar("embeddings.scale", self.decoder.embedding_scale)
            x = self.graph.node("Mul", [x, scale], "embeddings.scaled")
        if self._has("positions"):
            table = self.layers.vector("positions.weight", self.weights.load("positions.weight"))
            places = self.graph.node("Gather", [table, "positions"], "embeddings.positions")
            x = self.graph.node("Add", [x, places], "embeddings.placed")
        return self.norm(x, "embedding.norm") if self._has("embedding.norm") else x

    def attention(self, x: str, attention: Attention, *, index: int) -> str:
        """Attention over the KV cache, which it extends: [batch, sequence, heads * head_dim]."""
        decoder, layer = self.decoder, f"layers.{index}.attention"
        past, present = (
            [f"{side}.{index}.{part}" for part in ("key", "value")] for side in ("past_key_values", "present")
        )
        shape = ("batch", decoder.num_kv_heads, "max_len", decoder.head_dim)
        for before, after in zip(past, present, strict=True):
            self.graph.input(before, self.layers.numbers.activations, shape)
            self.graph.output(after, self.layers.numbers.activations, shape)
        packed = self.linear(x, layer, "query", "key", "value", output=f"{layer}.qkv")
        heads = self._normed_heads(packed, layer) if self._has(f"{layer}.query_norm") else [packed, "", ""]
        rotary = self.tables[attention.rotary] if attention.rotary else ["", ""]
        bias = ["", "alibi"] if decoder.alibi else []
        return self.graph.node(
            "GroupQueryAttention",
            [*heads, *past, "seqlens_k", "total_len", *rotary, *bias],
            f"{layer}.heads",
            *present,
            num_heads=decoder.num_heads,
            kv_num_heads=decoder.num_kv_heads,
            scale=decoder.attention_scale,
            do_rotary=int(attention.rotary is not None),
            softcap=decoder.attention_softcap or 0.0,
            local_window_size=attention.window or -1,
        )

    def after_attention(self, x: str, residual: str, layer: str, *, following: str) -> tuple[str, str]:
        """The rest of a layer, to the norm `following` it and the new residual."""
        x = self.linear(x, f"{layer}.attention", "output", in_blocks=True)
        x = self._post_norm(x, f"{layer}.attention")
        if self.decoder.parallel:
            other = self.mlp(self.norm(residual, f"{layer}.mlp.norm"), f"{layer}.mlp")
            both = self.graph.node("Add", [x, other], f"{layer}.both")
            return self.add_norm(both, residual, following)
        x, residual = self.add_norm(x, residual, f"{layer}.mlp.norm")
        x = self._post_norm(self.mlp(x, f"{layer}.mlp"), f"{layer}.mlp")
        return self.add_norm(x, residual, following)

    def mlp(self, x: str, layer: str) -> str:
        """down(f(gate(x)) * up(x)), or down(f(up(x))) where there is no gate."""
        if self._has(f"{layer}.gate"):
            both = self.linear(x, layer, "gate", "up", output=f"{layer}.gate_up")
            gate, raised = f"{layer}.gate", f"{layer}.up"
            self.graph.node("Split", [both], gate, raised, axis=-1, num_outputs=2)
            inner = self.graph.node("Mul", [self._activated(gate), raised], f"{layer}.gated")
        else:
            inner = self._activated(self.linear(x, layer, "up"))
        return self.linear(inner, layer, "down", in_blocks=True)

    def head(self, x: str, embedding: Vocabulary) -> None:
        """The scores of all tokens; a head that is the embedding is stored once, if both have one format."""
        output = "logits" if self.decoder.logits_softcap is None else "logits.uncapped"
        if self.layers.numbers.by_row:
            self.layers.linear(x, self.weights.load("head.weight"), output)
        elif self.decoder.tied:
            self.layers.head(x, embedding, output)
        else:
            own = self.layers.vocabulary("head", self.weights.load("head.weight"))
            self.layers.head(x, own, output)
        self.capped(output)

    def linear(
        self, x: str, layer: str, *roles: str, output: str = "", in_blocks: bool = False
    ) -> str:
        """The linear layers of those roles, their outputs side by side."""
        names = [f"{layer}.{role}" for role in roles]
        weight = np.concatenate([self.weights.load(f"{name}.weight") for name in names])
        biases = [self.weights.optional(f"{name}.bias") for name in names]
        shifts = [bias for bias in biases if bias is not None]
        return self.layers.linear(
            x,
            weight,
            output or names[0],
            bias=np.concatenate(shifts) if shifts else None,
            in_blocks=in_blocks,
        )

    def norm(self, x: str, name: str) -> str:
        """The norm of that name."""
        op = "SimplifiedLayerNormalization" if self.decoder.norm == "rms" else "LayerNormalization"
        inputs = [x, *self._norm_weights(name)]
        return self.graph.node(op, inputs, name, epsilon=self.decoder.norm_epsilon)

    def add_norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        """The norm of `x + residual`, and that sum."""
        op = "SkipSimplifiedLayerNormalization" if self.decoder.norm == "rms" else "SkipLayerNormalization"
        inputs, outputs = [x, residual, *self._norm_weights(name)], (name, "", "", f"{name}.residual")
        self.graph.node(op, inputs, *outputs, epsilon=self.decoder.norm_epsilon)
        return name, outputs[-1]

    def chosen_rows(self, x: str) -> str:
        """The rows of a value [batch, sequence, n] whose logits are asked for: [num_rows, n]."""
        flat = self.graph.node("Flatten", [x], f"{x}.flat", axis=2)
        return self.graph.node("Gather", [flat, "rows"], f"{x}.rows")

    def capped(self, logits: str) -> None:
        """Bend the scores of all tokens, if the decoder does: cap * tanh(x / cap)."""
        cap = self.decoder.logits_softcap
        if cap is not None:
            limit = self.graph.constant("logits.cap", np.array(cap, np.float32))
            small = self.graph.node("Div", [logits, limit], "logits.small")
            bent = self.graph.node("Tanh", [small], "logits.bent")
            self.graph.node("Mul", [bent, limit], "logits")

    def _positions(self) -> None:
        """Add `positions` [batch, sequence] int64: how many tokens stand before each in its row."""
        ids = self.graph.node("Shape", ["input_ids"], "positions.shape", start=1, end=2)
        length = self.graph.node("Squeeze", [ids], "positions.length")
        one = self.graph.constant("positions.one", np.array(1))
        minus_one = self.graph.constant("positions.minus_one", np.array(-1))
        newest = self.graph.node("Sub", [length, one], "positions.newest")
        back = self.graph.node("Range", [newest, minus_one, minus_one], "positions.back")
        ends = self.graph.node("Cast", ["seqlens_k"], "positions.ends", to=7)
        axis = self.graph.constant("positions.axis", np.array([1]))
        column = self.graph.node("Unsqueeze", [ends, axis], "positions.column")
        self.graph.node("Sub", [column, back], "positions")

    def _alibi(self) -> None:
        """Add `alibi` [batch, heads, sequence, total_len]: slope * (position of the key - of the query)."""
        total = self.graph.node("Cast", ["total_len"], "alibi.total", to=7)
        zero, one = (self.graph.constant(f"alibi.{n}", np.array(n)) for n in (0, 1))
        keys = self.graph.node("Range", [zero, total, one], "alibi.keys")
        axes = self.graph.constant("alibi.axes", np.array([1, 3]))
        queries = self.graph.node("Unsqueeze", ["positions", axes], "alibi.queries")
        distance = self.graph.node("Sub", [keys, queries], "alibi.distance")
        slopes = self.layers.vector("alibi.slopes", alibi_slopes(self.decoder.num_heads)[:, None, None])
        numbers = self.graph.node("CastLike", [distance, slopes], "alibi.numbers")
        self.graph.node("Mul", [numbers, slopes], "alibi")

    def _normed_heads(self, packed: str, layer: str) -> list[str]:
        """Queries, keys and values apart; each head of the first two normed by itself."""
        decoder = self.decoder
        sizes = [count * decoder.head_dim for count in (decoder.num_heads, *[decoder.num_kv_heads] * 2)]
        parts = [f"{layer}.{part}" for part in ("query", "key", "value")]
        lengths = self.graph.constant(f"{layer}.sizes", np.array(sizes))
        self.graph.node("Split", [packed, lengths], *parts, axis=-1)
        split = self.graph.constant(f"{layer}.split", np.array([0, 0, -1, decoder.head_dim]))
        joined = self.graph.constant(f"{layer}.joined", np.array([0, 0, -1]))
        normed = []
        for part in parts[:2]:
            heads = self.graph.node("Reshape", [part, split], f"{part}.split")
            heads = self.norm(heads, f"{part}_norm")
            normed.append(self.graph.node("Reshape", [heads, joined], f"{part}.joined"))
        return [*normed, parts[2]]

    def _activated(self, x: str) -> str:
        """The activation of x."""
        match self.decoder.activation:
            case "silu":
                sigmoid = self.graph.node("Sigmoid", [x], f"{x}.sigmoid")
                return self.graph.node("Mul", [x, sigmoid], f"{x}.silu")
            case "gelu":
                return self.graph.node("Gelu", [x], f"{x}.gelu")
            case "gelu_tanh":
                return self.graph.node("Gelu", [x], f"{x}.gelu", approximate="tanh")
            case "relu":
                return self.graph.node("Relu", [x], f"{x}.relu")

    def _post_norm(self, x: str, part: str) -> str:
        return self.norm(x, f"{part}.post_norm") if self._has(f"{part}.post_norm") else x

    def _norm_weights(self, name: str) -> list[str]:
        vectors = {f"{name}.{kind}": self.weights.optional(f"{name}.{kind}") for kind in ("weight", "bias")}
        return [self.layers.vector(role, value) for role, value in vectors.items() if value is not None]

    def _scalar(self, name: str, value: float) -> str:
        return self.layers.vector(name, np.array(value, np.float32))

    def _has(self, part: str) -> bool:
        return f"{part}.weight" in self.weights.roles
