"""Decoder graph: writes the ONNX graph of any decoder, from its description and its weights.

A layer is one DecoderLayer node where that operator supports it, or else a PagedAttention node between linear
layers, with operators of ONNX for what neither supports. A layer with recurrent states has CausalConv and
LinearAttention in place of attention, or beside it. Attention is MHA, GQA or MQA, by the number of
kv_heads.

The graph runs the new tokens of B sequences, packed: the tokens of a sequence are contiguous and in order,
and follow its cached tokens. The cache is paged: the token at position p of sequence b is in block
`block_table[b, p // block_size]`.

inputs
    input_ids, position_ids [num_tokens] int64
    cumulative_sequence_length [batch + 1] int32: sequence b has the tokens from entry b up to entry b + 1
    past_seqlens [batch] int32: the number of cached tokens per sequence
    block_table [batch, max_blocks] int32
    logits_indices [num_logits] int64: the tokens whose hidden states reach the head
    attention_metadata [2] int32, on the host, read on a GPU only: upper bounds of the new tokens and of all
    tokens of any sequence
    state_source, state_target [batch] int32, with recurrent states: the slot of a sequence's state before its
    new tokens, or -1, and the slot of its state after them
    past_states.{i}.conv [num_slots, kernel_size - 1, channels] float32
    past_states.{i}.recurrent [num_slots, heads, panels of 32 values, key_dim, 32] float32
    past_key_values.{i}.key, .value [num_blocks, block_size, kv_heads, head_dim]; in int8 also
    .key_scale, .value_scale [num_blocks, block_size, kv_heads] float32
outputs
    logits [num_logits, vocab] float32
    present.{i}.*, present_states.{i}.*: the buffers of the past, written in place

The graph of a pipeline stage has some of the layers, and the cache buffers of these layers. Every stage but
the first has the input `hidden_states` instead of `input_ids`, and `position_ids` only if it has an operator
of ONNX that reads positions. Every stage but the last has the output `next_hidden_states` instead of
`logits`, and no `logits_indices`. Hidden states are [num_tokens, hidden], in the type of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, TensorProto, helper

from genserve.export.altup_graph import AltUpWriter
from genserve.export.decoder import (
    Attention,
    Decoder,
    HeadNorm,
    Latent,
    LinearAttention,
    PerLayer,
    QueryScale,
    Rotary,
    ShortConv,
    StateSizes,
    alibi_slopes,
)
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.layers import (
    KERNEL_ACTIVATIONS,
    SEQUENCE_INPUTS,
    DecoderLayer,
    ExpertsLayer,
    Layers,
    Linear,
    LinearKind,
    Norm,
)
from genserve.export.onnx_graph import Dims, OnnxGraphBuilder
from genserve.export.rows import Rows, joined_rows
from genserve.export.stored_weight import StoredWeight, joined
from genserve.sampling.logits_array import FloatArray

_ATTENTION_INPUTS = (
    "query", "key_cache", "value_cache", *SEQUENCE_INPUTS,
    "cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight", "alibi_slopes", "key_scales", "value_scales",
    "attention_metadata", "sinks",
)
_ATTENTION_OUTPUTS = ("output", "key_cache_out", "value_cache_out")
_ATTRIBUTES = {
    "num_heads": AttributeProto.INT, "kv_num_heads": AttributeProto.INT, "scale": AttributeProto.FLOAT,
    "softcap": AttributeProto.FLOAT, "local_window_size": AttributeProto.INT,
    "do_rotary": AttributeProto.INT, "qk_norm_epsilon": AttributeProto.FLOAT,
}
# The inputs of com.microsoft.PagedAttention in order. "" stands for inputs without a counterpart in our
# operator: separate keys and values, a slot mapping, sinks, and the scales of an int8 cache.
_BODY_INPUTS = (
    "query", "", "", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "", "", "q_norm_weight", "k_norm_weight", "", "", "attention_metadata",
)


# The inputs of a graph that describe the slots of its sequences' states, in the order of the operators.
_STATE_INPUTS = ("cumulative_sequence_length", "state_source", "state_target")

# Whether a weight has all numbers of the checkpoint, by role.
Kept = dict[str, bool]


def write_decoder(
    weights: DecoderWeights,
    decoder: Decoder,
    layers: Layers,
    *,
    kv_cache: type[np.generic],
    part: range,
    after_layer: Callable[[], None] = lambda: None,
) -> Kept:
    """Add a decoder, or some of its layers, to the graph that `layers` writes.

    Args:
        weights: the weights of the whole decoder.
        decoder: the sizes and options of the decoder.
        layers: writes the layers.
        kv_cache: the type of keys and values in the KV cache.
        part: the layers to add; the first layer brings the embedding with it, and the last one the head.
        after_layer: is called after each layer, when its weights have been read.

    Returns:
        Which weights have all numbers of the checkpoint, if the scheme keeps its formats; otherwise nothing.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    writer = _GraphWriter(
        weights=weights, decoder=decoder, layers=layers, graph=layers.graph, kv_cache=kv_cache, part=part
    )
    writer.inputs()
    residual = writer.embedding() if writer.is_first else writer.hidden_states()
    for index in part:
        if decoder.altup is not None:
            residual = writer.altup_layer(residual, index)
        elif layers.has_decoder_layers and index != writer.selecting_layer and writer.is_one_operator(index):
            residual = writer.decoder_layer(residual, index)
        else:
            parts = writer.token_mixers(residual, index)
            if index == writer.selecting_layer:
                parts = writer.select_rows(parts)
                residual = writer.selected(residual)
            residual = writer.after_layer(writer.after_token_mixers(parts, residual, index), index)
        after_layer()
    if writer.is_last:
        writer.head(residual)
    else:
        writer.pass_on(residual)
    return writer.kept


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
    query_scales: dict[QueryScale, str] = field(default_factory=dict)
    kept: Kept = field(default_factory=dict)

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

    def inputs(self) -> None:
        """Declare the inputs except the cache, and add the tables that all layers share."""
        if self.is_first:
            self.graph.input("input_ids", np.int64, ("num_tokens",))
        layers = self.decoder.layers[self.part.start : self.part.stop]
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        if self.is_first or any(map(_reads_positions, attentions)):
            self.graph.input("position_ids", np.int64, ("num_tokens",))
        self.graph.input("cumulative_sequence_length", np.int32, ("batch_plus_1",))
        self.graph.input("past_seqlens", np.int32, ("batch",))
        self.graph.input("block_table", np.int32, ("batch", "max_blocks"))
        if self.is_last:
            self.graph.input("logits_indices", np.int64, ("num_logits",))
        self.graph.input("attention_metadata", np.int32, (2,))
        if any(layer.mixer is not None for layer in layers):
            self.graph.input("state_source", np.int32, ("batch",))
            self.graph.input("state_target", np.int32, ("batch",))
        used = {attention.rotary for attention in attentions}
        for index, rotary in enumerate(self.decoder.rotaries):
            if rotary not in used:
                continue
            cosines, sines = rotary.tables(self.decoder.context_length)
            self.tables[rotary] = [
                self.graph.weight(f"rotary.{index}.cos", cosines),
                self.graph.weight(f"rotary.{index}.sin", sines),
            ]
        if attentions and attentions[0].alibi:
            self.graph.weight("alibi.slopes", alibi_slopes(attentions[0].num_heads))
        scales = dict.fromkeys(attention.query_scale for attention in attentions)
        for index, scale in enumerate(scale for scale in scales if scale is not None):
            table = scale.table(self.decoder.context_length)[:, None]
            self.query_scales[scale] = self.layers.vector(f"query_scale.{index}", table)
        if {self.kv_cache, self.layers.scheme.activations} == {np.float16} and has_function(self.decoder):
            qk_norm = _is_kernel_norm(attentions[0])
            self.graph.function(paged_attention_function(rotary=bool(self.tables), qk_norm=qk_norm))

    def embedding(self) -> str:
        """The input of the first layer: scaled embeddings plus positions, normed."""
        x = self.layers.embedding("input_ids", self._weight(["embedding.weight"]), "embeddings")
        if self.decoder.embedding_scale is not None:
            scale = self.layers.vector("embeddings.scale", np.array(self.decoder.embedding_scale, np.float32))
            x = self.graph.node("Mul", [x, scale], "embeddings.scaled")
        if self._has("positions"):
            table = self.layers.vector("positions.weight", self.weights.load("positions.weight"))
            positions = self.graph.node("Gather", [table, "position_ids"], "embeddings.positions")
            x = self.graph.node("Add", [x, positions], "embeddings.positioned")
        if self.decoder.per_layer is not None:
            self._per_layer(x, self.decoder.per_layer)
        if self.decoder.altup is not None:
            return self._altup().streams(x)
        return self.layers.norm(x, self.norm("embedding.norm")) if self._has("embedding.norm") else x

    def _per_layer(self, x: str, described: PerLayer) -> None:
        """Add the numbers of all layers, `per_layer.{index}` [num_tokens, size]."""
        node, constant = self.graph.node, self.graph.constant
        weight = self._weight(["per_layer.embedding.weight"])
        ids = "input_ids"
        if (rows := weight.shape[0]) < self.decoder.vocab_size:
            # The tokens of images and sound have the numbers of the first token.
            size, first = constant("per_layer.rows", np.array(rows)), constant("per_layer.first", np.array(0))
            is_known = node("Less", [ids, size], "per_layer.known")
            ids = node("Where", [is_known, ids, first], "per_layer.ids")
        own = self.layers.embedding(ids, weight, "per_layer.embeddings", name="per_layer.embedding")
        own = node("Mul", [own, self._number("per_layer.scale", described.embedding_scale)], "per_layer.own")
        linear = self._linear(x, "per_layer", "projection", output="projection", kind="inner")
        names = [f"per_layer.{index}" for index in range(len(self.decoder.layers))]
        norm = self.norm("per_layer.norm", num_groups=len(names))
        norm = replace(norm, epsilon=described.norm_epsilon)
        total = self.layers.norm(self.layers.linear(linear), norm, residual=own)
        self._split(total, names, [described.size] * len(names))

    def hidden_states(self) -> str:
        """The input of a stage after the first: the output of the layers before it."""
        return self.graph.input("hidden_states", self.layers.scheme.activations, self._hidden)

    def pass_on(self, x: str) -> None:
        """Declare the output of a pipeline stage before the last."""
        self.graph.node("Identity", [x], "next_hidden_states")
        self.graph.output("next_hidden_states", self.layers.scheme.activations, self._hidden)

    def decoder_layer(self, x: str, index: int) -> str:
        """The new residual after a layer, computed by one operator."""
        layer, described = f"layers.{index}", self.decoder.layers[index]
        past, present = self._cache(index)

        def linears() -> Iterator[Linear]:
            yield self._qkv(x, index)
            yield self._linear("", f"{layer}.attention", "output", output="output", kind="inner")
            yield self._inner_mlp(x, index)
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
                    "head_dim": self._attention(index).head_dim,
                    "parallel": int(described.parallel),
                    "norm": self.decoder.norm,
                    "epsilon": self.decoder.norm_epsilon,
                    "activation": described.activation or "",
                    "gated": int(self._has(f"{layer}.mlp.gate")),
                },
            )
        )

    def token_mixers(self, x: str, index: int) -> dict[str, str]:
        """The outputs of the parts of a layer that read several tokens, before their last linear layers."""
        layer = self.decoder.layers[index]
        parts = {} if layer.attention is None else {"attention": self.attention(x, index)}
        match layer.mixer:
            case ShortConv() as mixer:
                parts["mixer"] = self._short_conv(x, index, mixer)
            case LinearAttention() as mixer:
                parts["mixer"] = self._linear_attention(x, index, mixer)
        return parts

    def attention(self, x: str, index: int) -> str:
        """Attention, which appends to the KV cache: [num_tokens, heads * head_dim]."""
        described, part, gate = self._attention(index), f"layers.{index}.attention", ""
        if described.latent is None:
            packed = self.layers.linear(self._qkv(x, index))
            if described.gated:
                gate = f"{part}.gate"
                num_heads, num_kv_heads = described.num_heads, described.num_kv_heads
                sizes = [num_heads * described.head_dim, (num_heads + 2 * num_kv_heads) * described.head_dim]
                self._split(packed, [gate, f"{part}.ungated"], sizes)
                packed = f"{part}.ungated"
            packed = self._prepared(packed, index)
        else:
            packed = self._latent_qkv(x, index)
        past, present = self._cache(index)
        output = self.graph.value(f"layers.{index}.attention.heads", self.layers.scheme.activations)
        inputs = [
            packed,
            *past[:2],
            *(self._of_rows(name, index) for name in SEQUENCE_INPUTS),
            *self._attention_constants(index),
            *(past[2:] or ["", ""]),
            "attention_metadata",
            self._fp32(f"layers.{index}.attention.sinks"),
        ]
        if described.value_norm and described.cache_of is None:
            inputs.append(self.graph.weight(f"{part}.value_norm", np.ones(described.head_dim, np.float32)))
        attributes = self._attention_attributes(index)
        heads = self.graph.node("PagedAttention", inputs, output, *present, **attributes)
        if not gate:
            return heads
        return self.layers.activated(gate, "sigmoid", factor=heads)

    def after_token_mixers(self, parts: Mapping[str, str], residual: str, index: int) -> str:
        """The rest of a layer, up to the new residual."""
        layer, mixed = self.decoder.layers[index], residual
        for part, x in parts.items():
            is_latent = part == "attention" and self._attention(index).latent is not None
            heads = self._latent_values(x, index) if is_latent else x
            mixed = self._add_residual(f"layers.{index}.{part}", heads, mixed, "output")
        if self._has(f"layers.{index}.attention.laurel_left"):
            mixed = self._with_laurel(residual, mixed, f"layers.{index}.attention")
        if layer.activation is None:
            return mixed
        # The MLP of a parallel layer reads the input of its attention.
        x = residual if layer.parallel else mixed
        if layer.experts is not None and layer.experts.beside_mlp:
            return self._mlp_and_experts(x, mixed, index)
        if layer.experts is not None:
            return self._experts(x, mixed, index)
        inner = self.layers.linear(self._inner_mlp(x, index))
        if layer.gate_cutoff is not None:
            inner = self._cut_gates(inner, index, layer.gate_cutoff)
        return self._add_residual(f"layers.{index}.mlp", inner, mixed, "down")

    def altup_layer(self, streams: str, index: int) -> str:
        """The streams [rows, streams, hidden] after a layer."""
        writer = self._altup()
        predicted, active = writer.predicted(streams, index)
        parts = self.token_mixers(active, index)
        if index == self.selecting_layer:
            parts = self.select_rows(parts)
            predicted, active = self.selected(predicted), self.selected(active)
        activated = self.after_token_mixers(parts, active, index)
        corrected, gate_input = writer.corrected(predicted, active, activated, index)
        return writer.with_others(corrected, self._from_per_layer(gate_input, index), index)

    def _altup(self) -> AltUpWriter:
        assert self.decoder.altup is not None
        return AltUpWriter(
            described=self.decoder.altup,
            hidden_size=self.decoder.hidden_size,
            layers=self.layers,
            weights=self.weights,
            linear=self._linear,
            grouped=self._in_groups,
            norm=self.norm,
        )

    def after_layer(self, x: str, index: int) -> str:
        """The residual after what follows the MLP in some families."""
        scale = f"layers.{index}.scale"
        if self.decoder.per_layer is not None:
            x = self._from_per_layer(x, index, residual=x)
        if scale in self.weights.roles:
            factor = self.layers.vector(scale, self.weights.load(scale))
            x = self.graph.node("Mul", [x, factor], f"layers.{index}.scaled")
        return x

    def _from_per_layer(self, x: str, index: int, *, residual: str = "") -> str:
        """The residual, if any, plus what the numbers of a layer add to it, gated by rows x."""
        part, own = f"layers.{index}.per_layer", f"per_layer.{index}"
        if self.selecting_layer is not None and index >= self.selecting_layer:
            own = self.selected(own)
        linear = self._linear(x, part, "gate", output="gate", kind="inner")
        gate = self.layers.linear(replace(linear, activation=self.decoder.layers[index].activation))
        gated = self.graph.node("Mul", [gate, own], f"{part}.gated")
        outputs = self.layers.linear(self._linear(gated, part, "output", output="output", kind="inner"))
        return self.layers.norm(outputs, self.norm(f"{part}.post_norm"), residual=residual)

    def _with_laurel(self, x: str, mixed: str, part: str) -> str:
        """The residual after attention plus a low-rank layer of its normed input x, at half the power."""
        node, norm = self.graph.node, replace(self.norm(f"{part}.norm"), name=f"{part}.laurel_input")
        normed = self.layers.norm(x, norm)
        left = self._linear(normed, part, "laurel_left", output="laurel_left", kind="inner")
        right = self._linear(
            self.layers.linear(left), part, "laurel_right", output="laurel_right", kind="inner"
        )
        own = self.layers.linear(right)
        own = self.layers.norm(own, self.norm(f"{part}.laurel_norm"), residual=normed)
        total = node("Add", [mixed, own], f"{part}.with_laurel")
        return node("Mul", [total, self._number(f"{part}.laurel_share", 0.5**0.5)], f"{part}.halved")

    def _cut_gates(self, packed: str, index: int, cutoff: float) -> str:
        """f(gates) * values [rows, inner]; gates count from some standard deviations above their mean.

        Source: `_gaussian_topk` of transformers' Gemma 3n: few of normally distributed gates stay positive.
        """
        node, part = self.graph.node, f"layers.{index}.mlp"
        gate, up = f"{part}.gates", f"{part}.values"
        node("Split", [packed], gate, up, axis=-1, num_outputs=2)
        size = self.weights.rows(f"{part}.gate.weight").shape[0]
        centred = node("Sub", [gate, self.layers.means(gate, f"{part}.mean", size)], f"{part}.centred")
        squares = node("Mul", [centred, centred], f"{part}.squares")
        deviation = node("Sqrt", [self.layers.means(squares, f"{part}.variance", size)], f"{part}.deviation")
        least = node("Mul", [deviation, self._number(f"{part}.cutoff", cutoff)], f"{part}.least")
        kept = node("Relu", [node("Sub", [centred, least], f"{part}.above")], f"{part}.kept")
        activation = self.decoder.layers[index].activation
        assert activation
        return self.layers.activated(kept, activation, factor=up)

    def _short_conv(self, x: str, index: int, mixer: ShortConv) -> str:
        """Gates around a convolution: [num_tokens, hidden]."""
        part, hidden = f"layers.{index}.mixer", self.decoder.hidden_size
        gated = self.layers.linear(self._linear(x, part, "input", output="input", **self._pre_norm(part)))
        bias = self.weights.optional(f"{part}.conv.bias")
        weight = self.weights.load(f"{part}.conv.weight")
        return self._conv(gated, index, mixer.states(hidden), weight=weight, bias=bias, gated=1)

    def _linear_attention(self, x: str, index: int, mixer: LinearAttention) -> str:
        """Heads with a state, after a convolution: [num_tokens, heads * value_dim]."""
        part, heads = f"layers.{index}.mixer", mixer.num_heads
        delta = mixer.rule == "gated_delta"
        roles = ["query", "key", "value", "gate", "step", *(["beta"] if delta else [])]
        read = self.layers.linear(self._linear(x, part, *roles, output="input", **self._pre_norm(part)))
        convs = [f"{part}.{role}_conv" for role in roles[:3]]
        biases = [bias for conv in convs if (bias := self.weights.optional(f"{conv}.bias")) is not None]
        states = mixer.states(self.decoder.hidden_size)
        weight = np.concatenate([self.weights.load(f"{conv}.weight") for conv in convs])
        bias = np.concatenate(biases) if biases else None
        mixed = self._conv(read, index, states, weight=weight, bias=bias, activation="silu")
        values, gate = heads * mixer.value_dim, len(weight)
        norm = "" if mixer.norm == "" else f"{part}.out_norm.weight"
        if norm:
            own = self.weights.load(norm)
            self.graph.weight(norm, np.tile(own, values // len(own)))
        past, present = self._state(index, "recurrent", states)
        return self.graph.node(
            "LinearAttention",
            [
                mixed, read, self._fp32(f"{part}.rate"), self._fp32(f"{part}.step_bias"),
                self._fp32(f"{part}.skip"), norm, *_STATE_INPUTS, past,
            ],
            self.graph.value(f"{part}.heads", np.float32),
            present,
            rule=mixer.rule,
            norm=mixer.norm,
            num_key_heads=mixer.num_key_heads,
            num_heads=heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            norm_size=mixer.norm_size,
            epsilon=mixer.norm_epsilon,
            beta_scale=mixer.beta_scale,
            step_min=mixer.step_limits[0],
            step_max=mixer.step_limits[1],
            gate_offset=gate,
            step_offset=gate + values,
            beta_offset=gate + values + heads if delta else 0,
        )

    def _conv(
        self,
        x: str,
        index: int,
        states: StateSizes,
        *,
        weight: FloatArray,
        bias: FloatArray | None,
        **attributes: Any,
    ) -> str:
        """The convolution of the first columns of x, with a weight [channels, kernel_size]."""
        name = f"layers.{index}.mixer.conv"
        past, present = self._state(index, "conv", states)
        tensors = [
            self.graph.weight(f"{name}.weight", np.ascontiguousarray(weight.T)),
            "" if bias is None else self.graph.weight(f"{name}.bias", bias),
        ]
        return self.graph.node(
            "CausalConv",
            [x, *tensors, *_STATE_INPUTS, past],
            self.graph.value(f"{name}.channels", np.float32),
            present,
            channels=weight.shape[0],
            kernel_size=weight.shape[1],
            **attributes,
        )

    def _state(self, index: int, name: str, states: StateSizes) -> tuple[str, str]:
        """Declare a buffer of a layer's states: the names of its input and output."""
        dims: Dims = ("num_slots", *states[name])
        present = f"present_states.{index}.{name}"
        self.graph.output(present, np.float32, dims)
        return self.graph.input(f"past_states.{index}.{name}", np.float32, dims), present

    def is_one_operator(self, index: int) -> bool:
        """Whether DecoderLayer has all parts of a layer."""
        layer = self.decoder.layers[index]
        if layer.attention is None or layer.mixer is not None:
            return False
        norms = [self._has(f"layers.{index}.{part}.norm") for part in ("attention", "mlp")]
        post_norms = [self._has(f"layers.{index}.{part}.post_norm") for part in ("attention", "mlp")]
        return (
            all(norms)
            and not any(post_norms)
            and layer.experts is None
            and f"layers.{index}.attention.sinks" not in self.weights.roles
            and layer.activation in KERNEL_ACTIVATIONS
            and not _is_prepared(layer.attention)
            and layer.attention.latent is None
            and not layer.attention.gated
            and not layer.attention.value_norm
            and layer.attention.cache_of is None
            and self.decoder.per_layer is None
            and f"layers.{index}.scale" not in self.weights.roles
        )

    def head(self, x: str) -> None:
        """Add the logits, and declare them as output."""
        if self.decoder.altup is not None:
            x = self._altup().joined(x)
        head = Linear(
            x=x,
            weight=self._weight(["head.weight"]),
            bias=self.weights.optional("head.bias"),
            output="logits",
            kind="head",
            norm=self.norm("norm"),
            softcap=self.decoder.logits_softcap,
        )
        self.layers.head(head, tied=self.decoder.tied and self.is_first)
        self.graph.output("logits", np.float32, ("num_logits", self.decoder.vocab_size))

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

    def select_rows(self, parts: Mapping[str, str]) -> dict[str, str]:
        """The parts of a layer for the rows whose logits are requested, which run the rest of the model.

        To the attention behind, each of these rows is a sequence whose last token is new.
        """
        if self.decoder.shares_caches:
            node, constant = self.graph.node, self.graph.constant
            node("Cast", [self.selected("position_ids")], "past_seqlens.rows", to=TensorProto.INT32)
            zero, one = constant("rows.zero", np.array(0)), constant("rows.one", np.array(1))
            stop = node("Add", [node("Size", ["logits_indices"], "rows.count"), one], "rows.stop")
            edges = node("Range", [zero, stop, one], "rows.edges")
            node("Cast", [edges], "cumulative_sequence_length.rows", to=TensorProto.INT32)
            # A row is of the last sequence that does not begin behind it.
            starts = node("Cast", ["cumulative_sequence_length"], "rows.starts", to=TensorProto.INT64)
            axis = constant("rows.axis", np.array([1]))
            column = node("Unsqueeze", ["logits_indices", axis], "rows.column")
            begun = node("GreaterOrEqual", [column, starts], "rows.begun")
            begun = node("Cast", [begun], "rows.begun.numbers", to=TensorProto.INT64)
            count = node("ReduceSum", [begun, axis], "rows.begun.count", keepdims=0)
            node("Gather", ["block_table", node("Sub", [count, one], "rows.sequences")], "block_table.rows")
        return {part: self.selected(x) for part, x in parts.items()}

    def selected(self, x: str) -> str:
        """The rows of a value [num_tokens, ...] whose logits are requested: [num_logits, ...]."""
        return self.graph.node("Gather", [x, "logits_indices"], f"{x}.rows")

    def _of_rows(self, name: str, index: int) -> str:
        """An input that describes tokens or their sequences, for the rows that a layer runs."""
        return f"{name}.rows" if self.selecting_layer is not None and index > self.selecting_layer else name

    @property
    def _hidden(self) -> Dims:
        return "num_tokens", self.decoder.hidden_size

    def _cache(self, index: int) -> tuple[list[str], list[str]]:
        """Declare the buffers of a layer's cache: the names of its inputs and outputs."""
        attention = self._attention(index)
        if attention.cache_of is not None:
            # An earlier layer has written these; the order of the nodes follows from their names.
            return [f"present.{attention.cache_of}.{part}" for part in self._parts_of_cache()], []
        scales: Dims = ("num_blocks", "block_size", attention.num_kv_heads)
        values: Dims = (*scales, attention.head_dim)
        buffers: dict[str, tuple[type[np.generic], Dims]] = {
            part: (np.float32, scales) if part.endswith("_scale") else (self.kv_cache, values)
            for part in self._parts_of_cache()
        }
        past = [
            self.graph.input(f"past_key_values.{index}.{part}", *buffer) for part, buffer in buffers.items()
        ]
        present = [f"present.{index}.{part}" for part in buffers]
        for name, buffer in zip(present, buffers.values(), strict=True):
            self.graph.output(name, *buffer)
        return past, present

    def _parts_of_cache(self) -> list[str]:
        return ["key", "value", *(["key_scale", "value_scale"] if self.kv_cache is np.int8 else [])]

    def _attention_attributes(self, index: int) -> dict[str, float]:
        attention = self._attention(index)
        # Only graphs without the function for CUDA have these.
        own = {} if attention.chunk is None else {"local_chunk_size": attention.chunk}
        own |= {} if attention.cache_of is None else {"shares_cache": 1}
        return {
            **own,
            "num_heads": attention.num_heads,
            "kv_num_heads": attention.num_kv_heads,
            "scale": attention.scale,
            "do_rotary": int(attention.rotary is not None and not _rotates_first(attention)),
            "softcap": attention.softcap or 0.0,
            "local_window_size": attention.window or -1,
            "qk_norm_epsilon": self.decoder.norm_epsilon,
        }

    def _attention_constants(self, index: int) -> list[str]:
        """Tables of cosines and sines, norms of queries and keys, ALiBi's slopes; "" for absent ones."""
        # A layer without rotary positions gets the tables of another layer, which the function's body needs.
        attention = self._attention(index)
        norms = ["query_norm.weight", "key_norm.weight"] if _is_kernel_norm(attention) else []
        return [
            *(self.tables.get(attention.rotary) or next(iter(self.tables.values()), ["", ""])),
            *([self._fp32(f"layers.{index}.attention.{norm}") for norm in norms] or ["", ""]),
            "alibi.slopes" if attention.alibi else "",
        ]

    def _latent_qkv(self, x: str, index: int) -> str:
        """Queries of all heads, and the one head of keys, twice, since its vectors are the values too."""
        attention, part = self._attention(index), f"layers.{index}.attention"
        latent, heads, node = attention.latent, attention.num_heads, self.graph.node
        assert latent is not None
        first = "latent_query" if latent.query_rank is None else "query_a"
        read = self.layers.linear(
            self._linear(x, part, first, "latent", output="latents", **self._pre_norm(part))
        )
        rope, plain = heads * latent.rope, heads * latent.nope
        queries = [plain, rope] if latent.query_rank is None else [latent.query_rank]
        names = [f"{part}.{name}" for name in ("plain", "turned", "key_rope", "vectors")]
        if latent.query_rank is not None:
            names[:2] = [f"{part}.query_rows"]
        self._split(read, names, [*queries, latent.rope, latent.rank])
        if latent.query_rank is not None:
            norm = self._latent_norm(f"{part}.query_a_norm", latent)
            linear = self._linear(names[0], part, "query_b", output="query_b", kind="inner", norm=norm)
            names[:1] = [f"{part}.plain", f"{part}.turned"]
            self._split(self.layers.linear(linear), names[:2], [plain, rope])
        met = self._by_head(names[0], index, "latent_key")
        vectors = self.layers.norm(names[3], self._latent_norm(f"{part}.latent_norm", latent))
        parts = []
        for name, value, size in (("turned", names[1], latent.rope), ("met", met, latent.rank)):
            shape = self.graph.constant(f"{part}.{name}.shape", np.array([0, heads, size]))
            parts.append(node("Reshape", [value, shape], f"{part}.{name}.heads"))
        query = node("Concat", parts, f"{part}.query", axis=-1)
        flat = self.graph.constant(f"{part}.flat", np.array([0, -1]))
        key = node("Concat", [names[2], vectors], f"{part}.key", axis=-1)
        rows = [node("Reshape", [query, flat], f"{part}.query.flat"), key, key]
        return node("Concat", rows, f"{part}.packed", axis=-1)

    def _latent_values(self, heads: str, index: int) -> str:
        """The values of all heads, after attention: [rows, heads * value]."""
        attention, node = self._attention(index), self.graph.node
        latent, constant = attention.latent, self.graph.constant
        assert latent is not None
        shape = constant(f"{heads}.shape", np.array([0, attention.num_heads, attention.head_dim]))
        by_head = node("Reshape", [heads, shape], f"{heads}.by_head")
        vectors = f"{heads}.vectors"
        self._split(by_head, [f"{heads}.rope", vectors], [latent.rope, latent.rank])
        flat = node("Reshape", [vectors, constant(f"{heads}.flat", np.array([0, -1]))], f"{vectors}.flat")
        return self._by_head(flat, index, "latent_value")

    def _by_head(self, x: str, index: int, role: str) -> str:
        """The product of each head's columns and its rows of a weight."""
        return self._in_groups(x, f"layers.{index}.attention.{role}", self._attention(index).num_heads)

    def _in_groups(self, x: str, role: str, count: int) -> str:
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

    def _latent_norm(self, name: str, latent: Latent) -> Norm:
        return Norm(
            name=name,
            kind="rms",
            epsilon=latent.norm_epsilon,
            weight=self.weights.load(f"{name}.weight"),
            bias=None,
        )

    def _split(self, x: str, names: list[str], sizes: list[int]) -> None:
        self.graph.node("Split", [x, self.graph.constant(f"{x}.sizes", np.array(sizes))], *names, axis=-1)

    def _prepared(self, packed: str, index: int) -> str:
        """Queries, keys and values after what our attention cannot do: [num_tokens, all heads * head_dim]."""
        attention, part = self._attention(index), f"layers.{index}.attention"
        if not _is_prepared(attention):
            return packed
        heads = {"query": attention.num_heads}
        if attention.cache_of is None:
            heads |= {"key": attention.num_kv_heads, "value": attention.num_kv_heads}
        sizes = np.array([count * attention.head_dim for count in heads.values()])
        parts = [f"{part}.{name}" for name in heads]
        self.graph.node("Split", [packed, self.graph.constant(f"{part}.sizes", sizes)], *parts, axis=-1)
        for position, name in enumerate(("query", "key")[: len(parts)]):
            if _rotates_first(attention):
                parts[position] = self._rotated(parts[position], index, num_heads=heads[name])
            if attention.head_norm is not None and not _is_kernel_norm(attention):
                num_groups = 1 if attention.head_norm.joint else heads[name]
                norm = self.norm(f"{part}.{name}_norm", num_groups=num_groups)
                norm = replace(norm, kind=attention.head_norm.kind)
                parts[position] = self.layers.norm(parts[position], norm)
        if attention.query_scale is not None:
            table = self.query_scales[attention.query_scale]
            positions = self._of_rows("position_ids", index)
            factors = self.graph.node("Gather", [table, positions], f"{part}.factors")
            parts[0] = self.graph.node("Mul", [parts[0], factors], f"{part}.scaled")
        prepared = self.graph.node("Concat", parts, f"{part}.prepared", axis=-1)
        if attention.clip is None:
            return prepared
        least = self._number(f"{part}.least", -attention.clip)
        most = self._number(f"{part}.most", attention.clip)
        return self.graph.node("Clip", [prepared, least, most], f"{part}.clipped")

    def _rotated(self, x: str, index: int, *, num_heads: int) -> str:
        """Queries or keys [num_tokens, heads * head_dim] with rotary positions."""
        attention, positions = self._attention(index), self._of_rows("position_ids", index)
        assert attention.rotary is not None
        node, constant, half = self.graph.node, self.graph.constant, len(attention.rotary.frequencies)
        # RotaryEmbedding would do, but its bits depend on the other tokens of the batch.
        cosines, sines = (self._angles(table, positions, x) for table in self.tables[attention.rotary])
        shape = constant(f"{x}.shape", np.array([0, num_heads, attention.head_dim]))
        sizes = [half, half, attention.head_dim - 2 * half]
        parts = [f"{x}.first", f"{x}.second", f"{x}.rest"][: 3 if sizes[2] else 2]
        heads = node("Reshape", [x, shape], f"{x}.by_head")
        node("Split", [heads, constant(f"{x}.sizes", np.array(sizes[: len(parts)]))], *parts, axis=-1)
        first, second, *rest = parts
        turned = [
            node(
                op,
                [node("Mul", [near, cosines], f"{near}.cos"), node("Mul", [far, sines], f"{near}.sin")],
                f"{near}.turned",
            )
            for op, near, far in (("Sub", first, second), ("Add", second, first))
        ]
        rotated = node("Concat", [*turned, *rest], f"{x}.rotated", axis=-1)
        return node("Reshape", [rotated, constant(f"{x}.flat", np.array([0, -1]))], f"{x}.turned")

    def _angles(self, table: str, positions: str, x: str) -> str:
        """The rows of a table of cosines or sines for all tokens: [num_tokens, 1, n]."""
        rows = self.graph.node("Gather", [table, positions], f"{x}.{table}.tokens")
        axis = self.graph.constant(f"{x}.{table}.axis", np.array([1]))
        rows = self.graph.node("Unsqueeze", [rows, axis], f"{x}.{table}.rows")
        if self.layers.scheme.activations is np.float32:
            return rows
        return self.graph.node("Cast", [rows], f"{x}.{table}.cast", to=TensorProto.FLOAT16)

    def _number(self, name: str, value: float) -> str:
        return self.layers.vector(name, np.array(value, np.float32))

    def _attention(self, index: int) -> Attention:
        attention = self.decoder.layers[index].attention
        assert attention is not None
        return attention

    def _qkv(self, x: str, index: int) -> Linear:
        """Gates if there are any, queries, keys and values, concatenated."""
        # Queries have the format of gates in a quantized checkpoint, so that both are one segment.
        part, gate = f"layers.{index}.attention", ["gate"] if self._attention(index).gated else []
        own = ["key", "value"] if self._attention(index).cache_of is None else []
        return self._linear(x, part, *gate, "query", *own, output="qkv", **self._pre_norm(part))

    def _inner_mlp(self, x: str, index: int) -> Linear:
        """f(gate(x)) * up(x), or f(up(x)) without a gate."""
        part, activation = f"layers.{index}.mlp", self.decoder.layers[index].activation
        if self.decoder.layers[index].gate_cutoff is not None:
            return self._linear(x, part, "gate", "up", output="inner", **self._pre_norm(part))
        gated = self._has(f"{part}.gate")
        return self._linear(
            x,
            part,
            *(["gate"] if gated else []),
            "up",
            output="inner",
            activation=activation,
            xielu=self._xielu(part) if activation == "xielu" else None,
            gated=gated,
            **self._pre_norm(part),
        )

    def _mlp_and_experts(self, x: str, residual: str, index: int) -> str:
        """The residual plus the outputs of an MLP and of experts, both normed before the sum and after it."""
        part = f"layers.{index}.mlp"
        inner = self.layers.linear(self._inner_mlp(x, index))
        own = self.layers.linear(self._linear(inner, part, "down", output="down", kind="inner"))
        chosen = self._experts(x, "", index)
        own = self.layers.norm(own, self.norm(f"{part}.own_post_norm"))
        both = self.layers.norm(chosen, self.norm(f"{part}.experts_post_norm"), residual=own)
        return self.layers.norm(both, self.norm(f"{part}.post_norm"), residual=residual)

    def _experts(self, x: str, residual: str, index: int) -> str:
        """The residual, if any, plus the outputs of experts."""
        layer, part = self.decoder.layers[index], f"layers.{index}.mlp"
        assert layer.experts is not None
        assert layer.activation is not None

        def inner(expert: str, *, output: str) -> Linear:
            gated = self._has(f"{expert}.gate")
            roles = ["gate", "up"] if gated else ["up"]
            linear = self._linear(
                "", expert, *roles, output="inner", kind="inner", activation=layer.activation, gated=gated
            )
            return replace(linear, output=output)

        def down(expert: str, *, output: str) -> Linear:
            return replace(self._linear("", expert, "down", output="down", kind="inner"), output=output)

        name = f"{part}.experts"
        router = self.weights.load(f"{part}.router.weight")
        shared = None
        if layer.experts.shared:
            own = f"{part}.shared"
            shared = inner(own, output=f"{own}.inner"), down(own, output=f"{own}.down")
            if self._has(f"{own}.score"):
                router = np.concatenate([router, self.weights.load(f"{own}.score.weight")])
        return self.layers.experts(
            ExpertsLayer(
                x=x,
                output=name,
                described=layer.experts,
                activation=layer.activation,
                inner=lambda expert: inner(f"{name}.{expert}", output=f"{name}.inner"),
                down=lambda expert: down(f"{name}.{expert}", output=f"{name}.down"),
                router=router,
                router_bias=self.weights.optional(f"{part}.router.bias"),
                choice_bias=self.weights.optional(f"{part}.choice"),
                shared=shared,
                norm=self.norm(f"{part}.experts_norm" if layer.experts.beside_mlp else f"{part}.norm"),
                residual=residual,
                router_norm=self.weights.optional(f"{part}.router_norm.weight"),
                scales=self.weights.optional(f"{part}.expert_scales"),
            )
        )

    def _pre_norm(self, part: str) -> dict[str, Any]:
        """The norm before attention or MLP, and the kind of the linear layers that read it."""
        # Without a norm, rows are as heavy-tailed as the residual. One that a residual has is not smoothed.
        if not self._has(f"{part}.norm"):
            return {"kind": "inner"}
        kind = "inner" if self._has(f"{part}.laurel_left") else "normed"
        return {"kind": kind, "norm": self.norm(f"{part}.norm")}

    def _xielu(self, part: str) -> FloatArray:
        names = ("alpha_p", "alpha_n", "beta")
        above, below, beta = (self.weights.load(f"{part}.{name}").ravel() for name in names)
        return np.concatenate([above, beta + below, beta])

    def _add_residual(self, part: str, x: str, residual: str, role: str) -> str:
        """The residual plus the last linear layer of attention or MLP, which may be normed first."""
        has_norm = self._has(f"{part}.post_norm")
        linear = self._linear(x, part, role, output=role, kind="inner", residual="" if has_norm else residual)
        x = self.layers.linear(linear)
        if not has_norm:
            return x
        return self.layers.norm(x, self.norm(f"{part}.post_norm"), residual=residual)

    def _linear(
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
            else self._weight([f"{name}.weight" for name in names], gated=is_gated),
            bias=np.concatenate(biases) if biases else None,
            output=f"{part}.{output}",
            kind=kind,
            **options,
        )

    def _bias_or_zeros(self, name: str) -> FloatArray:
        bias = self.weights.optional(f"{name}.bias")
        return np.zeros(self.weights.rows(f"{name}.weight").shape[0], np.float32) if bias is None else bias

    def _weight(self, roles: list[str], *, gated: bool = False) -> Rows[np.float32] | StoredWeight:
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
    sizes = all(each.head_dim % 8 == 0 for each in decoder.attentions)
    sizes = sizes and all(dims % 16 == 0 for dims in rotary_dims)
    return sizes and not any(attention.alibi for attention in decoder.attentions)


def _is_kernel_norm(attention: Attention) -> bool:
    """Whether our attention norms queries and keys; then nothing can follow before the rotary positions."""
    return attention.head_norm == HeadNorm() and attention.clip is None


def _rotates_first(attention: Attention) -> bool:
    """Whether queries and keys are rotated before our attention, because their norm follows."""
    is_after = attention.head_norm is not None and attention.head_norm.after_rotary
    return is_after and attention.rotary is not None


def _is_prepared(attention: Attention) -> bool:
    """Whether operators of ONNX change queries, keys or values before our attention."""
    has_norm = attention.head_norm is not None and not _is_kernel_norm(attention)
    return has_norm or attention.clip is not None or attention.query_scale is not None


def _reads_positions(attention: Attention) -> bool:
    """Whether these operators read the positions of tokens."""
    return _rotates_first(attention) or attention.query_scale is not None


def paged_attention_function(*, rotary: bool, qk_norm: bool) -> FunctionProto:
    """Return an ONNX function for `genserve.PagedAttention` whose body is com.microsoft.PagedAttention.

    ONNX Runtime has com.microsoft.PagedAttention for CUDA. Sessions with genserve's library use our kernel,
    all other sessions the body.

    Args:
        rotary: whether callers pass tables of cosines and sines.
        qk_norm: whether callers pass norms of queries and keys.
    """
    # Our operator reads tables and norms in float32, and com.microsoft.PagedAttention in the type of the
    # query.
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
