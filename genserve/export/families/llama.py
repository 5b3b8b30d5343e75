"""Llama, and the families with its layers: Mistral, SmolLM3, Qwen 2 and 3, Phi-3, Gemma 1 to 3."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder, Rotary
from genserve.export.decoder_weights import PackedTensor, TensorMap, add_one, half, packed, stacked
from genserve.export.family import Family, read_activation, read_rotary, require, rotary_limit

_LLAMA_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "layers.{}.attention.norm": "model.layers.{}.input_layernorm",
        "layers.{}.attention.query": "model.layers.{}.self_attn.q_proj",
        "layers.{}.attention.key": "model.layers.{}.self_attn.k_proj",
        "layers.{}.attention.value": "model.layers.{}.self_attn.v_proj",
        "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj",
        "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.gate": "model.layers.{}.mlp.gate_proj",
        "layers.{}.mlp.up": "model.layers.{}.mlp.up_proj",
        "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }
)


def _describe_llama(config: Any, *, partial_rotary: bool = False) -> Decoder:
    """The decoder of a config with Llama's fields, and optionally `layer_types` and `sliding_window`.

    `partial_rotary`: whether transformers honours `partial_rotary_factor` in this family.
    """
    head_dim = _head_dim(config)
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=rotary_limit(config),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        attentions=_attentions(config, partial_rotary=partial_rotary),
        attention_scale=head_dim**-0.5,
        norm="rms",
        norm_epsilon=config.rms_norm_eps,
        activation=read_activation(getattr(config, "hidden_activation", None) or config.hidden_act),
        tied=config.tie_word_embeddings,
    )


def _head_dim(config: Any) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


def _attentions(config: Any, *, partial_rotary: bool) -> tuple[Attention, ...]:
    num_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    default_type = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [default_type] * num_layers
    # 1: the layer has rotary positions, in spite of the field's name.
    rotary_layers = getattr(config, "no_rope_layers", None) or [1] * num_layers
    rotaries = {kind: _rotary(config, layer_type=kind, partial_rotary=partial_rotary) for kind in set(types)}
    return tuple(
        Attention(
            rotary=rotaries[kind] if is_rotary else None,
            window=window if kind == "sliding_attention" else None,
        )
        for kind, is_rotary in zip(types, rotary_layers, strict=True)
    )


def _rotary(config: Any, *, layer_type: str, partial_rotary: bool) -> Rotary:
    per_type = layer_type in config.rope_parameters
    parameters = config.rope_parameters[layer_type] if per_type else config.rope_parameters
    share = parameters.get("partial_rotary_factor", 1.0)
    require(partial_rotary or share == 1.0, found=f"partial_rotary_factor {share}", known="1.0")
    num_dims = int(_head_dim(config) * share)
    return read_rotary(config, num_dims=num_dims, layer_type=layer_type if per_type else None)


LLAMA = Family(
    name="llama",
    describe=_describe_llama,
    names=_LLAMA_NAMES,
    prefix="model.",
    ignored=("rotary_emb.inv_freq",),
)

_QWEN3_NAMES: TensorMap = MappingProxyType(
    {
        **_LLAMA_NAMES,
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    }
)

QWEN2 = Family(name="qwen2", describe=_describe_llama, names=_LLAMA_NAMES, prefix="model.")
QWEN3 = Family(name="qwen3", describe=_describe_llama, names=_QWEN3_NAMES, prefix="model.")

_PHI3_NAMES: TensorMap = MappingProxyType(
    {
        **_LLAMA_NAMES,
        **packed("model.layers.{}.self_attn.qkv_proj", stacked),
        "layers.{}.mlp.gate": PackedTensor(name="model.layers.{}.mlp.gate_up_proj", unpack=half(0)),
        "layers.{}.mlp.up": PackedTensor(name="model.layers.{}.mlp.gate_up_proj", unpack=half(1)),
    }
)

PHI3 = Family(
    name="phi3", describe=partial(_describe_llama, partial_rotary=True), names=_PHI3_NAMES, prefix="model."
)


def _norm(name: str) -> PackedTensor:
    """Return a norm of Gemma, which stores the difference from 1."""
    return PackedTensor(name=name, unpack=add_one)


_GEMMA_NAMES: TensorMap = MappingProxyType(
    {
        **_LLAMA_NAMES,
        "layers.{}.attention.norm": _norm("model.layers.{}.input_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.post_attention_layernorm"),
        "norm": _norm("model.norm"),
    }
)
# Gemma 2 also has norms after attention and MLP, and soft caps of its scores.
_GEMMA2_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA_NAMES,
        "layers.{}.attention.post_norm": _norm("model.layers.{}.post_attention_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.pre_feedforward_layernorm"),
        "layers.{}.mlp.post_norm": _norm("model.layers.{}.post_feedforward_layernorm"),
    }
)
# Gemma 3 has norms of each query and key head instead of the soft caps.
_GEMMA3_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA2_NAMES,
        "layers.{}.attention.query_norm": _norm("model.layers.{}.self_attn.q_norm"),
        "layers.{}.attention.key_norm": _norm("model.layers.{}.self_attn.k_norm"),
    }
)


def _describe_gemma(config: Any) -> Decoder:
    bidirectional = bool(getattr(config, "use_bidirectional_attention", False))
    require(not bidirectional, found="use_bidirectional_attention", known="attention to earlier tokens")
    return replace(_describe_llama(config), embedding_scale=math.sqrt(config.hidden_size))


def _describe_gemma2(config: Any) -> Decoder:
    return replace(
        _describe_gemma(config),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logits_softcap=config.final_logit_softcapping,
    )


GEMMA = Family(name="gemma", describe=_describe_gemma, names=_GEMMA_NAMES, prefix="model.")
GEMMA2 = Family(name="gemma2", describe=_describe_gemma2, names=_GEMMA2_NAMES, prefix="model.")
GEMMA3 = Family(name="gemma3", describe=_describe_gemma2, names=_GEMMA3_NAMES, prefix="model.")
