"""The families that descend from GPT-2: GPT-NeoX, OPT, BLOOM, Falcon."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder, Layer
from genserve.export.decoder_weights import (
    TensorMap,
    TensorSource,
    grouped,
    packed,
    skip_rows,
    transposed,
    transposed_stack,
)
from genserve.export.families.family import Family, read_activation, read_rotary, require, rotary_limit


def full_attention(*, hidden_size: int, num_heads: int, scale: float | None = None) -> Attention:
    """Return multi-head attention; `scale`: multiplies query x key, None: 1 / sqrt(head_dim)."""
    head_dim = hidden_size // num_heads
    return Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=scale or head_dim**-0.5
    )


# GPT-2: learned positions, and linear layers stored as [inputs, outputs].
_GPT2_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.{}.attention.norm": "transformer.h.{}.ln_1",
        **packed("transformer.h.{}.attn.c_attn", transposed_stack),
        "layers.{}.attention.output": TensorSource(("transformer.h.{}.attn.c_proj",), unpack=transposed),
        "layers.{}.mlp.norm": "transformer.h.{}.ln_2",
        "layers.{}.mlp.up": TensorSource(("transformer.h.{}.mlp.c_fc",), unpack=transposed),
        "layers.{}.mlp.down": TensorSource(("transformer.h.{}.mlp.c_proj",), unpack=transposed),
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
)


def _describe_gpt2(config: Any) -> Decoder:
    by_layer = config.scale_attn_by_inverse_layer_idx
    require(not by_layer, found="scale_attn_by_inverse_layer_idx", known="one scale for all layers")
    scale = None if config.scale_attn_weights else 1.0
    attention = full_attention(hidden_size=config.n_embd, num_heads=config.n_head, scale=scale)
    activation = read_activation(config.activation_function)
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        context_length=config.n_positions,
        layers=(Layer(attention=attention, activation=activation),) * config.n_layer,
        norm="layer",
        norm_epsilon=config.layer_norm_epsilon,
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
        **packed("gpt_neox.layers.{}.attention.query_key_value", grouped),
        "layers.{}.attention.output": "gpt_neox.layers.{}.attention.dense",
        "layers.{}.mlp.norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "layers.{}.mlp.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    }
)


def _describe_gpt_neox(config: Any) -> Decoder:
    attention = full_attention(hidden_size=config.hidden_size, num_heads=config.num_attention_heads)
    num_dims = int(attention.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    attention = replace(attention, rotary=read_rotary(config, num_dims=num_dims))
    activation, parallel = read_activation(config.hidden_act), config.use_parallel_residual
    layer = Layer(attention=attention, activation=activation, parallel=parallel)
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.max_position_embeddings,
        layers=(layer,) * config.num_hidden_layers,
        norm="layer",
        norm_epsilon=config.layer_norm_eps,
        tied=config.tie_word_embeddings,
    )


GPT_NEOX = Family(
    name="gpt_neox",
    describe=_describe_gpt_neox,
    names=_GPT_NEOX_NAMES,
    prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias"),
    renamed=MappingProxyType({"embed_out.": "lm_head."}),
)


# OPT: learned positions, the first two of which belong to padding.
_OPT_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "model.decoder.embed_tokens",
        "positions": TensorSource(("model.decoder.embed_positions",), unpack=skip_rows(2)),
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
    attention = full_attention(hidden_size=config.hidden_size, num_heads=config.num_attention_heads)
    layer = Layer(attention=attention, activation=read_activation(config.activation_function))
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.max_position_embeddings,
        layers=(layer,) * config.num_hidden_layers,
        norm="layer",
        norm_epsilon=1e-5,  # the default of torch.nn.LayerNorm; the config has no field for it
        tied=config.tie_word_embeddings,
    )


OPT = Family(name="opt", describe=_describe_opt, names=_OPT_NAMES, prefix="model.")


# BLOOM: a layer norm of the embeddings too, and ALiBi instead of positions.
_BLOOM_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "layers.{}.attention.norm": "transformer.h.{}.input_layernorm",
        **packed("transformer.h.{}.self_attention.query_key_value", grouped),
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
    attention = full_attention(hidden_size=config.hidden_size, num_heads=config.n_head)
    layer = Layer(attention=replace(attention, alibi=True), activation="gelu_tanh")
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=getattr(config, "seq_length", 2048),  # the length in training; ALiBi has no limit
        layers=(layer,) * config.n_layer,
        norm="layer",
        norm_epsilon=config.layer_norm_epsilon,
        tied=config.tie_word_embeddings,
    )


BLOOM = Family(name="bloom", describe=_describe_bloom, names=_BLOOM_NAMES, prefix="transformer.")


# Falcon: BLOOM with rotary positions, shared keys, and attention and MLP in parallel after one or two norms.
_FALCON_NAMES: TensorMap = MappingProxyType(
    {
        **_BLOOM_NAMES,
        "layers.{}.attention.norm": TensorSource(
            ("transformer.h.{}.ln_attn", "transformer.h.{}.input_layernorm")
        ),
        "layers.{}.mlp.norm": TensorSource(
            (
                "transformer.h.{}.ln_mlp",
                "transformer.h.{}.post_attention_layernorm",
                "transformer.h.{}.input_layernorm",
            )
        ),
    }
)


def _describe_falcon(config: Any) -> Decoder:
    # transformers rounds them to bfloat16, so no graph would agree with it.
    require(not config.alibi, found="alibi", known="rotary positions")
    parallel = config.parallel_attn or not config.new_decoder_architecture
    require(parallel, found="parallel_attn false", known="true with new_decoder_architecture")
    attention = full_attention(hidden_size=config.hidden_size, num_heads=config.num_attention_heads)
    if config.new_decoder_architecture:
        attention = replace(attention, num_kv_heads=config.num_kv_heads)
    elif config.multi_query:
        attention = replace(attention, num_kv_heads=1)
    rotary = read_rotary(config, num_dims=attention.head_dim)
    layer = Layer(
        attention=replace(attention, rotary=rotary),
        activation=read_activation(config.activation),
        parallel=config.parallel_attn,
    )
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=rotary_limit(config),
        layers=(layer,) * config.num_hidden_layers,
        norm="layer",
        norm_epsilon=config.layer_norm_epsilon,
        tied=config.tie_word_embeddings,
    )


FALCON = Family(
    name="falcon",
    describe=_describe_falcon,
    names=MappingProxyType(
        {role: source for role, source in _FALCON_NAMES.items() if role != "embedding.norm"}
    ),
    prefix="transformer.",
)
