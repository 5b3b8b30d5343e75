"""Decoder graph: writes the ONNX graph of any decoder, from its description and its weights.

A layer is one DecoderLayer node where there is one, or else a PagedAttention node between linear layers.
Attention is MHA, GQA or MQA, by the number of kv_heads.

The graph runs the new tokens of B sequences, packed: the tokens of a sequence are contiguous and in order,
and follow its tokens in the KV cache. The cache is paged: a token at position p of sequence b is in the block
`block_table[b, p // block_size]`.

inputs
    input_ids, position_ids [num_tokens] int64
    cumulative_sequence_length [batch + 1] int32: sequence b has the tokens from entry b up to entry b + 1
    past_seqlens [batch] int32: the number of cached tokens per sequence
    block_table [batch, max_blocks] int32
    logits_indices [num_logits] int64: the tokens whose hidden states reach the head
    attention_metadata [2] int32, on the host, read on a GPU only: upper bounds of the new tokens and of all
    tokens of a sequence
    past_key_values.{i}.key, .value [num_blocks, block_size, kv_heads, head_dim]; in int8 also
    .key_scale, .value_scale [num_blocks, block_size, kv_heads] float32
outputs
    logits [num_logits, vocab] float32
    present.{i}.*: the buffers of the past, written in place

A stage of a pipeline has some of the layers, and the buffers of these alone. All but the first have the
input `hidden_states` instead of `input_ids` and `position_ids`; all but the last have the output
`next_hidden_states` instead of `logits`, and no `logits_indices`. Both are [num_tokens, hidden], in the type
of the activations: what the next layer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, TensorProto, helper

from genserve.export.decoder import Decoder, Rotary, alibi_slopes
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.layers import SEQUENCE_INPUTS, DecoderLayer, Layers, Linear, LinearKind, Norm
from genserve.export.onnx_graph import Dims, OnnxGraphBuilder

_ATTENTION_INPUTS = (
    "query", "key_cache", "value_cache", *SEQUENCE_INPUTS,
    "cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight", "alibi_slopes", "key_scales", "value_scales",
    "attention_metadata",
)
_ATTENTION_OUTPUTS = ("output", "key_cache_out", "value_cache_out")
_ATTRIBUTES = {
    "num_heads": AttributeProto.INT, "kv_num_heads": AttributeProto.INT, "scale": AttributeProto.FLOAT,
    "softcap": AttributeProto.FLOAT, "local_window_size": AttributeProto.INT,
    "do_rotary": AttributeProto.INT, "qk_norm_epsilon": AttributeProto.FLOAT,
}
# The inputs of com.microsoft.PagedAttention in order; "" are those without a counterpart here: separate keys
# and values, a mapping of slots, sinks, scales of a cache in int8.
_BODY_INPUTS = (
    "query", "", "", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "", "", "q_norm_weight", "k_norm_weight", "", "", "attention_metadata",
)


def write_decoder(
    weights: DecoderWeights,
    decoder: Decoder,
    layers: Layers,
    advance: Callable[[int], None],
    *,
    kv_cache: type[np.generic],
    part: range,
) -> None:
    """Add the graph of a decoder, or of a part of it, to that of `layers`.

    Args:
        weights: of the whole decoder.
        decoder: its description.
        layers: writes the layers.
        advance: called with 1 after each layer.
        kv_cache: the type of keys and values in the KV cache.
        part: the layers to add; the first one brings the embedding, and the last one the head.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    writer = _GraphWriter(
        weights=weights, decoder=decoder, layers=layers, graph=layers.graph, kv_cache=kv_cache, part=part
    )
    writer.inputs()
    residual = writer.embedding() if writer.is_first else writer.hidden_states()
    for index in part:
        is_last = index + 1 == len(decoder.attentions)
        if layers.has_decoder_layers and not is_last and not writer.has_post_norm(index):
            residual = writer.decoder_layer(residual, index)
        else:
            heads = writer.attention(residual, index)
            if is_last:
                # After the last keys and values, only the rows that reach the head matter.
                heads, residual = writer.select_rows(heads), writer.select_rows(residual)
            residual = writer.after_attention(heads, residual, f"layers.{index}")
        advance(1)
    if writer.is_last:
        writer.head(residual)
    else:
        writer.pass_on(residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GraphWriter:
    """Adds the parts of one model; every method returns the name of the value that it adds."""

    weights: DecoderWeights
    decoder: Decoder
    layers: Layers
    graph: OnnxGraphBuilder
    kv_cache: type[np.generic]
    part: range
    tables: dict[Rotary | None, list[str]] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether the graph has the embedding."""
        return self.part.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the graph has the head."""
        return self.part.stop == len(self.decoder.attentions)

    def inputs(self) -> None:
        """Declare the inputs except the cache, and add the tables that all layers share."""
        if self.is_first:
            self.graph.input("input_ids", np.int64, ("num_tokens",))
            self.graph.input("position_ids", np.int64, ("num_tokens",))
        self.graph.input("cumulative_sequence_length", np.int32, ("batch_plus_1",))
        self.graph.input("past_seqlens", np.int32, ("batch",))
        self.graph.input("block_table", np.int32, ("batch", "max_blocks"))
        if self.is_last:
            self.graph.input("logits_indices", np.int64, ("num_logits",))
        self.graph.input("attention_metadata", np.int32, (2,))
        used = {self.decoder.attentions[index].rotary for index in self.part}
        for index, rotary in enumerate(self.decoder.rotaries):
            if rotary not in used:
                continue
            cosines, sines = rotary.tables(self.decoder.context_length)
            self.tables[rotary] = [
                self.graph.weight(f"rotary.{index}.cos", cosines),
                self.graph.weight(f"rotary.{index}.sin", sines),
            ]
        if self.decoder.alibi:
            self.graph.weight("alibi.slopes", alibi_slopes(self.decoder.num_heads))
        if {self.kv_cache, self.layers.scheme.activations} == {np.float16} and has_function(self.decoder):
            qk_norm = self._has("layers.0.attention.query_norm")
            self.graph.function(paged_attention_function(rotary=bool(self.tables), qk_norm=qk_norm))

    def embedding(self) -> str:
        """The input of the first layer: embeddings, scaled, plus positions, normed."""
        x = self.layers.embedding("input_ids", self.weights.load("embedding.weight"), "embeddings")
        if self.decoder.embedding_scale is not None:
            scale = self.layers.vector("embeddings.scale", np.array(self.decoder.embedding_scale, np.float32))
            x = self.graph.node("Mul", [x, scale], "embeddings.scaled")
        if self._has("positions"):
            table = self.layers.vector("positions.weight", self.weights.load("positions.weight"))
            positions = self.graph.node("Gather", [table, "position_ids"], "embeddings.positions")
            x = self.graph.node("Add", [x, positions], "embeddings.positioned")
        return self.layers.norm(x, self.norm("embedding.norm")) if self._has("embedding.norm") else x

    def hidden_states(self) -> str:
        """The input of a stage after the first: the output of the layers before it."""
        return self.graph.input("hidden_states", self.layers.scheme.activations, self._hidden)

    def pass_on(self, x: str) -> None:
        """Declare the output of a stage before the last."""
        self.graph.node("Identity", [x], "next_hidden_states")
        self.graph.output("next_hidden_states", self.layers.scheme.activations, self._hidden)

    def decoder_layer(self, x: str, index: int) -> str:
        """A layer as one operator: the new residual."""
        layer = f"layers.{index}"
        past, present = self._cache(index)

        def linears() -> Iterator[Linear]:
            yield self._qkv(x, layer)
            yield self._linear("", f"{layer}.attention", "output", output="output", kind="inner")
            yield self._inner_mlp(x, f"{layer}.mlp")
            yield self._linear("", f"{layer}.mlp", "down", output="down", kind="inner")

        return self.layers.decoder_layer(
            DecoderLayer(
                x=x,
                linears=linears(),
                past=past,
                present=present,
                constants=self._attention_constants(index),
                attributes={
                    **self._attention_attributes(index),
                    "head_dim": self.decoder.head_dim,
                    "parallel": int(self.decoder.parallel),
                    "norm": self.decoder.norm,
                    "epsilon": self.decoder.norm_epsilon,
                    "activation": self.decoder.activation,
                    "gated": int(self._has(f"{layer}.mlp.gate")),
                },
            )
        )

    def attention(self, x: str, index: int) -> str:
        """Attention over the KV cache, to which it appends: [num_tokens, heads * head_dim]."""
        packed = self.layers.linear(self._qkv(x, f"layers.{index}"))
        past, present = self._cache(index)
        output = self.graph.value(f"layers.{index}.attention.heads", self.layers.scheme.activations)
        inputs = [
            packed,
            *past[:2],
            *SEQUENCE_INPUTS,
            *self._attention_constants(index),
            *(past[2:] or ["", ""]),
            "attention_metadata",
        ]
        attributes = self._attention_attributes(index)
        return self.graph.node("PagedAttention", inputs, output, *present, **attributes)

    def after_attention(self, heads: str, residual: str, layer: str) -> str:
        """The rest of a layer, up to the new residual."""
        attended = self._add_residual(f"{layer}.attention", heads, residual, "output")
        # The MLP of a parallel layer reads the input of its attention.
        x = residual if self.decoder.parallel else attended
        inner = self.layers.linear(self._inner_mlp(x, f"{layer}.mlp"))
        return self._add_residual(f"{layer}.mlp", inner, attended, "down")

    def has_post_norm(self, index: int) -> bool:
        """Whether the outputs of a layer's attention or MLP are normed before they are added."""
        return any(self._has(f"layers.{index}.{part}.post_norm") for part in ("attention", "mlp"))

    def head(self, x: str) -> None:
        """Add the logits, and declare them as output."""
        head = Linear(
            x=x,
            weight=self.weights.load("head.weight"),
            output="logits",
            kind="head",
            norm=self.norm("norm"),
            softcap=self.decoder.logits_softcap,
        )
        self.layers.head(head, tied=self.decoder.tied and self.is_first)
        self.graph.output("logits", np.float32, ("num_logits", self.decoder.vocab_size))

    def norm(self, name: str) -> Norm:
        """The description of a norm."""
        return Norm(
            name=name,
            kind=self.decoder.norm,
            epsilon=self.decoder.norm_epsilon,
            weight=self.weights.load(f"{name}.weight"),
            bias=self.weights.optional(f"{name}.bias"),
        )

    def select_rows(self, x: str) -> str:
        """The rows of a value [num_tokens, n] whose logits are requested: [num_logits, n]."""
        return self.graph.node("Gather", [x, "logits_indices"], f"{x}.rows")

    @property
    def _hidden(self) -> Dims:
        return "num_tokens", len(self.weights.load(f"layers.{self.part.start}.attention.output.weight"))

    def _cache(self, index: int) -> tuple[list[str], list[str]]:
        """Declare the buffers of a layer's cache: the names of its inputs and outputs."""
        scales: Dims = ("num_blocks", "block_size", self.decoder.num_kv_heads)
        values: Dims = (*scales, self.decoder.head_dim)
        buffers: dict[str, tuple[type[np.generic], Dims]] = {
            "key": (self.kv_cache, values), "value": (self.kv_cache, values)
        }
        if self.kv_cache is np.int8:
            buffers |= {"key_scale": (np.float32, scales), "value_scale": (np.float32, scales)}
        past = [
            self.graph.input(f"past_key_values.{index}.{part}", *buffer) for part, buffer in buffers.items()
        ]
        present = [f"present.{index}.{part}" for part in buffers]
        for name, buffer in zip(present, buffers.values(), strict=True):
            self.graph.output(name, *buffer)
        return past, present

    def _attention_attributes(self, index: int) -> dict[str, float]:
        attention = self.decoder.attentions[index]
        return {
            "num_heads": self.decoder.num_heads,
            "kv_num_heads": self.decoder.num_kv_heads,
            "scale": self.decoder.attention_scale,
            "do_rotary": int(attention.rotary is not None),
            "softcap": self.decoder.attention_softcap or 0.0,
            "local_window_size": attention.window or -1,
            "qk_norm_epsilon": self.decoder.norm_epsilon,
        }

    def _attention_constants(self, index: int) -> list[str]:
        """Tables of cosines and sines, norms of queries and keys, ALiBi's slopes; "" for absent ones."""
        # A layer without rotary positions gets another's tables, which the function's body needs.
        rotary = self.decoder.attentions[index].rotary
        return [
            *(self.tables.get(rotary) or next(iter(self.tables.values()), ["", ""])),
            *(self._fp32(f"layers.{index}.attention.{part}_norm.weight") for part in ("query", "key")),
            "alibi.slopes" if self.decoder.alibi else "",
        ]

    def _qkv(self, x: str, layer: str) -> Linear:
        """Queries, keys and values, concatenated."""
        part = f"{layer}.attention"
        norm = self.norm(f"{part}.norm")
        return self._linear(x, part, "query", "key", "value", output="qkv", kind="normed", norm=norm)

    def _inner_mlp(self, x: str, layer: str) -> Linear:
        """f(gate(x)) * up(x), or f(up(x)) without a gate."""
        gated = self._has(f"{layer}.gate")
        return self._linear(
            x,
            layer,
            *(["gate"] if gated else []),
            "up",
            output="inner",
            kind="normed",
            norm=self.norm(f"{layer}.norm"),
            activation=self.decoder.activation,
            gated=gated,
        )

    def _add_residual(self, part: str, x: str, residual: str, role: str) -> str:
        """The last linear layer of attention or MLP, its norm if the decoder has one, plus the residual."""
        has_norm = self._has(f"{part}.post_norm")
        linear = self._linear(x, part, role, output=role, kind="inner", residual="" if has_norm else residual)
        x = self.layers.linear(linear)
        if not has_norm:
            return x
        normed = self.layers.norm(x, self.norm(f"{part}.post_norm"))
        return self.graph.node("Add", [normed, residual], f"{part}.residual")

    def _linear(
        self, x: str, part: str, *roles: str, output: str, kind: LinearKind, **options: Any
    ) -> Linear:
        """Describe linear layers as one, with their outputs concatenated."""
        names = [f"{part}.{role}" for role in roles]
        biases = [bias for name in names if (bias := self.weights.optional(f"{name}.bias")) is not None]
        return Linear(
            x=x,
            weight=np.concatenate([self.weights.load(f"{name}.weight") for name in names]),
            bias=np.concatenate(biases) if biases else None,
            output=f"{part}.{output}",
            kind=kind,
            **options,
        )

    def _fp32(self, role: str) -> str:
        """The tensor of a role in float32; an empty name if the decoder does not have it."""
        return self.graph.weight(role, self.weights.load(role)) if role in self.weights.roles else ""

    def _has(self, part: str) -> bool:
        return f"{part}.weight" in self.weights.roles


def has_function(decoder: Decoder) -> bool:
    """Whether com.microsoft.PagedAttention supports the attention of a decoder, with float16 activations.

    Source: onnxruntime/contrib_ops/cpu/bert/paged_attention_helper.h and rotary_helper.h.
    """
    rotary_dims = [2 * len(rotary.frequencies) for rotary in decoder.rotaries]
    return not decoder.alibi and decoder.head_dim % 8 == 0 and all(dims % 16 == 0 for dims in rotary_dims)


def paged_attention_function(*, rotary: bool, qk_norm: bool) -> FunctionProto:
    """Return an ONNX function for `genserve.PagedAttention` whose body is com.microsoft.PagedAttention.

    ONNX Runtime has the latter for CUDA. Sessions with genserve's library use its kernel, others the body.

    Args:
        rotary: whether the function is called with tables of cosines and sines.
        qk_norm: whether it is called with norms of queries and keys.
    """
    # Our operator reads tables and norms in float32, the other one in the type of the query.
    vectors = ["cos_cache", "sin_cache"] if rotary else []
    vectors += ["q_norm_weight", "k_norm_weight"] if qk_norm else []
    casts = [helper.make_node("Cast", [name], [f"{name}_fp16"], to=TensorProto.FLOAT16) for name in vectors]
    inputs = [f"{name}_fp16" if name in vectors else name for name in _BODY_INPUTS]
    body = helper.make_node("PagedAttention", inputs, _ATTENTION_OUTPUTS, domain="com.microsoft")
    body.attribute.extend(
        AttributeProto(name=name, type=kind, ref_attr_name=name) for name, kind in _ATTRIBUTES.items()
    )
    return helper.make_function(
        "genserve",
        "PagedAttention",
        _ATTENTION_INPUTS,
        _ATTENTION_OUTPUTS,
        [*casts, body],
        [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        attributes=list(_ATTRIBUTES),
    )
