"""Families: how each model family describes and names its weights, and its architectures in config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder, Rotary
from genserve.export.decoder_weights import (
    PackedTensor,
    TensorMap,
    add_one,
    half,
    interleaved,
    packed,
    skip_rows,
    stacked,
    transposed,
    transposed_stack,
)
from genserve.export.family import Family, read_activation, read_rotary, require, rotary_limit

# GPT-2: learned positions, and linear layers stored as [inputs, outputs].
_GPT2_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.{}.attention.norm": "transformer.h.{}.ln_1",
        **packed("transformer.h.{}.attn.c_attn", transposed_stack),
        "layers.{}.attention.output": PackedTensor(name="transformer.h.{}.attn.c_proj", unpack=transposed),
        "layers.{}.mlp.norm": "transformer.h.{}.ln_2",
        "layers.{}.mlp.up": PackedTensor(name="transformer.h.{}.mlp.c_fc", unpack=transposed),
        "layers.{}.mlp.down": PackedTensor(name="transformer.h.{}.mlp.c_proj", unpack=transposed),
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
)


def _describe_gpt2(config: Any) -> Decoder:
    by_layer = config.scale_attn_by_inverse_layer_idx
    require(not by_layer, found="scale_attn_by_inverse_layer_idx", known="one scale for all layers")
    head_dim = config.n_embd // config.n_head
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=config.n_positions,
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_dim=head_dim,
        attentions=(Attention(),) * config.n_layer,
        attention_scale=head_dim**-0.5 if config.scale_attn_weights else 1.0,
        norm="layer",
        norm_epsilon=config.layer_norm_epsilon,
        activation=read_activation(config.activation_function),
        tied=config.tie_word_embeddings,
    )


GPT2 = Family(
    name="gpt2",
    describe=_describe_gpt2,
    names=_GPT2_NAMES,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)


# GPT-NeoX and Pythia: partial rotary positions, attention and MLP in parallel.
_GPT_NEOX_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "gpt_neox.embed_in",
        "layers.{}.attention.norm": "gpt_neox.layers.{}.input_layernorm",
        **packed("gpt_neox.layers.{}.attention.query_key_value", interleaved),
        "layers.{}.attention.output": "gpt_neox.layers.{}.attention.dense",
        "layers.{}.mlp.norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "layers.{}.mlp.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    }
)


def _describe_gpt_neox(config: Any) -> Decoder:
    head_dim = config.hidden_size // config.num_attention_heads
    num_dims = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    rotary = read_rotary(config, num_dims=num_dims)
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        attentions=(Attention(rotary=rotary),) * config.num_hidden_layers,
        attention_scale=head_dim**-0.5,
        norm="layer",
        norm_epsilon=config.layer_norm_eps,
        activation=read_activation(config.hidden_act),
        parallel=config.use_parallel_residual,
        tied=config.tie_word_embeddings,
    )


GPT_NEOX = Family(
    name="gpt_neox",
    describe=_describe_gpt_neox,
    names=_GPT_NEOX_NAMES,
    prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    renamed=MappingProxyType({"embed_out.": "lm_head."}),
)


# OPT: learned positions, the first two of which belong to padding.
_OPT_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "model.decoder.embed_tokens",
        "positions": PackedTensor(name="model.decoder.embed_positions", unpack=skip_rows(2)),
        "layers.{}.attention.norm": "model.decoder.layers.{}.self_attn_layer_norm",
        "layers.{}.attention.query": "model.decoder.layers.{}.self_attn.q_proj",
        "layers.{}.attention.key": "model.decoder.layers.{}.self_attn.k_proj",
        "layers.{}.attention.value": "model.decoder.layers.{}.self_attn.v_proj",
        "layers.{}.attention.output": "model.decoder.layers.{}.self_attn.out_proj",
        "layers.{}.mlp.norm": "model.decoder.layers.{}.final_layer_norm",
        "layers.{}.mlp.up": "model.decoder.layers.{}.fc1",
        "layers.{}.mlp.down": "model.decoder.layers.{}.fc2",
        "norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    }
)


def _describe_opt(config: Any) -> Decoder:
    first = config.do_layer_norm_before and not config._remove_final_layer_norm
    require(first, found="do_layer_norm_before false", known="norms before attention and MLP")
    projected = config.word_embed_proj_dim != config.hidden_size
    found = f"word_embed_proj_dim {config.word_embed_proj_dim}"
    require(not projected, found=found, known=f"hidden_size, {config.hidden_size}")
    head_dim = config.hidden_size // config.num_attention_heads
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        attentions=(Attention(),) * config.num_hidden_layers,
        attention_scale=head_dim**-0.5,
        norm="layer",
        norm_epsilon=1e-5,  # the default of torch.nn.LayerNorm; the config has no field for it
        activation=read_activation(config.activation_function),
        tied=config.tie_word_embeddings,
    )


OPT = Family(name="opt", describe=_describe_opt, names=_OPT_NAMES, prefix="model.")


# BLOOM: a layer norm also of the embeddings, and ALiBi instead of positions.
_BLOOM_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "layers.{}.attention.norm": "transformer.h.{}.input_layernorm",
        **packed("transformer.h.{}.self_attention.query_key_value", interleaved),
        "layers.{}.attention.output": "transformer.h.{}.self_attention.dense",
        "layers.{}.mlp.norm": "transformer.h.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "transformer.h.{}.mlp.dense_h_to_4h",
        "layers.{}.mlp.down": "transformer.h.{}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
)


def _describe_bloom(config: Any) -> Decoder:
    after_norm = config.apply_residual_connection_post_layernorm
    require(not after_norm, found="apply_residual_connection_post_layernorm", known="a plain residual")
    head_dim = config.hidden_size // config.n_head
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=getattr(config, "seq_length", 2048),  # of the training; ALiBi has no limit
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_dim=head_dim,
        attentions=(Attention(),) * config.n_layer,
        attention_scale=head_dim**-0.5,
        alibi=True,
        norm="layer",
        norm_epsilon=config.layer_norm_epsilon,
        activation="gelu_tanh",
        tied=config.tie_word_embeddings,
    )


BLOOM = Family(name="bloom", describe=_describe_bloom, names=_BLOOM_NAMES, prefix="transformer.")


# Llama, and the families with its layers: Mistral, SmolLM3, Qwen 2 and 3, Phi-3, Gemma.
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
    """Return the decoder of a config with Llama's fields, and optionally `layer_types` and `sliding_window`.

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


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "BloomForCausalLM": BLOOM,
        "GPT2LMHeadModel": GPT2,
        "GPTNeoXForCausalLM": GPT_NEOX,
        "Gemma2ForCausalLM": GEMMA2,
        "Gemma3ForCausalLM": GEMMA3,
        "GemmaForCausalLM": GEMMA,
        "LlamaForCausalLM": LLAMA,
        "MistralForCausalLM": LLAMA,
        "OPTForCausalLM": OPT,
        "Phi3ForCausalLM": PHI3,
        "Qwen2ForCausalLM": QWEN2,
        "Qwen3ForCausalLM": QWEN3,
        "SmolLM3ForCausalLM": LLAMA,
    }
)


def architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names, or else the usual one of its model type."""
    match config.get("architectures"):
        case [str(named), *_]:
            return named
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    usual: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), "unnamed")
    return usual


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config's architecture, or None."""
    return FAMILIES.get(architecture(config))
