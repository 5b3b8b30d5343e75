"""Decoder graph: the ONNX graph of any decoder, from its description and its weights.

It runs T tokens of B sequences, packed: those of a sequence together and in order, behind what the KV cache
has of it. The cache lies in blocks; a token at position p is in the block `block_table[b, p // block_size]`.

inputs
    input_ids, position_ids [num_tokens] int64
    cumulative_sequence_length [batch + 1] int32: sequence b has the tokens from its entry up to the next
    past_seqlens [batch] int32: tokens of each in the cache
    block_table [batch, max_blocks] int32
    logits_indices [num_logits] int64: the tokens whose hidden rows reach the head
    attention_metadata [2] int32, on the host: no sequence has more new tokens than the first, none more
    tokens than the second; on a GPU alone somebody reads them
    past_key_values.{i}.key, .value [num_blocks, block_size, kv_heads, head_dim]; if they are int8 also
    .key_scale, .value_scale [num_blocks, block_size, kv_heads] float32
outputs
    logits [num_logits, vocab] float32
    present.{i}.*: the past's buffers, written in place
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import AttributeProto, FunctionProto, TensorProto, helper

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Attention, Decoder, Rotary, alibi_slopes
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.layers import Layers, Norm, write_norm
from genserve.export.onnx_graph import Dims, Graph

__all__ = ["has_function", "paged_attention_function", "write_decoder"]


def write_decoder(
    weights: DecoderWeights,
    decoder: Decoder,
    layers: Layers,
    advance: Callable[[int], None],
    *,
    kv_cache: type[np.generic],
) -> None:
    """Add the graph of a decoder; `advance` is called with 1 after each layer.

    Args:
        weights: of the decoder.
        decoder: what it computes.
        layers: how it is written.
        advance: see above.
        kv_cache: the type of keys and values in the cache.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    writer = _Writer(weights=weights, decoder=decoder, layers=layers, graph=layers.graph, kv_cache=kv_cache)
    writer.inputs()
    residual = writer.embedded()
    for index, attention in enumerate(decoder.attentions):
        heads = writer.attention(residual, attention, index=index)
        if index + 1 == len(decoder.attentions):
            # Past the last keys and values, only the rows that reach the head matter.
            heads, residual = writer.chosen_rows(heads), writer.chosen_rows(residual)
        residual = writer.after_attention(heads, residual, f"layers.{index}")
        advance(1)
    writer.head(residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Adds the parts of one model; every method returns the name of the value it made."""

    weights: DecoderWeights
    decoder: Decoder
    layers: Layers
    graph: Graph
    kv_cache: type[np.generic]
    tables: dict[Rotary | None, list[str]] = field(default_factory=dict)

    def inputs(self) -> None:
        """Declare the inputs but for the cache, and add what all layers share."""
        self.graph.input("input_ids", np.int64, ("num_tokens",))
        self.graph.input("position_ids", np.int64, ("num_tokens",))
        self.graph.input("cumulative_sequence_length", np.int32, ("batch_plus_1",))
        self.graph.input("past_seqlens", np.int32, ("batch",))
        self.graph.input("block_table", np.int32, ("batch", "max_blocks"))
        self.graph.input("logits_indices", np.int64, ("num_logits",))
        self.graph.input("attention_metadata", np.int32, (2,))
        for attention in self.decoder.attentions:
            if attention.rotary and attention.rotary not in self.tables:
                names = [f"rotary.{len(self.tables)}.{table}" for table in ("cos", "sin")]
                tables = attention.rotary.tables(self.decoder.context_length)
                self.tables[attention.rotary] = [
                    self.graph.weight(name, table) for name, table in zip(names, tables, strict=True)
                ]
        if self.decoder.alibi:
            self.graph.weight("alibi.slopes", alibi_slopes(self.decoder.num_heads))
        if {self.kv_cache, self.layers.numbers.activations} == {np.float16} and has_function(self.decoder):
            qk_norm = self._has("layers.0.attention.query_norm")
            self.graph.function(paged_attention_function(rotary=bool(self.tables), qk_norm=qk_norm))

    def embedded(self) -> str:
        """What the first layer reads: embeddings, scaled, with positions, normed."""
        x = self.layers.embedding("input_ids", self.weights.load("embedding.weight"), "embeddings")
        if self.decoder.embedding_scale is not None:
            scale = self.layers.vector("embeddings.scale", np.array(self.decoder.embedding_scale, np.float32))
            x = self.graph.node("Mul", [x, scale], "embeddings.scaled")
        if self._has("positions"):
            table = self.layers.vector("positions.weight", self.weights.load("positions.weight"))
            places = self.graph.node("Gather", [table, "position_ids"], "embeddings.positions")
            x = self.graph.node("Add", [x, places], "embeddings.placed")
        return write_norm(self.layers, x, self.norm("embedding.norm")) if self._has("embedding.norm") else x

    def attention(self, x: str, attention: Attention, *, index: int) -> str:
        """Attention over the KV cache, into which it writes: [num_tokens, heads * head_dim]."""
        decoder, layer = self.decoder, f"layers.{index}.attention"
        weight, bias = self._side_by_side(layer, "query", "key", "value")
        packed = self.layers.linear(
            x, weight, f"{layer}.qkv", place="normed", bias=bias, norm=self.norm(f"{layer}.norm")
        )
        past, present = self._cache(index)
        # A layer without rotary positions has the tables of another, for the sake of the function's body.
        tables = self.tables.get(attention.rotary) or next(iter(self.tables.values()), ["", ""])
        output = self.graph.value(f"{layer}.heads", self.layers.numbers.activations)
        inputs = [
            packed,
            *past[:2],
            "cumulative_sequence_length",
            "past_seqlens",
            "block_table",
            *tables,
            *(self._fp32(f"{layer}.{part}_norm.weight") for part in ("query", "key")),
            "alibi.slopes" if decoder.alibi else "",
            *(past[2:] or ["", ""]),
            "attention_metadata",
        ]
        return self.graph.node(
            "PagedAttention",
            inputs,
            output,
            *present,
            num_heads=decoder.num_heads,
            kv_num_heads=decoder.num_kv_heads,
            scale=decoder.attention_scale,
            do_rotary=int(attention.rotary is not None),
            softcap=decoder.attention_softcap or 0.0,
            local_window_size=attention.window or -1,
            qk_norm_epsilon=decoder.norm_epsilon,
        )

    def after_attention(self, heads: str, residual: str, layer: str) -> str:
        """The rest of a layer: the new residual."""
        attended = self._added(f"{layer}.attention", heads, residual, "output")
        # The MLP of a parallel layer reads what the attention has read.
        x = residual if self.decoder.parallel else attended
        return self._added(f"{layer}.mlp", self._inside_of_mlp(x, f"{layer}.mlp"), attended, "down")

    def head(self, x: str) -> None:
        """The scores of all tokens."""
        self.layers.head(
            x,
            self.weights.load("head.weight"),
            "logits",
            norm=self.norm("norm"),
            softcap=self.decoder.logits_softcap,
            tied=self.decoder.tied,
        )
        self.graph.output("logits", np.float32, ("num_logits", self.decoder.vocab_size))

    def norm(self, name: str) -> Norm:
        """The norm of that name, to be added to the graph."""
        return Norm(
            name=name,
            kind=self.decoder.norm,
            epsilon=self.decoder.norm_epsilon,
            weight=self.weights.load(f"{name}.weight"),
            bias=self.weights.optional(f"{name}.bias"),
        )

    def chosen_rows(self, x: str) -> str:
        """The rows of a value [num_tokens, n] whose logits are asked for: [num_logits, n]."""
        return self.graph.node("Gather", [x, "logits_indices"], f"{x}.rows")

    def _cache(self, index: int) -> tuple[list[str], list[str]]:
        """Declare the buffers of a layer's cache: the names of what it reads, and of what it writes."""
        heads: Dims = ("num_blocks", "block_size", self.decoder.num_kv_heads)
        numbers: Dims = (*heads, self.decoder.head_dim)
        parts: dict[str, tuple[type[np.generic], Dims]] = {
            "key": (self.kv_cache, numbers), "value": (self.kv_cache, numbers)
        }
        if self.kv_cache is np.int8:
            parts |= {"key_scale": (np.float32, heads), "value_scale": (np.float32, heads)}
        past = [
            self.graph.input(f"past_key_values.{index}.{part}", *place) for part, place in parts.items()
        ]
        present = [f"present.{index}.{part}" for part in parts]
        for name, place in zip(present, parts.values(), strict=True):
            self.graph.output(name, *place)
        return past, present

    def _inside_of_mlp(self, x: str, layer: str) -> str:
        """f(gate(x)) * up(x), or f(up(x)) where there is no gate."""
        gated = self._has(f"{layer}.gate")
        weight, bias = self._side_by_side(layer, *(["gate"] if gated else []), "up")
        return self.layers.linear(
            x,
            weight,
            f"{layer}.inner",
            place="normed",
            bias=bias,
            norm=self.norm(f"{layer}.norm"),
            activation=self.decoder.activation,
            gated=gated,
        )

    def _added(self, part: str, x: str, residual: str, role: str) -> str:
        """The last linear layer of attention or MLP, normed where the decoder does that, and the residual."""
        weight, bias = self._side_by_side(part, role)
        if not self._has(f"{part}.post_norm"):
            return self.layers.linear(
                x, weight, f"{part}.{role}", place="inner", bias=bias, residual=residual
            )
        x = self.layers.linear(x, weight, f"{part}.{role}", place="inner", bias=bias)
        normed = write_norm(self.layers, x, self.norm(f"{part}.post_norm"))
        return self.graph.node("Add", [normed, residual], f"{part}.residual")

    def _side_by_side(self, layer: str, *roles: str) -> tuple[FloatArray, FloatArray | None]:
        """The linear layers of those roles, their outputs side by side."""
        names = [f"{layer}.{role}" for role in roles]
        weights = [self.weights.load(f"{name}.weight") for name in names]
        biases = [self.weights.optional(f"{name}.bias") for name in names]
        shifts = [bias for bias in biases if bias is not None]
        return np.concatenate(weights), np.concatenate(shifts) if shifts else None

    def _fp32(self, role: str) -> str:
        """The tensor of a role in float32; an empty name, if the decoder has none."""
        return self.graph.weight(role, self.weights.load(role)) if role in self.weights.roles else ""

    def _has(self, part: str) -> bool:
        return f"{part}.weight" in self.weights.roles


_ATTENTION_INPUTS = (
    "query",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "q_norm_weight",
    "k_norm_weight",
    "alibi_slopes",
    "key_scales",
    "value_scales",
    "attention_metadata",
)
_ATTENTION_OUTPUTS = ("output", "key_cache_out", "value_cache_out")
_ATTRIBUTES = {
    "num_heads": AttributeProto.INT,
    "kv_num_heads": AttributeProto.INT,
    "scale": AttributeProto.FLOAT,
    "softcap": AttributeProto.FLOAT,
    "local_window_size": AttributeProto.INT,
    "do_rotary": AttributeProto.INT,
    "qk_norm_epsilon": AttributeProto.FLOAT,
}
# Of com.microsoft.PagedAttention, in its order; "" is what we have not: key and value apart from the query, a
# mapping of slots, sinks, scales of a cache in int8.
_CALLED_WITH = (
    "query", "", "", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "", "", "q_norm_weight", "k_norm_weight", "", "", "attention_metadata",
)


def has_function(decoder: Decoder) -> bool:
    """Whether com.microsoft.PagedAttention computes the attention of a decoder, on activations in float16.

    Source: onnxruntime/contrib_ops/cpu/bert/paged_attention_helper.h and rotary_helper.h.
    """
    turning = [2 * len(attention.rotary.frequencies) for attention in decoder.attentions if attention.rotary]
    return not decoder.alibi and decoder.head_dim % 8 == 0 and all(numbers % 16 == 0 for numbers in turning)


def paged_attention_function(*, rotary: bool, qk_norm: bool) -> FunctionProto:
    """Return a function of the model whose body is com.microsoft.PagedAttention.

    ONNX Runtime has that operator for CUDA. A session with our library registered takes our kernel, any other
    the body.

    Args:
        rotary: whether the function is called with tables of angles.
        qk_norm: whether it is called with norms of queries and keys.
    """
    # Ours takes tables and norms in float32, the other one in the type of the query.
    vectors = ["cos_cache", "sin_cache"] if rotary else []
    vectors += ["q_norm_weight", "k_norm_weight"] if qk_norm else []
    casts = [helper.make_node("Cast", [name], [f"{name}_fp16"], to=TensorProto.FLOAT16) for name in vectors]
    called_with = [f"{name}_fp16" if name in vectors else name for name in _CALLED_WITH]
    body = helper.make_node("PagedAttention", called_with, _ATTENTION_OUTPUTS, domain="com.microsoft")
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
