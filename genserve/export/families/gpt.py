"""GPT-2, and the families with layer norms as it has: GPT-NeoX with Pythia, OPT, BLOOM."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder
from genserve.export.decoder_weights import (
    PackedTensor,
    TensorMap,
    interleaved,
    packed,
    skip_rows,
    transposed,
    transposed_stack,
)
from genserve.export.family import Family, read_activation, read_rotary, require

# Learned positions, and linear layers stored as [inputs, outputs].
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


# Partial rotary positions, attention and MLP in parallel.
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


# Learned positions, the first two of which belong to padding.
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


# A layer norm also of the embeddings, and ALiBi instead of positions.
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
