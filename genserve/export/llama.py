"""Llama: the graph of decoders with RMS norms, rotary positions, grouped KV heads and a gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.family import Dimensions, Family
from genserve.export.graph import Graph
from genserve.export.layers import Layers

__all__ = ["LLAMA"]

_ROTARY_TYPES = ("default", "llama3")


def _dimensions(config: Mapping[str, Any]) -> Dimensions:
    try:
        known = LlamaConfig(**config)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ExportError(
            f"config.json is not that of a Llama model: {' '.join(str(error).split())}",
            remedy="download the checkpoint again",
        ) from error
    _require(known.head_dim % 16 == 0, f"head_dim {known.head_dim}", "multiples of 16")
    grouped = known.num_attention_heads % known.num_key_value_heads == 0
    _require(grouped, f"num_key_value_heads {known.num_key_value_heads}", "divisors of num_attention_heads")
    _require(known.hidden_act == "silu", f"hidden_act {known.hidden_act!r}", "silu")
    rotary = known.rope_parameters["rope_type"]
    _require(rotary in _ROTARY_TYPES, f"rope_scaling of type {rotary!r}", " and ".join(_ROTARY_TYPES))
    partial = known.rope_parameters.get("partial_rotary_factor", 1.0)
    _require(partial == 1.0, f"partial_rotary_factor {partial}", "1.0")
    _require("quantization_config" not in config, "quantised weights", "float32, float16 and bfloat16")
    return Dimensions(
        num_layers=known.num_hidden_layers,
        num_kv_heads=known.num_key_value_heads,
        head_dim=known.head_dim,
        vocab_size=known.vocab_size,
        context_length=known.max_position_embeddings,
    )


def _require(holds: bool, found: str, known: str) -> None:  # noqa: FBT001
    if not holds:
        raise ExportError(f"the config has {found}, which the llama graph has not", remedy=f"known: {known}")


def _write(checkpoint: Checkpoint, layers: Layers, advance: Callable[[int], None]) -> None:
    config = LlamaConfig(**checkpoint.config)
    writer = _Writer(checkpoint=checkpoint, config=config, layers=layers, graph=layers.graph)
    rotary = writer.inputs()
    vocabulary = layers.vocabulary("embed_tokens", checkpoint.tensor("model.embed_tokens.weight"))
    residual = layers.embedding("input_ids", vocabulary, "embeddings")
    x = writer.norm(residual, "model.layers.0.input_layernorm")
    for index in range(config.num_hidden_layers):
        layer, last = f"model.layers.{index}", index + 1 == config.num_hidden_layers
        x = writer.attention(x, layer, index=index, rotary=rotary)
        if last:
            # Past the last keys and values, only the rows that reach the head matter.
            x, residual = writer.chosen_rows(x), writer.chosen_rows(residual)
        x = writer.linear(x, [f"{layer}.self_attn.o_proj"], bias=config.attention_bias)
        x, residual = writer.add_norm(x, residual, f"{layer}.post_attention_layernorm")
        x = writer.mlp(x, layer)
        following = "model.norm" if last else f"model.layers.{index + 1}.input_layernorm"
        x, residual = writer.add_norm(x, residual, following)
        advance(1)
    if not config.tie_word_embeddings:
        vocabulary = layers.vocabulary("lm_head", checkpoint.tensor("lm_head.weight"))
    layers.head(x, vocabulary, "logits")
    layers.graph.output("logits", np.float32, ("num_rows", config.vocab_size))


LLAMA = Family(name="llama", dimensions=_dimensions, write=_write)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Adds the parts of one model; every method answers the name of the value it made."""

    checkpoint: Checkpoint
    config: LlamaConfig
    layers: Layers
    graph: Graph

    def inputs(self) -> list[str]:
        """Declare the inputs; returns the rotary tables, cosines and sines [context, head_dim / 2]."""
        self.graph.input("input_ids", np.int64, ("batch", "sequence"))
        self.graph.input("seqlens_k", np.int32, ("batch",))
        self.graph.input("total_len", np.int32, ())
        self.graph.input("rows", np.int64, ("num_rows",))
        positions = torch.arange(self.config.max_position_embeddings)[None]
        tables = LlamaRotaryEmbedding(self.config)(torch.zeros(1), positions)
        half = self.config.head_dim // 2  # both halves of a head turn by the same angles
        names = ("rotary.cos", "rotary.sin")
        return [
            self.layers.vector(name, table[0, :, :half].numpy())
            for name, table in zip(names, tables, strict=True)
        ]

    def attention(self, x: str, layer: str, *, index: int, rotary: Sequence[str]) -> str:
        """Attention over the KV cache, which it extends: [batch, sequence, heads * head_dim]."""
        past, present = (
            [f"{side}.{index}.{part}" for part in ("key", "value")] for side in ("past_key_values", "present")
        )
        shape = ("batch", self.config.num_key_value_heads, "max_len", self.config.head_dim)
        for before, after in zip(past, present, strict=True):
            self.graph.input(before, self.layers.numbers.activations, shape)
            self.graph.output(after, self.layers.numbers.activations, shape)
        names = [f"{layer}.self_attn.{part}_proj" for part in "qkv"]
        packed = self.linear(x, names, bias=self.config.attention_bias)
        return self.graph.node(
            "GroupQueryAttention",
            [packed, "", "", *past, "seqlens_k", "total_len", *rotary],
            f"{layer}.attention",
            *present,
            num_heads=self.config.num_attention_heads,
            kv_num_heads=self.config.num_key_value_heads,
            scale=self.config.head_dim**-0.5,
            do_rotary=1,
        )

    def mlp(self, x: str, layer: str) -> str:
        """down(silu(gate(x)) * up(x)), where silu(g) = g * sigmoid(g)."""
        gate, up, down = (f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        opened = self.linear(x, [gate], bias=self.config.mlp_bias)
        sigmoid = self.graph.node("Sigmoid", [opened], f"{layer}.mlp.sigmoid")
        silu = self.graph.node("Mul", [opened, sigmoid], f"{layer}.mlp.silu")
        raised = self.linear(x, [up], bias=self.config.mlp_bias)
        gated = self.graph.node("Mul", [silu, raised], f"{layer}.mlp.gated")
        return self.linear(gated, [down], bias=self.config.mlp_bias)

    def linear(self, x: str, names: Sequence[str], *, bias: bool) -> str:
        """The linear layers of those names, their outputs side by side."""
        weight = self._side_by_side(names, "weight")
        shift = self._side_by_side(names, "bias") if bias else None
        return self.layers.linear(x, weight, "+".join(names), bias=shift)

    def norm(self, x: str, name: str) -> str:
        """The norm of that name: x / rms(x) * weight."""
        epsilon = self.config.rms_norm_eps
        return self.graph.node("SimplifiedLayerNormalization", [x, self._gamma(name)], name, epsilon=epsilon)

    def add_norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        """The norm of `x + residual`, and that sum."""
        outputs, epsilon = (name, "", "", f"{name}.residual"), self.config.rms_norm_eps
        inputs = [x, residual, self._gamma(name)]
        self.graph.node("SkipSimplifiedLayerNormalization", inputs, *outputs, epsilon=epsilon)
        return name, outputs[-1]

    def chosen_rows(self, x: str) -> str:
        """The rows of a value [batch, sequence, n] whose logits are asked for: [num_rows, n]."""
        flat = self.graph.node("Flatten", [x], f"{x}.flat", axis=2)
        return self.graph.node("Gather", [flat, "rows"], f"{x}.rows")

    def _side_by_side(self, names: Sequence[str], kind: str) -> FloatArray:
        return np.concatenate([self.checkpoint.tensor(f"{name}.{kind}") for name in names])

    def _gamma(self, name: str) -> str:
        return self.layers.vector(f"{name}.weight", self.checkpoint.tensor(f"{name}.weight"))
