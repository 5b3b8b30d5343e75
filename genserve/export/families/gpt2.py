"""GPT-2: layer norms, learned positions, and linear layers stored as [inputs, outputs]."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder
from genserve.export.decoder_weights import PackedTensor, TensorMap, packed, transposed, transposed_stack
from genserve.export.family import Family, read_activation, require

_NAMES: TensorMap = MappingProxyType(
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


def _describe(config: Any) -> Decoder:
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
    describe=_describe,
    names=_NAMES,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
