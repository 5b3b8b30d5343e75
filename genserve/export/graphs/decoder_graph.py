"""Decoder graph: writes the ONNX graph of any decoder, from its description and its weights.

A layer is one DecoderLayer node where that operator supports it, or else a PagedAttention node between linear
layers, with other operators for what neither supports. A layer with recurrent states has CausalConv and
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
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from genserve.export.decoder import Decoder, LinearAttention, PerLayer, ShortConv
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.graphs.altup_graph import AltUpWriter
from genserve.export.graphs.attention_graph import AttentionWriter, is_prepared, reads_positions
from genserve.export.graphs.layers import KERNEL_ACTIVATIONS, DecoderLayer, ExpertsLayer, Layers, Linear
from genserve.export.graphs.mixer_graph import MixerWriter
from genserve.export.graphs.onnx_graph import Dims
from genserve.export.graphs.role_writer import Kept, RoleWriter
from genserve.sampling.logits_array import FloatArray


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
    writer = _DecoderWriter(weights=weights, decoder=decoder, layers=layers, kv_cache=kv_cache, part=part)
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
class _DecoderWriter(RoleWriter):
    """Adds the parts of a decoder; every method returns the name of the value that it adds."""

    kv_cache: type[np.generic]

    @property
    def attention(self) -> AttentionWriter:
        """Adds attention."""
        return AttentionWriter(self, self.kv_cache)

    def inputs(self) -> None:
        """Declare the inputs except the cache, and add the tables that all layers share."""
        if self.is_first:
            self.graph.input("input_ids", np.int64, ("num_tokens",))
        if self.is_first or any(map(reads_positions, self.attentions)):
            self.graph.input("position_ids", np.int64, ("num_tokens",))
        self.graph.input("cumulative_sequence_length", np.int32, ("batch_plus_1",))
        self.graph.input("past_seqlens", np.int32, ("batch",))
        self.graph.input("block_table", np.int32, ("batch", "max_blocks"))
        if self.is_last:
            self.graph.input("logits_indices", np.int64, ("num_logits",))
        self.graph.input("attention_metadata", np.int32, (2,))
        layers = self.decoder.layers[self.part.start : self.part.stop]
        if any(layer.mixer is not None for layer in layers):
            self.graph.input("state_source", np.int32, ("batch",))
            self.graph.input("state_target", np.int32, ("batch",))
        self.attention.shared()

    def embedding(self) -> str:
        """The input of the first layer: scaled embeddings plus positions, normed."""
        x = self.layers.embedding("input_ids", self.weight(["embedding.weight"]), "embeddings")
        if self.decoder.embedding_scale is not None:
            scale = self.layers.vector("embeddings.scale", np.array(self.decoder.embedding_scale, np.float32))
            x = self.graph.node("Mul", [x, scale], "embeddings.scaled")
        if self.has("positions"):
            table = self.layers.vector("positions.weight", self.weights.load("positions.weight"))
            positions = self.graph.node("Gather", [table, "position_ids"], "embeddings.positions")
            x = self.graph.node("Add", [x, positions], "embeddings.positioned")
        if self.decoder.per_layer is not None:
            self._per_layer(x, self.decoder.per_layer)
        if self.decoder.altup is not None:
            return AltUpWriter(self).streams(x)
        return self.layers.norm(x, self.norm("embedding.norm")) if self.has("embedding.norm") else x

    def _per_layer(self, x: str, described: PerLayer) -> None:
        """Add the numbers of all layers, `per_layer.{index}` [num_tokens, size]."""
        node, constant = self.graph.node, self.graph.constant
        weight = self.weight(["per_layer.embedding.weight"])
        ids = "input_ids"
        if (rows := weight.shape[0]) < self.decoder.vocab_size:
            # The tokens of images and sound have the numbers of the first token.
            size, first = constant("per_layer.rows", np.array(rows)), constant("per_layer.first", np.array(0))
            is_known = node("Less", [ids, size], "per_layer.known")
            ids = node("Where", [is_known, ids, first], "per_layer.ids")
        own = self.layers.embedding(ids, weight, "per_layer.embeddings", name="per_layer.embedding")
        own = node("Mul", [own, self.number("per_layer.scale", described.embedding_scale)], "per_layer.own")
        linear = self.linear(x, "per_layer", "projection", output="projection", kind="inner")
        names = [f"per_layer.{index}" for index in range(len(self.decoder.layers))]
        norm = self.norm("per_layer.norm", num_groups=len(names))
        norm = replace(norm, epsilon=described.norm_epsilon)
        total = self.layers.norm(self.layers.linear(linear), norm, residual=own)
        self.split(total, names, [described.size] * len(names))

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
        past, present = self.attention.cache(index)

        def linears() -> Iterator[Linear]:
            yield self.attention.qkv(x, index)
            yield self.linear("", f"{layer}.attention", "output", output="output", kind="inner")
            yield self._inner_mlp(x, index)
            yield self.linear("", f"{layer}.mlp", "down", output="down", kind="inner")

        return self.layers.decoder_layer(
            DecoderLayer(
                x=x,
                linears=linears(),
                past=past,
                present=present,
                constants=self.attention.constants(index),
                attributes={
                    **self.attention.attributes(index),
                    "head_dim": self.attention_of(index).head_dim,
                    "parallel": int(described.parallel),
                    "norm": self.decoder.norm,
                    "epsilon": self.decoder.norm_epsilon,
                    "activation": described.activation or "",
                    "gated": int(self.has(f"{layer}.mlp.gate")),
                },
            )
        )

    def token_mixers(self, x: str, index: int) -> dict[str, str]:
        """The outputs of the parts of a layer that read several tokens, before their last linear layers."""
        layer = self.decoder.layers[index]
        parts = {} if layer.attention is None else {"attention": self.attention.heads(x, index)}
        match layer.mixer:
            case ShortConv() as mixer:
                parts["mixer"] = MixerWriter(self).short_conv(x, index, mixer)
            case LinearAttention() as mixer:
                parts["mixer"] = MixerWriter(self).linear_attention(x, index, mixer)
        return parts

    def after_token_mixers(self, parts: Mapping[str, str], residual: str, index: int) -> str:
        """The rest of a layer, up to the new residual."""
        layer, mixed = self.decoder.layers[index], residual
        for part, x in parts.items():
            is_latent = part == "attention" and self.attention_of(index).latent is not None
            heads = self.attention.latent_values(x, index) if is_latent else x
            mixed = self._add_residual(f"layers.{index}.{part}", heads, mixed, "output")
        if self.has(f"layers.{index}.attention.laurel_left"):
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
        writer = AltUpWriter(self)
        predicted, active = writer.predicted(streams, index)
        parts = self.token_mixers(active, index)
        if index == self.selecting_layer:
            parts = self.select_rows(parts)
            predicted, active = self.selected(predicted), self.selected(active)
        activated = self.after_token_mixers(parts, active, index)
        corrected, gate_input = writer.corrected(predicted, active, activated, index)
        return writer.with_others(corrected, self._from_per_layer(gate_input, index), index)

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
        linear = self.linear(x, part, "gate", output="gate", kind="inner")
        gate = self.layers.linear(replace(linear, activation=self.decoder.layers[index].activation))
        gated = self.graph.node("Mul", [gate, own], f"{part}.gated")
        outputs = self.layers.linear(self.linear(gated, part, "output", output="output", kind="inner"))
        return self.layers.norm(outputs, self.norm(f"{part}.post_norm"), residual=residual)

    def _with_laurel(self, x: str, mixed: str, part: str) -> str:
        """The residual after attention plus a low-rank layer of its normed input x, at half the power."""
        node, norm = self.graph.node, replace(self.norm(f"{part}.norm"), name=f"{part}.laurel_input")
        normed = self.layers.norm(x, norm)
        left = self.linear(normed, part, "laurel_left", output="laurel_left", kind="inner")
        right = self.linear(
            self.layers.linear(left), part, "laurel_right", output="laurel_right", kind="inner"
        )
        own = self.layers.linear(right)
        own = self.layers.norm(own, self.norm(f"{part}.laurel_norm"), residual=normed)
        total = node("Add", [mixed, own], f"{part}.with_laurel")
        return node("Mul", [total, self.number(f"{part}.laurel_share", 0.5**0.5)], f"{part}.halved")

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
        least = node("Mul", [deviation, self.number(f"{part}.cutoff", cutoff)], f"{part}.least")
        kept = node("Relu", [node("Sub", [centred, least], f"{part}.above")], f"{part}.kept")
        activation = self.decoder.layers[index].activation
        assert activation
        return self.layers.activated(kept, activation, factor=up)

    def is_one_operator(self, index: int) -> bool:
        """Whether DecoderLayer has all parts of a layer."""
        layer = self.decoder.layers[index]
        if layer.attention is None or layer.mixer is not None:
            return False
        norms = [self.has(f"layers.{index}.{part}.norm") for part in ("attention", "mlp")]
        post_norms = [self.has(f"layers.{index}.{part}.post_norm") for part in ("attention", "mlp")]
        return (
            all(norms)
            and not any(post_norms)
            and layer.experts is None
            and f"layers.{index}.attention.sinks" not in self.weights.roles
            and layer.activation in KERNEL_ACTIVATIONS
            and not is_prepared(layer.attention)
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
            x = AltUpWriter(self).joined(x)
        head = Linear(
            x=x,
            weight=self.weight(["head.weight"]),
            bias=self.weights.optional("head.bias"),
            output="logits",
            kind="head",
            norm=self.norm("norm"),
            softcap=self.decoder.logits_softcap,
        )
        self.layers.head(head, tied=self.decoder.tied and self.is_first)
        self.graph.output("logits", np.float32, ("num_logits", self.decoder.vocab_size))

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

    @property
    def _hidden(self) -> Dims:
        return "num_tokens", self.decoder.hidden_size

    def _inner_mlp(self, x: str, index: int) -> Linear:
        """f(gate(x)) * up(x), or f(up(x)) without a gate."""
        part, activation = f"layers.{index}.mlp", self.decoder.layers[index].activation
        if self.decoder.layers[index].gate_cutoff is not None:
            return self.linear(x, part, "gate", "up", output="inner", **self.pre_norm(part))
        gated = self.has(f"{part}.gate")
        return self.linear(
            x,
            part,
            *(["gate"] if gated else []),
            "up",
            output="inner",
            activation=activation,
            xielu=self._xielu(part) if activation == "xielu" else None,
            gated=gated,
            **self.pre_norm(part),
        )

    def _mlp_and_experts(self, x: str, residual: str, index: int) -> str:
        """The residual plus the outputs of an MLP and of experts, both normed before the sum and after it."""
        part = f"layers.{index}.mlp"
        inner = self.layers.linear(self._inner_mlp(x, index))
        own = self.layers.linear(self.linear(inner, part, "down", output="down", kind="inner"))
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
            gated = self.has(f"{expert}.gate")
            roles = ["gate", "up"] if gated else ["up"]
            linear = self.linear(
                "", expert, *roles, output="inner", kind="inner", activation=layer.activation, gated=gated
            )
            return replace(linear, output=output)

        def down(expert: str, *, output: str) -> Linear:
            return replace(self.linear("", expert, "down", output="down", kind="inner"), output=output)

        name = f"{part}.experts"
        router = self.weights.load(f"{part}.router.weight")
        shared = None
        if layer.experts.shared:
            own = f"{part}.shared"
            shared = inner(own, output=f"{own}.inner"), down(own, output=f"{own}.down")
            if self.has(f"{own}.score"):
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

    def _xielu(self, part: str) -> FloatArray:
        names = ("alpha_p", "alpha_n", "beta")
        above, below, beta = (self.weights.load(f"{part}.{name}").ravel() for name in names)
        return np.concatenate([above, beta + below, beta])

    def _add_residual(self, part: str, x: str, residual: str, role: str) -> str:
        """The residual plus the last linear layer of attention or MLP, which may be normed first."""
        has_norm = self.has(f"{part}.post_norm")
        linear = self.linear(x, part, role, output=role, kind="inner", residual="" if has_norm else residual)
        x = self.layers.linear(linear)
        if not has_norm:
            return x
        return self.layers.norm(x, self.norm(f"{part}.post_norm"), residual=residual)
